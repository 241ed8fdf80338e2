"""Advantages and loss against plain loops in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.trainer.algorithms import algorithm_class, create_algorithm
from streamrl_workers.trainer.algorithms.algorithm import ModelTurn, RewardedSample, TokenBatch
from support.trainer_groups import trainer_spec

reals = st.floats(-4, 4, allow_nan=False, width=32)
tokens = st.lists(st.tuples(reals, reals, reals), min_size=1, max_size=20)


def _outcomes(rewards):
    return [RewardedSample(reward=reward, turns=(ModelTurn(tokens=3),)) for reward in rewards]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], [-1.0, 1.0]),
        ([0.0, 0.0, 0.0, 1.0], [-(3**-0.5)] * 3 + [3**0.5]),
        ([1.0, None, 0.0], [1.0, None, -1.0]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ([0.7, None], [0.0, None]),
        ([None, None], [None, None]),
    ],
)
def test_advantages(rewards, expected):
    advantages = create_algorithm(trainer_spec()).advantages(_outcomes(rewards))
    assert [a is None for a in advantages] == [e is None for e in expected]
    known = [(a, e) for a, e in zip(advantages, expected, strict=True) if a is not None]
    assert [a for a, _ in known] == pytest.approx([e for _, e in known], abs=1e-5)


def _reference(logprob: float, behaviour: float, advantage: float, *, low: float, high: float, cap: float) -> float:
    ratio = math.exp(logprob - behaviour)
    clipped = ratio
    if ratio < 1 - low:
        clipped = 1 - low
    if ratio > 1 + high:
        clipped = 1 + high
    capped = cap if ratio > cap else ratio
    return -min(capped * advantage, clipped * advantage)


@given(tokens=tokens, low=st.floats(0.01, 0.9), high=st.floats(0.01, 5), cap=st.floats(1, 8))
def test_token_loss_equals_a_plain_loop(tokens, low, high, cap):
    spec = trainer_spec(algorithm={"clipLow": low, "clipHigh": high}, correction={"twoSidedClip": {"cap": cap}})
    logprobs, behaviour, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    batch = TokenBatch(
        logprobs_N=logprobs.requires_grad_(),
        behaviour_N=behaviour,
        proximal_N=logprobs.detach(),
        advantages_N=advantages,
        sequences_N=torch.zeros(len(tokens), dtype=torch.int64),
    )
    result = create_algorithm(spec).token_loss(batch)
    expected_losses = [_reference(*token, low=low, high=high, cap=cap) for token in tokens]
    assert result.loss_N.tolist() == pytest.approx(expected_losses, rel=1e-9, abs=1e-12)
    (gradient,) = torch.autograd.grad(result.loss_N.sum(), logprobs)
    blocked = [bool(clipped) for clipped in result.clipped_N]
    assert all(value == 0 for value, clipped in zip(gradient.tolist(), blocked, strict=True) if clipped)
    expected = [-math.exp(p - b) * a for p, b, a in tokens]
    open_ = [(g, e) for g, e, clipped in zip(gradient.tolist(), expected, blocked, strict=True) if not clipped]
    assert [g for g, _ in open_] == pytest.approx([e for _, e in open_], rel=1e-9, abs=1e-12)


def test_an_unknown_algorithm_lists_the_known():
    with pytest.raises(ValueError, match="known are: archer, dapo, distillation, drGrpo, grpo, gspo"):
        algorithm_class("ppo2")
