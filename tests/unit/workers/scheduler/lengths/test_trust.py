"""Who is trusted: an oracle from its 256th pair on, what is inverted never, what flips not for long; measures by hand."""

from collections.abc import Callable
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.scheduler.lengths.quantiles import SlidingQuantiles
from streamrl_workers.scheduler.lengths.trust import (
    FLIP_PAIRS,
    LOOK_PAIRS,
    MIN_PAIRS,
    WINDOW_PAIRS,
    Quality,
    Trust,
    measure,
)

Predict = Callable[[float, Random], float]
"""(true place, chance) -> predicted place."""


def oracle(place: float, _: Random) -> float:
    return place


def inverted(place: float, _: Random) -> float:
    return 1 - place


def nothing(_place: float, draw: Random) -> float:
    return draw.random()


def noisy(place: float, draw: Random) -> float:
    """Recall at 20 % about .75."""
    return place + draw.gauss(0, 0.09)


def fed(signal: Trust, predict: Predict, *, pairs: int, draw: Random) -> list[bool]:
    """Trust after each pair; lengths are log-normal, as completions are."""
    trusted = []
    for _ in range(pairs):
        place = draw.random()
        tokens = 50 + 4000 * place**4
        signal.add(predict(place, draw), tokens=tokens)
        trusted.append(signal.trusted)
    return trusted


seeds = st.integers(0, 10_000)


@settings(max_examples=8)
@given(seed=seeds)
def test_an_oracle_is_trusted_from_pair_256_on(seed: int) -> None:
    trust = fed(Trust(), oracle, pairs=600, draw=Random(seed))
    assert trust == [False] * (MIN_PAIRS - 1) + [True] * (600 - MIN_PAIRS + 1)


@pytest.mark.parametrize("predict", [inverted, nothing])
@settings(max_examples=5)
@given(seed=seeds)
def test_what_knows_nothing_or_the_opposite_is_never_trusted(predict: Predict, seed: int) -> None:
    assert not any(fed(Trust(), predict, pairs=2_000, draw=Random(seed)))


@settings(max_examples=6)
@given(seed=seeds)
def test_what_is_good_enough_to_pay_is_trusted_and_stays_so(seed: int) -> None:
    signal = Trust()
    trust = fed(signal, noisy, pairs=1_500, draw=Random(seed))
    assert all(trust[MIN_PAIRS - 1 :])
    assert 0.6 < signal.quality.recall < 0.9


@settings(max_examples=10)
@given(seed=seeds, before=st.integers(MIN_PAIRS, 1_200), predict=st.sampled_from([oracle, noisy]))
def test_what_flips_is_distrusted_soon_and_for_good(seed: int, before: int, predict: Predict) -> None:
    signal, draw = Trust(), Random(seed)
    assert fed(signal, predict, pairs=before, draw=draw)[-1]
    after = fed(signal, lambda place, chance: 1 - predict(place, chance), pairs=600, draw=draw)
    assert not any(after[FLIP_PAIRS:])


def test_trust_returns_with_new_evidence_alone() -> None:
    signal, draw = Trust(), Random(1)
    fed(signal, oracle, pairs=1_000, draw=draw)
    fed(signal, inverted, pairs=200, draw=draw)
    assert signal.quality.pairs < 300, "what was true of a predictor that is gone is forgotten"
    trust = fed(signal, oracle, pairs=2_000, draw=draw)
    assert not any(trust[:64]), "the newest pairs decide first"
    assert trust[-1]


def test_equal_lengths_are_no_evidence() -> None:
    signal, draw = Trust(), Random(2)
    for _ in range(1_000):
        signal.add(draw.random(), tokens=100.0)
    assert not signal.trusted
    assert (signal.quality.rank_correlation, signal.quality.recall) == (None, pytest.approx(0.2, abs=0.01))


def test_equal_predictions_are_no_evidence() -> None:
    signal, draw = Trust(), Random(3)
    for _ in range(1_000):
        signal.add(0.5, tokens=draw.random())
    assert not signal.trusted


def test_the_window_is_bounded_and_looked_at_now_and_then() -> None:
    signal, draw = Trust(), Random(4)
    fed(signal, oracle, pairs=LOOK_PAIRS - 1, draw=draw)
    assert signal.quality.pairs == 0
    fed(signal, oracle, pairs=1, draw=draw)
    assert signal.quality.pairs == LOOK_PAIRS
    fed(signal, oracle, pairs=3 * WINDOW_PAIRS, draw=draw)
    assert signal.quality.pairs == WINDOW_PAIRS


def test_places_may_come_from_a_sliding_window() -> None:
    """As in a run: the score's place among recent scores, not the place itself."""
    signal, draw, scores = Trust(), Random(5), SlidingQuantiles(window=1024)
    for _ in range(MIN_PAIRS + 64):
        score = draw.random()
        scores.add(score)
        signal.add(scores.place(score), tokens=score**3)
    assert signal.trusted


# ---- measures

numbers = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=50)


def test_nothing_is_known_of_nothing() -> None:
    assert measure([], []) == Quality(pairs=0, recall=None, recall_lower=None, rank_correlation=None)


@pytest.mark.parametrize(
    ("predicted", "actual", "value"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.9], [1, 2, 3, 4, 5], 1.0),
        ([0.9, 0.2, 0.3, 0.4, 0.1], [1, 2, 3, 4, 5], 0.0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 10, 9], 1.0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [10, 2, 3, 4, 5, 6, 7, 8, 9, 1], 0.5),
        ([1, 2, 3], [1, 2, 3], 1.0),  # at least one is looked for
        ([0.5] * 10, list(range(10)), 0.2),  # knows nothing: chance
        (list(range(10)), [7] * 10, 0.2),  # nothing to know: chance
        ([0, 0, 0, 1, 1], [0, 0, 0, 1, 2], 0.5),  # either of the two may be meant
    ],
)
def test_recall(predicted: list[float], actual: list[float], value: float) -> None:
    assert measure(predicted, actual).recall == pytest.approx(value)


@settings(max_examples=30)
@given(predicted=numbers, seed=seeds)
def test_recall_is_the_mean_over_all_ways_to_break_ties(predicted: list[float], seed: int) -> None:
    draw = Random(seed)
    actual = [float(draw.randint(0, 3)) for _ in predicted]
    longest = max(1, ceil(len(actual) * 0.2))
    means = []
    for _ in range(200):
        guess = sorted(range(len(actual)), key=lambda i: (predicted[i], draw.random()))[-longest:]
        truth = sorted(range(len(actual)), key=lambda i: (actual[i], draw.random()))[-longest:]
        means.append(len(set(guess) & set(truth)) / longest)
    assert measure(predicted, actual).recall == pytest.approx(sum(means) / len(means), abs=0.2)


def test_the_limit_of_a_recall() -> None:
    """41 of the longest 51 of 255 are found; Wilson's own table, by hand."""
    actual = [float(place) for place in range(255)]
    predicted = [-1.0 if place >= 245 else float(place) for place in range(255)]
    found = measure(predicted, actual)
    assert found.recall == pytest.approx(41 / 51)
    assert found.recall_lower == pytest.approx(0.6754, abs=5e-4)


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
    found = measure(predicted, actual).rank_correlation
    assert found == (None if value is None else pytest.approx(value, abs=1e-4))


@pytest.mark.parametrize(
    ("correlation", "least", "most"),
    [(0.5, 0.351, 0.353), (0.17, -1, 0), (0.19, 0, 1), (1.0, 0.99, 1), (-1.0, -1, -0.99)],
)
def test_the_limit_of_a_rank_correlation(correlation: float, least: float, most: float) -> None:
    limit = Quality(pairs=128, rank_correlation=correlation).correlation_lower
    assert limit is not None
    assert least <= limit <= most
