"""Measuring with an engine in virtual time: what comes out is what the engine takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import SimulatedEngineSpec as SimulatedSpec
from streamrl.spec.training import SimulatedTrainer
from streamrl_cli.profiling import timing
from streamrl_workers.generator.engines.base import Delta
from streamrl_workers.generator.engines.simulated import SimulatedEngine
from streamrl_workers.stream.packing import count_32, pack_int32
from streamrl_workers.trainer.engines.simulated import SimulatedTrainEngine
from support.engine_requests import sampling

SAMPLING = sampling(max_tokens=1000)
LATENCY = [{"batch": 1, "milliseconds": 2.0}, {"batch": 8, "milliseconds": 9.0}]


@dataclass
class VirtualTime:
    """A clock that only sleeping moves."""

    now: float = 0.0

    def now_s(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def clock(self) -> timing.WallClock:
        return timing.WallClock(now_s=self.now_s, sleep=self.sleep)


def engine(time: VirtualTime, *, slots: int = 8, mean_tokens: float = 40.0) -> SimulatedEngine:
    spec = SimulatedSpec.model_validate({"latency": LATENCY, "meanTokens": mean_tokens, "slots": slots}, strict=False)
    made = SimulatedEngine(spec=spec, slots=slots, seed=1, clock=time.now_s)
    made.load_weights(version=0, tensors={})
    return made


def source(**changes: object) -> timing.RequestSource:
    return timing.RequestSource(**{"prompts": ["one", "two"], "sampling": SAMPLING, "seed": 3, **changes})  # type: ignore[arg-type] # the test's own


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 2.0), (4, 5.0), (8, 9.0)])
def test_a_steps_time_is_the_engines_also_while_sequences_end(batch: int, milliseconds: float) -> None:
    time = VirtualTime()
    found = timing.measure_batch(
        engine(time, mean_tokens=10.0), source(), batch=batch, windows=4, deadline_s=60.0, clock=time.clock
    )
    assert [1e3 * seconds for seconds in found.seconds] == pytest.approx([milliseconds] * 4)
    assert found.steps >= 4 * timing.WINDOW_STEPS


class ByItself:
    """An engine like vLLM: a step of 4 ms for all that it has, whether it is asked or not, and outputs that come sequence by sequence."""

    STEP_S = 0.004
    slots = 8

    def __init__(self, time: VirtualTime) -> None:
        self.time, self.left, self.waiting = time, dict[int, int](), list[Delta]()
        self.next_s = self.STEP_S

    def active(self) -> int:
        return len(self.left)

    def free(self) -> int:
        return self.slots - len(self.left)

    def step_seconds(self) -> float:
        return 0.0

    def add(self, requests: Sequence[pb.SampleRequest]) -> list[Delta]:
        self.time.sleep(0.001)  # the caller's own work
        self.left |= {request.lease: 5 + request.lease % 7 for request in requests}
        return []

    def step(self) -> list[Delta]:
        self.time.sleep(max(0.0, self.next_s - self.time.now) if not self.waiting else 0.0)
        while self.next_s <= self.time.now:
            self.next_s += self.STEP_S
            for lease in list(self.left):
                self.left[lease] -= 1
                ended = "length" if not self.left[lease] else None
                self.waiting.append(Delta(lease=lease, tokens=(1,), logprobs=(0.0,), version=0, finish_reason=ended))
                if ended:
                    del self.left[lease]
        taken, self.waiting = self.waiting[:3], self.waiting[3:]  # not all of a step at once
        return taken

    def cancel(self, leases: Sequence[int]) -> None:
        self.left.clear()


def test_an_engine_that_works_by_itself_is_timed_by_all_of_its_time() -> None:
    time = VirtualTime()
    found = timing.measure_batch(
        ByItself(time),  # type: ignore[arg-type] # all that is called
        source(),
        batch=8,
        windows=4,
        deadline_s=60.0,
        clock=time.clock,
        by_itself=True,
    )
    assert len(found.seconds) == 4
    for seconds in found.seconds:
        assert 0.004 <= seconds < 0.006, "sequences that end leave their places free for less than a step"


def test_the_deadline_ends_a_point_with_what_it_has() -> None:
    time = VirtualTime()
    found = timing.measure_batch(
        engine(time, mean_tokens=1e5), source(), batch=1, windows=1000, deadline_s=1.0, clock=time.clock
    )
    assert 1 <= len(found.seconds) <= 10
    assert time.now <= 1.1


def test_no_step_within_the_deadline_is_told() -> None:
    time = VirtualTime()
    with pytest.raises(timing.TooSlowError, match="no step of 8 sequences within"):
        timing.measure_batch(engine(time), source(), batch=8, windows=1, deadline_s=0.001, clock=time.clock)


def test_answers_are_taken_to_their_end_with_more_of_them_than_slots() -> None:
    time = VirtualTime()
    answers = timing.measure_answers(engine(time), source(), samples=20, deadline_s=60.0, clock=time.clock)
    assert (len(answers.tokens), answers.unfinished) == (20, 0)
    again = timing.measure_answers(engine(time, slots=3), source(), samples=20, deadline_s=60.0, clock=time.clock)
    assert sorted(map(len, again.tokens)) == sorted(map(len, answers.tokens)), "lengths follow prompt and seed alone"


def test_answers_that_the_deadline_cuts_off_are_counted() -> None:
    time = VirtualTime()
    answers = timing.measure_answers(
        engine(time, mean_tokens=500.0), source(), samples=8, deadline_s=1.0, clock=time.clock
    )
    assert answers.unfinished > 0
    assert all(len(tokens) <= 112 for tokens in answers.tokens)


@dataclass
class Refusing:
    """An engine that refuses every prompt."""

    ended: list[int] = field(default_factory=list)

    def active(self) -> int:
        return 0

    def free(self) -> int:
        return 4

    def add(self, requests: Sequence[pb.SampleRequest]) -> list[Delta]:
        return [
            Delta(
                lease=one.lease,
                tokens=(),
                logprobs=(),
                version=0,
                finish_reason="error",
                text="",
                prompt_tokens=(),
                error="the prompt has no tokens",
            )
            for one in requests
        ]


def test_a_prompt_that_cannot_be_answered_is_the_users_mistake() -> None:
    time = VirtualTime()
    with pytest.raises(UserError, match="prompts: cannot be answered: the prompt has no tokens"):
        timing.measure_batch(Refusing(), source(), batch=1, windows=1, deadline_s=1.0, clock=time.clock)  # type: ignore[arg-type] # all that is called


def test_requests_begin_within_answers_and_have_ids_of_their_own() -> None:
    asked = source()
    first = asked.take(2)
    later = asked.starting_within([(1, 2, 3), (), (4,)]).take(50)
    assert [request.prefix_tokens for request in first] == [b"", b""]
    assert {request.prefix_tokens for request in later} == {pack_int32(part) for part in ((), (1,), (1, 2))}
    ids = [request.lease for request in (*first, *later)]
    assert ids == list(range(52))


def shape(**changes: object) -> timing.Shape:
    given = {"group_size": 4, "prompt_tokens": 5, "lengths": (10, 20, 30), "vocabulary": 50, "seed": 2, **changes}
    return timing.Shape(**given)  # type: ignore[arg-type] # the test's own


def trainer(time: VirtualTime, *, step_s: float = 1.0, token_s: float = 0.01) -> SimulatedTrainEngine:
    spec = SimulatedTrainer.model_validate({"secondsPerStep": step_s, "secondsPerToken": token_s})
    return SimulatedTrainEngine(spec=spec, seed=0, sleep=time.sleep)


def steps(time: VirtualTime, engine: SimulatedTrainEngine, **given: object) -> list[timing.MeasuredSteps]:
    arguments: dict[str, object] = {
        "counts": (1, 4, 16),
        "repeats": 3,
        "deadline_s": 100.0,
        "now_s": time.now_s,
        **given,
    }
    return list(timing.measure_steps(engine, shape(), **arguments))  # type: ignore[arg-type] # the test's own


def test_a_training_steps_time_is_the_engines() -> None:
    time = VirtualTime()
    found = steps(time, trainer(time))
    assert [(one.groups, one.samples, len(one.seconds)) for one in found] == [(1, 4, 3), (4, 16, 3), (16, 64, 3)]
    for one in found:
        assert one.seconds == pytest.approx([1.0 + 0.01 * one.tokens] * 3)
        assert one.tokens == pytest.approx(20 * one.samples, rel=0.1)


def test_steps_that_would_overrun_the_deadline_are_left_out() -> None:
    time = VirtualTime()
    found = steps(time, trainer(time, step_s=0.0, token_s=0.01), deadline_s=5.0)
    assert [one.groups for one in found] == [1, 4]
    assert len(found[1].seconds) == 1, "a second one of 3.2 s would end after the deadline"


def test_a_first_step_that_is_too_slow_is_told() -> None:
    time = VirtualTime()
    with pytest.raises(timing.TooSlowError, match="a step of 1 groups takes more than"):
        steps(time, trainer(time), deadline_s=0.1)


def test_made_up_groups_are_whole_and_each_teaches_something() -> None:
    groups = timing.make_groups(shape(), groups=3, step=7)
    lengths = [count_32(one.tokens) for group in groups for one in group.samples]
    assert sum(lengths) == pytest.approx(12 * 20, rel=0.1)
    assert lengths != sorted(lengths)
    for group in groups:
        assert {one.reward for one in group.samples} == {0.0, 1.0}
        for one in group.samples:
            assert count_32(one.prompt_tokens) == 5
            assert count_32(one.tokens) == count_32(one.logprobs) == sum(span.tokens for span in one.spans)
            assert [span.step for span in one.spans] == [7]
    size: Callable[[pb.Group], int] = lambda group: sum(one.ByteSize() for one in group.samples)  # noqa: E731
    assert [group.size_bytes for group in groups] == [size(group) for group in groups]
