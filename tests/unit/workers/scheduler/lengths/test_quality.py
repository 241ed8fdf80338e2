"""Recall, rank correlation and calibration: by hand, against scipy-free references, and on ties."""

from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.scheduler.lengths.quality import (
    PERCENTS,
    Quality,
    measure,
    rank_correlation,
    rank_correlation_lower,
    ranks,
    recall,
    wilson_lower,
)

numbers = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=50)


def test_nothing_is_known_of_nothing() -> None:
    assert measure([], []) == Quality(pairs=0, recall={}, rank_correlation=None, calibration=None)


@pytest.mark.parametrize(
    ("predicted", "actual", "percent", "value"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.9], [1, 2, 3, 4, 5], 20, 1.0),
        ([0.9, 0.2, 0.3, 0.4, 0.1], [1, 2, 3, 4, 5], 20, 0.0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 10, 9], 20, 1.0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [10, 2, 3, 4, 5, 6, 7, 8, 9, 1], 20, 0.5),
        ([1, 2, 3], [1, 2, 3], 5, 1.0),  # at least one is looked for
        ([0.5] * 10, list(range(10)), 20, 0.2),  # knows nothing: chance
        (list(range(10)), [7] * 10, 20, 0.2),  # nothing to know: chance
        ([0, 0, 0, 1, 1], [0, 0, 0, 1, 2], 20, 0.5),  # either of the two may be meant
    ],
)
def test_recall(predicted: list[float], actual: list[float], percent: int, value: float) -> None:
    assert recall(predicted, actual, percent=percent).value == pytest.approx(value)


@settings(max_examples=30)
@given(predicted=numbers, seed=st.integers(0, 1000), percent=st.sampled_from(PERCENTS))
def test_recall_is_the_mean_over_all_ways_to_break_ties(predicted: list[float], seed: int, percent: int) -> None:
    draw = Random(seed)
    actual = [float(draw.randint(0, 3)) for _ in predicted]
    longest = max(1, ceil(len(actual) * percent / 100))
    means = []
    for _ in range(200):
        guess = sorted(range(len(actual)), key=lambda i: (predicted[i], draw.random()))[-longest:]
        truth = sorted(range(len(actual)), key=lambda i: (actual[i], draw.random()))[-longest:]
        means.append(len(set(guess) & set(truth)) / longest)
    assert recall(predicted, actual, percent=percent).value == pytest.approx(sum(means) / len(means), abs=0.2)


@pytest.mark.parametrize(
    ("hits", "trials", "lower"),
    [
        (0, 10, 0.0),
        (10, 10, 0.7225),
        (5, 10, 0.2366),
        (41, 51, 0.6754),
        (22, 51, 0.3050),
    ],  # Wilson's own table, by hand
)
def test_wilson(hits: int, trials: int, lower: float) -> None:
    assert wilson_lower(hits, trials) == pytest.approx(lower, abs=5e-4)


@given(hits=st.floats(0, 1), trials=st.integers(1, 1000))
def test_the_limit_is_below_the_share(hits: float, trials: int) -> None:
    assert 0.0 <= wilson_lower(hits * trials, trials) <= hits + 1e-9


@pytest.mark.parametrize(
    ("predicted", "actual", "value"),
    [
        ([1, 2, 3], [10, 20, 90], 1.0),
        ([3, 2, 1], [10, 20, 90], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        ([1, 1, 2, 2], [1, 2, 3, 4], 0.8944),
        ([5, 5, 5], [1, 2, 3], None),
        ([1, 2, 3], [5, 5, 5], None),
    ],
)
def test_rank_correlation(predicted: list[float], actual: list[float], value: float | None) -> None:
    assert rank_correlation(predicted, actual) == (None if value is None else pytest.approx(value, abs=1e-4))


def test_the_limit_of_a_rank_correlation() -> None:
    assert rank_correlation_lower(0.5, pairs=128) == pytest.approx(0.352, abs=1e-3)
    assert rank_correlation_lower(0.17, pairs=128) < 0 < rank_correlation_lower(0.19, pairs=128)
    assert 0.99 < rank_correlation_lower(1.0, pairs=128) <= 1
    assert rank_correlation_lower(-1.0, pairs=128) < -0.99


@given(values=numbers)
def test_ranks_are_places_with_mean_one_half(values: list[float]) -> None:
    found = ranks(values)
    assert sum(found) / len(found) == pytest.approx(0.5)
    for value, place in zip(values, found, strict=True):
        below = sum(other < value for other in values)
        equal = sum(other == value for other in values)
        assert place == pytest.approx((below + equal / 2) / len(values))


def test_calibration_is_the_mean_distance_of_places() -> None:
    actual = [10.0, 20.0, 30.0, 40.0]
    assert measure([0.125, 0.375, 0.625, 0.875], actual).calibration == 0.0
    assert measure([0.5] * 4, actual).calibration == pytest.approx(0.25)
    assert measure([0.875, 0.625, 0.375, 0.125], actual).calibration == pytest.approx(0.5)
