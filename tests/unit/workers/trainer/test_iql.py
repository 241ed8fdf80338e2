"""IQL beside its formulas (`test_algorithms.py`): what V becomes, a good first turn that pays late, a resumed run."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.stream.packing import pack_int32
from streamrl_workers.trainer.engines.forward import value_loss
from support.tiny_trainer import assert_resumes, tiny_engine, train_steps
from support.trainer_groups import trainer_spec

PROMPT, FIRST, OTHER, HEARD, GOOD, BAD = 1, 2, 3, 4, 5, 6
"""Tokens of the game."""
STEPS, BETA = 60, 0.1


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def slope(value: float, returns: list[float], expectile: float) -> float:
    """Of the loss of one value that is to fit all of these."""
    values_N = torch.full((len(returns),), value, dtype=torch.float64, requires_grad=True)
    errors_N = value_loss(
        values_N,
        start_N=values_N.detach(),
        returns_N=torch.tensor(returns, dtype=torch.float64),
        value_clip=float("inf"),
        expectiles_H=[expectile],
    )
    errors_N.sum().backward()
    assert values_N.grad is not None
    return float(values_N.grad.sum())


def fitted(returns: list[float], expectile: float) -> float:
    """Where the loss, which is convex, has no slope."""
    low, high = min(returns), max(returns)
    for _ in range(32):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle, returns, expectile) > 0 else (middle, high)
    return (low + high) / 2


@settings(max_examples=25)  # each takes hundreds of backward passes
@given(returns=st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=8))
def test_v_is_the_mean_at_one_half_and_goes_to_the_best(returns: list[float]) -> None:
    assert fitted(returns, 0.5) == pytest.approx(sum(returns) / len(returns), abs=1e-6)
    rising = [fitted(returns, expectile) for expectile in (0.1, 0.5, 0.7, 0.9, 0.999)]
    assert rising == pytest.approx(sorted(rising), abs=1e-6)
    assert rising[-1] == pytest.approx(max(returns), abs=0.2)


def sample(prompt: list[int], *turns: int, reward: float = 0.0) -> pb.Sample:
    """Turns of one token, with something heard in between."""
    tokens, segments = [turns[0]], [pb.Segment(tokens=1)]
    for turn in turns[1:]:
        tokens += [HEARD, turn]
        segments += [pb.Segment(tokens=1, observation=True), pb.Segment(tokens=1)]
    return pb.Sample(
        prompt_tokens=pack_int32(prompt),
        tokens=pack_int32(tokens),
        logprobs=bytes(4 * len(tokens)),
        spans=[pb.VersionSpan(tokens=len(tokens))],
        segments=segments,
        reward=reward,
    )


def steps_of(count: int, *, weight: Callable[[float], float] = lambda _: 1.0) -> list[list[pb.Group]]:
    """Each with the whole log, of a player who seldom makes use of a good first turn: behind FIRST 1 can be earned, and 1/8 is; behind OTHER 1/2."""
    log = [sample([PROMPT], FIRST, GOOD, reward=1.0)]
    log += [sample([PROMPT], FIRST, BAD) for _ in range(7)]
    log += [sample([PROMPT], OTHER, second, reward=0.5) for second in (GOOD, BAD) * 4]
    for number, one in enumerate(log):
        one.group_id, one.weight = number, weight(one.reward)
    return [[pb.Group(group_id=one.group_id, samples=[one]) for one in log]] * count


def job(**algorithm: object) -> RLJobSpec:
    return trainer_spec(rule="supervised", algorithm={"rewardField": "reward", **algorithm}, learningRate=5e-3)


def critic(**constants: object) -> dict[str, object]:
    return {"weights": {"critic": {"learningRate": 1e-2, "discount": 1.0, "miniBatches": 1} | constants}}


def preferred(spec: RLJobSpec, steps: list[list[pb.Group]]) -> tuple[float, float]:
    """Odds of the policy that was trained: of FIRST to OTHER, and behind FIRST of GOOD to BAD."""
    engine = tiny_engine(spec)
    train_steps(engine, steps)

    def odds(prompt: list[int], one: int, other: int) -> float:
        return math.exp(engine.held_out_loss([sample(prompt, other)]) - engine.held_out_loss([sample(prompt, one)]))

    return odds([PROMPT], FIRST, OTHER), odds([PROMPT, FIRST, HEARD], GOOD, BAD)


def test_a_good_first_turn_is_preferred_though_the_log_makes_little_of_it() -> None:
    """Weights of whole episodes, as `weights.advantage` has them, speak against it."""
    cloned = preferred(job(), steps_of(STEPS))
    weighed = preferred(job(), steps_of(STEPS, weight=lambda reward: min(math.exp((reward - 5 / 16) / BETA), 20.0)))
    learnt = preferred(job(**critic(expectile=0.95, beta=BETA, warmUpSteps=STEPS // 2)), steps_of(STEPS))
    assert cloned == pytest.approx((1, 1 / 7), rel=0.3)
    assert weighed[0] < 0.6
    assert learnt[0] > 4
    assert learnt[1] > 4


def test_a_turn_without_tokens_is_none() -> None:
    (log,) = steps_of(1)
    spec = job(**critic())
    expected = train_steps(tiny_engine(spec), [log])
    for group in log:
        (one,) = group.samples
        segments = [pb.Segment(tokens=0), *one.segments, pb.Segment(tokens=0)]
        one.ClearField("segments")
        one.segments.extend(segments)
    assert train_steps(tiny_engine(spec), [log]) == expected


def test_a_resumed_run_goes_on_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    spec = job(**critic(warmUpSteps=1, epochs=1, miniBatches=2))
    assert_resumes(spec, steps_of(4), saved_at=2, folder=tmp_path)
