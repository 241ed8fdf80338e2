"""The simulated engine in virtual time: what it gives, when, and that it gives it again; turns are samples of their own."""

import math
import statistics
import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import PtlPoint
from streamrl.spec.generators import SimulatedEngineSpec as Spec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Delta
from streamrl_workers.generator.engines.simulated import WRONG_TEXT, SimulatedEngine
from streamrl_workers.weights.hashing import TensorBytes
from support import engine_requests

WEIGHTS = {"w": TensorBytes("uint8", (5,), memoryview(b"12345"))}
CURVE = (PtlPoint(batch=1, milliseconds=10.0), PtlPoint(batch=5, milliseconds=30.0))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(
    *,
    slots: int = 8,
    clock: Clock | None = None,
    time_scale: float = 1.0,
    mean_tokens: float = 32.0,
    sigma: float = 0.5,
    correct_percent: int = 50,
) -> SimulatedEngine:
    spec = Spec(
        latency=CURVE, timeScale=time_scale, meanTokens=mean_tokens, sigma=sigma, correctPercent=correct_percent
    )
    engine = SimulatedEngine(spec=spec, slots=slots, seed=1, clock=clock or Clock())
    engine.load_weights(version=3, tensors=WEIGHTS)
    return engine


def request(number: int, *, prompt: str = " 42 ", max_tokens: int = 100, **fields: object) -> pb.SampleRequest:
    return engine_requests.request(
        number, prompt, limits=engine_requests.sampling(max_tokens=max_tokens), pinned=number % 2 == 0, **fields
    )


def run(engine: SimulatedEngine, clock: Clock) -> list[Delta]:
    """Step until idle, waiting as told."""
    deltas: list[Delta] = []
    while engine.active():
        clock.now_s += engine.step_seconds()
        deltas += engine.step()
    return deltas


def joined(deltas: list[Delta]) -> dict[int, tuple[list[int], list[float]]]:
    by_request: dict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    for delta in deltas:
        by_request[delta.lease][0].extend(delta.tokens)
        by_request[delta.lease][1].extend(delta.logprobs)
    return dict(by_request)


@pytest.mark.parametrize(("active", "milliseconds"), [(1, 10), (2, 15), (3, 20), (5, 30), (8, 45)])
def test_the_curve_is_linear_between_its_points_and_goes_on_behind_the_last(active: int, milliseconds: float) -> None:
    engine = make(clock=Clock(), mean_tokens=1000, sigma=0)
    engine.add([request(number) for number in range(active)])
    assert engine.step_seconds() == pytest.approx(milliseconds / 1e3)


def test_time_goes_by_the_batch_of_the_moment() -> None:
    clock = Clock()
    engine = make(clock=clock, mean_tokens=1000, sigma=0)
    engine.add([request(0, max_tokens=2), request(1, max_tokens=6)])
    assert engine.step() == []
    assert engine.step_seconds() == pytest.approx(0.015)
    clock.now_s += 0.015
    assert [len(d.tokens) for d in engine.step()] == [1, 1]
    clock.now_s += 0.015 + 0.020  # the first ends; the second goes on alone, at 10 ms a token
    assert [(len(d.tokens), d.finish_reason) for d in engine.step()] == [(1, "length"), (3, None)]
    assert (engine.active(), engine.free(), engine.pinned_active()) == (1, 7, 0)


def test_an_idle_engine_saves_up_no_time() -> None:
    clock = Clock()
    engine = make(clock=clock, mean_tokens=50, sigma=0)
    clock.now_s += 1000
    engine.add([request(0)])
    assert engine.step() == []


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8),
    naps=st.lists(st.floats(0, 0.3), max_size=30),
    time_scale=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_each_ends_once_and_alike_whatever_the_pace(seeds: list[int], naps: list[float], time_scale: float) -> None:
    clock = Clock()
    engine = make(clock=clock, time_scale=time_scale)
    engine.add([request(i, seed=seed) for i, seed in enumerate(seeds)])
    deltas: list[Delta] = []
    for nap in naps:
        clock.now_s += nap
        deltas += engine.step()
    deltas += run(engine, clock)
    assert sorted(d.lease for d in deltas if d.finish_reason is not None) == list(range(len(seeds)))
    assert all((d.text is None) == (d.finish_reason is None) and d.version == 3 for d in deltas)
    alone = make(time_scale=0)
    for i, seed in enumerate(seeds):
        alone.add([request(i, seed=seed)])
        assert joined(alone.step())[i] == joined(deltas)[i]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), share=st.floats(0, 1), prompt=st.text(max_size=20))
def test_a_prefix_continues_to_the_same_tokens(seed: int, share: float, prompt: str) -> None:
    engine = make(time_scale=0, mean_tokens=20_000, sigma=1)
    engine.add([request(0, seed=seed, prompt=prompt, max_tokens=30_000)])
    whole = engine.step()[0]
    held = int(share * len(whole.tokens))
    rest = (
        engine.add([request(1, seed=seed, prompt=prompt, prefix=whole.tokens[:held], max_tokens=30_000)])
        or engine.step()
    )
    assert len(rest) == 1
    assert rest[0].tokens == whole.tokens[held:]
    assert rest[0].logprobs == whole.logprobs[held:]
    assert (rest[0].finish_reason, rest[0].text) == (whole.finish_reason, whole.text)
    assert rest[0].prompt_tokens == tuple(prompt.encode())


def test_lengths_and_verdicts_follow_the_spec() -> None:
    engine = make(slots=4000, time_scale=0, mean_tokens=40, sigma=0.8, correct_percent=30)
    engine.add([request(i, seed=i, prompt=f" {i % 1000} ", max_tokens=10_000) for i in range(4000)])
    done = engine.step()
    lengths = sorted(len(d.tokens) for d in done)
    assert 37 < statistics.median(lengths) < 43
    assert lengths[-1] > 250
    correct = [d for d in done if d.text != WRONG_TEXT]
    assert 0.27 < len(correct) / 4000 < 0.33
    assert all(d.text == str(d.lease % 1000) for d in correct)


def test_samples_of_a_prompt_resemble_each_other() -> None:
    engine = make(slots=4000, time_scale=0, sigma=1.0, mean_tokens=100)
    engine.add([request(i, seed=i, prompt=str(i // 2), max_tokens=100_000) for i in range(4000)])
    length = {d.lease: math.log(len(d.tokens)) for d in engine.step()}
    pairs = [(length[i], length[i + 1]) for i in range(0, 4000, 2)]
    correlation = statistics.correlation(*zip(*pairs, strict=True))
    assert 0.4 < correlation < 0.6


def test_what_max_tokens_cuts_is_wrong() -> None:
    engine = make(time_scale=0, correct_percent=100, mean_tokens=50, sigma=0)
    engine.add([request(0, max_tokens=10), request(1)])
    assert [(d.finish_reason, d.text, len(d.tokens)) for d in engine.step()] == [
        ("length", WRONG_TEXT, 10),
        ("stop", "42", 50),
    ]


def test_cancel_frees_slots() -> None:
    engine = make()
    engine.add([request(i) for i in range(4)])
    engine.cancel([0, 1, 77])
    assert (engine.active(), engine.free(), engine.pinned_active()) == (2, 6, 1)


def run_alone(number: int, **fields: object) -> list[Delta]:
    """The deltas of one request, all at once."""
    engine = make(slots=1, time_scale=0.0, mean_tokens=12.0, sigma=1.0)
    deltas = [*engine.add([request(number, **fields)]), *engine.step()]
    assert engine.active() == 0
    return deltas


@given(seed=st.integers(0, 2**64 - 1), observation=st.text(max_size=8), cut=st.floats(0, 1))
def test_a_turn_is_the_same_however_it_is_cut(seed: int, observation: str, cut: float) -> None:
    (first,) = run_alone(0, seed=seed)
    (turn,) = run_alone(1, seed=seed, prefix=first.tokens, context_tokens=len(first.tokens), observation=observation)
    assert turn.observation_tokens == tuple(observation.encode())
    assert 1 <= len(turn.tokens) <= 100
    context = (*first.tokens, *turn.observation_tokens)
    had = turn.tokens[: int(cut * (len(turn.tokens) - 1))]
    (rest,) = run_alone(2, seed=seed, prefix=(*context, *had), context_tokens=len(context))
    assert (*had, *rest.tokens) == turn.tokens
    assert (rest.text, rest.finish_reason, rest.observation_tokens) == (turn.text, turn.finish_reason, ())


def test_turns_differ() -> None:
    (first,) = run_alone(0)
    lengths = {len(run_alone(1, prefix=(0,) * context, context_tokens=context)[0].tokens) for context in range(1, 30)}
    assert len(lengths) > 5
    assert run_alone(0)[0] == first


def test_an_unknown_engine_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'vlm' is unknown, known are: hf, simulated"):
        engine_kind("vlm")


def test_the_simulated_engine_needs_no_torch() -> None:
    code = (
        "import sys; from streamrl.spec.generators import SimulatedEngineSpec as S; from streamrl_workers.generator.engines import EngineOptions, create_simulated;"
        "create_simulated(EngineOptions(spec=S(slots=2))); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@given(pauses=st.lists(st.tuples(st.floats(0.0, 0.05), st.floats(0.0, 100.0), st.booleans()), max_size=6))
def test_a_pause_takes_as_long_as_it_takes_and_gives_nothing(pauses: list[tuple[float, float, bool]]) -> None:
    """Whatever the moments: the same tokens, and as much later as the pauses were long."""

    def ended(pauses: list[tuple[float, float, bool]]) -> tuple[float, dict[int, tuple[int, ...]]]:
        clock = Clock()
        engine = make(clock=clock, mean_tokens=60.0, sigma=0.0)  # longer than all that is between the pauses
        engine.add([request(number) for number in range(3)])
        deltas: list[Delta] = []
        for busy_s, paused_s, said_twice in pauses:
            clock.now_s += busy_s
            deltas += engine.step()
            for _ in range(1 + said_twice):
                engine.pause(paused=True)
            clock.now_s += paused_s
            engine.pause(paused=False)
            assert not engine.step()
        tokens: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for delta in [*deltas, *run(engine, clock)]:
            tokens[delta.lease] += delta.tokens
        return clock.now_s, tokens

    expected_s, expected = ended([])
    found_s, found = ended(pauses)
    assert found == expected
    assert found_s == pytest.approx(expected_s + sum(paused_s for _, paused_s, _ in pauses))
