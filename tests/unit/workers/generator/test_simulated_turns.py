"""Turns of the simulated engine: each is a sample of its own, and a lost one goes on as it was."""

from hypothesis import given
from hypothesis import strategies as st

from streamrl.spec.generators import PtlPoint
from streamrl.spec.generators import SimulatedEngineSpec as Spec
from streamrl_workers.generator.engines.base import Delta, SampleRequest, SamplingParams, TensorBytes
from streamrl_workers.generator.engines.simulated import SimulatedEngine

CURVE = (PtlPoint(batch=1, milliseconds=1.0),)
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=None, max_tokens=40, stop=())


def run(
    number: int, *, prefix: tuple[int, ...] = (), context: int = 0, observation: str = "", seed: int = 0
) -> list[Delta]:
    """The deltas of one request, all at once."""
    spec = Spec(latency=CURVE, timeScale=0.0, meanTokens=12.0, sigma=1.0)
    engine = SimulatedEngine(spec=spec, slots=1, seed=1)
    engine.load_weights(version=3, tensors={"w": TensorBytes("uint8", (1,), memoryview(b"1"))})
    request = SampleRequest(
        request_id=number,
        group_id=0,
        prompt="p",
        prefix_tokens=prefix,
        sampling=SAMPLING,
        seed=seed,
        pinned=False,
        context_tokens=context,
        observation=observation,
    )
    deltas = [*engine.add([request]), *engine.step()]
    assert engine.active() == 0
    return deltas


@given(seed=st.integers(0, 2**64 - 1), observation=st.text(max_size=8), cut=st.floats(0, 1))
def test_a_turn_is_the_same_however_it_is_cut(seed: int, observation: str, cut: float) -> None:
    (first,) = run(0, seed=seed)
    (turn,) = run(1, seed=seed, prefix=first.tokens, context=len(first.tokens), observation=observation)
    assert turn.observation_tokens == tuple(observation.encode())
    assert 1 <= len(turn.tokens) <= SAMPLING.max_tokens
    context = (*first.tokens, *turn.observation_tokens)
    had = turn.tokens[: int(cut * (len(turn.tokens) - 1))]
    (rest,) = run(2, seed=seed, prefix=(*context, *had), context=len(context))
    assert (*had, *rest.tokens) == turn.tokens
    assert (rest.text, rest.finish_reason, rest.observation_tokens) == (turn.text, turn.finish_reason, ())


def test_turns_differ() -> None:
    (first,) = run(0)
    lengths = {len(run(1, prefix=(0,) * context, context=context)[0].tokens) for context in range(1, 30)}
    assert len(lengths) > 5
    assert run(0)[0] == first
