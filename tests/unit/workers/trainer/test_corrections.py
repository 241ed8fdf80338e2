"""Importance weights against plain loops in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.spec.training import Correction
from streamrl_workers.trainer.algorithms.corrections import create_correction

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
