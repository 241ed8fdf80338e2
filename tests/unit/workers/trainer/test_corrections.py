"""Importance weights against plain loops in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.spec.algorithm import Correction
from streamrl_workers.trainer.algorithms.corrections import create_correction, create_mask

SEQUENCES = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), max_size=4)
"""Of each sequence, log proximal - log behaviour of its tokens."""


def weights(sequences: list[list[float]], correction: dict) -> list[float]:
    flat = torch.tensor([d for one in sequences for d in one], dtype=torch.float64)
    owners = torch.tensor([number for number, one in enumerate(sequences) for _ in one], dtype=torch.int64)
    behaviour = torch.full_like(flat, -4.0)
    correct = create_correction(Correction.model_validate(correction))
    corrected = correct(proximal_N=behaviour + flat, behaviour_N=behaviour, sequences_N=owners)
    assert torch.equal(corrected.anchor_N, behaviour + flat)
    return corrected.weight_N.tolist()


def expected(sequences: list[list[float]], level: str) -> list[float]:
    found = []
    for one in sequences:
        product = 1.0
        for d in one:
            product *= math.exp(d)
        found += [product if level == "Sequence" else math.exp(d) for d in one]
    return found


@pytest.mark.parametrize("level", ["Token", "Sequence"])
@given(sequences=SEQUENCES)
def test_a_weight_is_truncated_at_the_cap(level, sequences):
    got = weights(sequences, {"truncatedImportance": {"level": level, "cap": 3.0}})
    assert got == pytest.approx([min(w, 3.0) for w in expected(sequences, level)])


@pytest.mark.parametrize("level", ["Token", "Sequence"])
@given(sequences=SEQUENCES)
def test_what_is_out_of_bounds_is_left_out(level, sequences):
    got = weights(sequences, {"maskedImportance": {"level": level, "low": 0.4, "high": 2.5}})
    for weight, want in zip(got, expected(sequences, level), strict=True):
        near = min(abs(want - 0.4), abs(want - 2.5)) < 1e-9  # on the bound rounding decides
        assert near or weight == pytest.approx(want if 0.4 <= want <= 2.5 else 0.0)


@given(sequences=SEQUENCES)
def test_decoupled_ppo_masks_tokens_above_its_cap_alone(sequences):
    masked = weights(sequences, {"maskedImportance": {"low": 0.0, "high": 5.0}})
    assert weights(sequences, {"decoupledPpo": {"cap": 5.0}}) == masked


@pytest.mark.parametrize("level", ["Token", "Sequence"])
def test_a_ratio_beyond_all_numbers_stays_finite(level):
    far = [[500.0, 500.0], [-500.0, -500.0]]
    assert weights(far, {"truncatedImportance": {"level": level}}) == pytest.approx([2.0, 2.0, 0.0, 0.0])
    assert weights(far, {"maskedImportance": {"level": level}}) == [0.0] * 4


def kept_by_m2po(log_ratios: list[float], threshold: float) -> list[bool]:
    mask = create_mask(Correction.model_validate({"m2po": {"threshold": threshold}}))
    return mask(torch.tensor(log_ratios, dtype=torch.float64)).tolist()


@given(log_ratios=st.lists(st.floats(-3, 3), max_size=20), threshold=st.floats(0.01, 4), seed=st.randoms())
def test_m2po_leaves_out_the_farthest_tokens_and_no_more_than_it_must(log_ratios, threshold, seed):
    kept = kept_by_m2po(log_ratios, threshold)
    squares = [d * d for d, keep in zip(log_ratios, kept, strict=True) if keep]
    gone = [d * d for d, keep in zip(log_ratios, kept, strict=True) if not keep]
    if squares:
        assert sum(squares) / len(squares) <= threshold + 1e-12
    if gone:
        assert min(gone) > max(squares, default=-1.0)
        equal = [square for square in gone if square == min(gone)]  # these go together
        assert (sum(squares) + sum(equal)) / len([*squares, *equal]) > threshold - 1e-12
    order = seed.sample(range(len(log_ratios)), len(log_ratios))
    assert kept_by_m2po([log_ratios[i] for i in order], threshold) == [kept[i] for i in order]


def test_m2po_keeps_no_token_whose_ratio_is_no_number():
    assert kept_by_m2po([0.0, math.nan, 0.1, math.inf], 0.04) == [True, False, True, False]
    assert kept_by_m2po([0.0, math.nan, 0.1], 0.04) == [True, False, True]
    assert kept_by_m2po([math.nan, 2.0], 0.04) == [False, False]
    assert kept_by_m2po([], 0.04) == []
    assert create_mask(Correction.model_validate({"twoSidedClip": {}})) is None


def test_m2po_keeps_every_token_of_samples_that_are_close():
    assert all(kept_by_m2po([0.1, -0.2, 0.0, 0.15], 0.04))
    assert weights([[1000.0, 0.5], [-0.5]], {"m2po": {}}) == pytest.approx([math.inf, math.exp(0.5), math.exp(-0.5)])
