"""Advantages and loss against plain loops in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.spec.training import Grpo
from streamrl_workers.trainer.algorithms import ALGORITHMS, algorithm_creator
from streamrl_workers.trainer.algorithms.rule import TokenBatch

reals = st.floats(-4, 4, allow_nan=False, width=32)
tokens = st.lists(st.tuples(reals, reals, reals), min_size=1, max_size=20)


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
    advantages = algorithm_creator("grpo")(Grpo()).advantages(rewards)
    assert [a is None for a in advantages] == [e is None for e in expected]
    known = [(a, e) for a, e in zip(advantages, expected, strict=True) if a is not None]
    assert [a for a, _ in known] == pytest.approx([e for _, e in known], abs=1e-5)


def test_advantages_without_the_standard_deviation():
    assert algorithm_creator("grpo")(Grpo.model_validate({"normalizeStd": False})).advantages([0.0, 3.0]) == [-1.5, 1.5]


def _reference(logprob: float, behaviour: float, advantage: float, spec: Grpo) -> float:
    ratio = math.exp(logprob - behaviour)
    clipped = ratio
    if ratio < 1 - spec.clip_low:
        clipped = 1 - spec.clip_low
    if ratio > 1 + spec.clip_high:
        clipped = 1 + spec.clip_high
    capped = spec.importance_cap if ratio > spec.importance_cap else ratio
    return -min(capped * advantage, clipped * advantage)


@given(tokens=tokens, low=st.floats(0.01, 0.9), high=st.floats(0.01, 5), cap=st.floats(1, 8))
def test_token_loss_equals_a_plain_loop(tokens, low, high, cap):
    spec = Grpo.model_validate({"clipLow": low, "clipHigh": high, "importanceCap": cap})
    logprobs, behaviour, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    batch = TokenBatch(logprobs_N=logprobs.requires_grad_(), behaviour_N=behaviour, advantages_N=advantages)
    result = ALGORITHMS["grpo"](spec).token_loss(batch)
    assert result.loss_N.tolist() == pytest.approx([_reference(*token, spec) for token in tokens], rel=1e-9, abs=1e-12)
    (gradient,) = torch.autograd.grad(result.loss_N.sum(), logprobs)
    blocked = [bool(clipped) for clipped in result.clipped_N]
    assert all(value == 0 for value, clipped in zip(gradient.tolist(), blocked, strict=True) if clipped)
    expected = [-math.exp(p - b) * a for p, b, a in tokens]
    open_ = [(g, e) for g, e, clipped in zip(gradient.tolist(), expected, blocked, strict=True) if not clipped]
    assert [g for g, _ in open_] == pytest.approx([e for _, e in open_], rel=1e-9, abs=1e-12)


def test_an_unknown_algorithm_lists_the_known():
    with pytest.raises(ValueError, match="known are: grpo"):
        algorithm_creator("ppo2")
