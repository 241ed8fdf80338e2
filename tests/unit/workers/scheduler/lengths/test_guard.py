"""Who is trusted: an oracle from its 256th pair on, what is inverted never, what flips not for long."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.scheduler.lengths.guard import FLIP_PAIRS, LOOK_PAIRS, MIN_PAIRS, WINDOW_PAIRS, Guard
from streamrl_workers.scheduler.lengths.quantiles import SlidingQuantiles

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


def fed(guard: Guard, predict: Predict, *, pairs: int, draw: Random) -> list[bool]:
    """Trust after each pair; lengths are log-normal, as completions are."""
    trust = []
    for _ in range(pairs):
        place = draw.random()
        tokens = 50 + 4000 * place**4
        guard.add(predict(place, draw), tokens=tokens)
        trust.append(guard.trusted)
    return trust


seeds = st.integers(0, 10_000)


@settings(max_examples=8)
@given(seed=seeds)
def test_an_oracle_is_trusted_from_pair_256_on(seed: int) -> None:
    trust = fed(Guard(), oracle, pairs=600, draw=Random(seed))
    assert trust == [False] * (MIN_PAIRS - 1) + [True] * (600 - MIN_PAIRS + 1)


@pytest.mark.parametrize("predict", [inverted, nothing])
@settings(max_examples=5)
@given(seed=seeds)
def test_what_knows_nothing_or_the_opposite_is_never_trusted(predict: Predict, seed: int) -> None:
    assert not any(fed(Guard(), predict, pairs=2_000, draw=Random(seed)))


@settings(max_examples=6)
@given(seed=seeds)
def test_what_is_good_enough_to_pay_is_trusted_and_stays_so(seed: int) -> None:
    guard = Guard()
    trust = fed(guard, noisy, pairs=1_500, draw=Random(seed))
    assert all(trust[MIN_PAIRS - 1 :])
    assert 0.6 < guard.quality.recall[20].value < 0.9


@settings(max_examples=10)
@given(seed=seeds, before=st.integers(MIN_PAIRS, 1_200), predict=st.sampled_from([oracle, noisy]))
def test_what_flips_is_distrusted_soon_and_for_good(seed: int, before: int, predict: Predict) -> None:
    guard, draw = Guard(), Random(seed)
    assert fed(guard, predict, pairs=before, draw=draw)[-1]
    after = fed(guard, lambda place, chance: 1 - predict(place, chance), pairs=600, draw=draw)
    assert not any(after[FLIP_PAIRS:])


def test_trust_returns_with_new_evidence_alone() -> None:
    guard, draw = Guard(), Random(1)
    fed(guard, oracle, pairs=1_000, draw=draw)
    fed(guard, inverted, pairs=200, draw=draw)
    assert guard.quality.pairs < 300, "what was true of a predictor that is gone is forgotten"
    trust = fed(guard, oracle, pairs=2_000, draw=draw)
    assert not any(trust[:64]), "the newest pairs decide first"
    assert trust[-1]


def test_equal_lengths_are_no_evidence() -> None:
    guard, draw = Guard(), Random(2)
    for _ in range(1_000):
        guard.add(draw.random(), tokens=100.0)
    assert not guard.trusted
    assert (guard.quality.rank_correlation, guard.quality.recall[20].value) == (None, pytest.approx(0.2, abs=0.01))


def test_equal_predictions_are_no_evidence() -> None:
    guard, draw = Guard(), Random(3)
    for _ in range(1_000):
        guard.add(0.5, tokens=draw.random())
    assert not guard.trusted


def test_the_window_is_bounded_and_looked_at_now_and_then() -> None:
    guard, draw = Guard(), Random(4)
    fed(guard, oracle, pairs=LOOK_PAIRS - 1, draw=draw)
    assert guard.quality.pairs == 0
    fed(guard, oracle, pairs=1, draw=draw)
    assert guard.quality.pairs == LOOK_PAIRS
    fed(guard, oracle, pairs=3 * WINDOW_PAIRS, draw=draw)
    assert guard.quality.pairs == WINDOW_PAIRS


def test_places_may_come_from_a_sliding_window() -> None:
    """As in a run: the score's place among recent scores, not the place itself."""
    guard, draw, scores = Guard(), Random(5), SlidingQuantiles(window=1024)
    for _ in range(MIN_PAIRS + 64):
        score = draw.random()
        scores.add(score)
        guard.add(scores.place(score), tokens=score**3)
    assert guard.trusted
