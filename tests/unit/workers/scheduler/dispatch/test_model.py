"""Draws of what lengths may turn out to be: as spread as the batch, as right as was measured, the same every time."""

from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.dispatch import model
from streamrl_workers.scheduler.dispatch.makespan import Instance
from streamrl_workers.scheduler.dispatch.model import MOST_DRAWS, SAMPLES_DRAWN
from streamrl_workers.scheduler.dispatch.order import Candidate, PlannedBatch
from streamrl_workers.scheduler.lengths.trust import measure

RISING = [float(tokens) for tokens in range(100, 600)]


def possible_lengths(predicted, *, samples, rank_correlation, unknown=()):
    groups = [
        Candidate(group_id=place, batch=0, place=place, predicted_tokens=tokens, is_known=place not in unknown)
        for place, tokens in enumerate(predicted)
    ]
    return model.possible_lengths(
        PlannedBatch(trusted=True, groups=groups, samples=samples, rank_correlation=rank_correlation)
    )


def test_sure_predictions_are_the_truth():
    assert all(draw == RISING for draw in possible_lengths(RISING, samples=1, rank_correlation=1.0))


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("correlation", [0.9, 0.6, 0.0])
def test_means_of_groups_are_as_right_as_was_measured(samples, correlation):
    draws = possible_lengths(RISING, samples=samples, rank_correlation=correlation)
    found = []
    for draw in draws:
        means = [fmean(draw[place : place + samples]) for place in range(0, len(draw), samples)]
        found.append(measure(RISING, means).rank_correlation)
    assert fmean(found) == pytest.approx(correlation, abs=0.1)


def test_the_less_is_known_the_more_samples_of_the_shortest_turn_out_long():
    def long_after_all(correlation):
        draws = possible_lengths(RISING, samples=1, rank_correlation=correlation)
        return fmean(tokens > 500 for draw in draws for tokens in draw[:250])

    found = [long_after_all(correlation) for correlation in (1.0, 0.9, 0.6, 0.0)]
    assert found[0] == 0.0
    assert all(less < more for less, more in pairwise(found))


def test_the_prediction_of_prompts_that_nobody_knows_says_nothing():
    """They count as the median, and are as likely the longest as any."""
    known = [float(tokens) for tokens in range(1000, 1100)]
    draws = possible_lengths([*known, *[1050.5] * 100], samples=1, rank_correlation=0.95, unknown=range(100, 200))
    unknown = [tokens for draw in draws for tokens in draw[100:]]
    assert fmean(tokens >= 1090 for tokens in unknown) == pytest.approx(0.10, abs=0.03)
    longest = [tokens for draw in draws for tokens in draw[90:100]]
    assert fmean(tokens >= 1090 for tokens in longest) > 0.5


def test_what_is_unknown_leaves_sure_predictions_as_they_are():
    known = [float(tokens) for tokens in range(1000, 1100)]
    draws = possible_lengths([*known, *[1049.5] * 100], samples=1, rank_correlation=1.0, unknown=range(100, 200))
    assert all(draw[:100] == known for draw in draws)
    assert {tokens for draw in draws for tokens in draw[100:]} <= set(known)


def test_predictions_that_are_equal_are_predictions():
    """Where many answers are equally short, those that are predicted short are not the longest."""
    draws = possible_lengths([16.0] * 50 + RISING[-50:], samples=1, rank_correlation=0.95)
    assert fmean(tokens == 16.0 for draw in draws for tokens in draw[:50]) > 0.8


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 20).map(float), min_size=1, max_size=40),
    st.integers(1, 4),
    st.floats(-1, 1),
)
def test_draws_are_lengths_of_the_batch_and_repeatable(predicted, samples, correlation):
    draws = possible_lengths(predicted, samples=samples, rank_correlation=correlation)
    assert draws == possible_lengths(predicted, samples=samples, rank_correlation=correlation)
    assert 1 <= len(draws) <= MOST_DRAWS
    assert all(len(draw) == samples * len(predicted) for draw in draws)
    assert {tokens for draw in draws for tokens in draw} <= set(predicted)


def test_large_batches_take_no_longer():
    draws = possible_lengths(RISING * 6, samples=1, rank_correlation=0.9)
    assert sum(map(len, draws)) <= SAMPLES_DRAWN


@pytest.mark.parametrize(("groups", "generators", "step"), [(130, 64, 1), (2000, 100, 12), (2000, 32, 4), (2000, 3, 1)])
def test_a_large_batch_is_thinned_out_with_its_generators(groups, generators, step):
    lengths = [float(place) for place in range(groups)]
    found = PlannedBatch(
        trusted=True,
        groups=[
            Candidate(group_id=place, batch=0, place=place, predicted_tokens=tokens)
            for place, tokens in enumerate(lengths)
        ],
        samples=4,
        instances=[
            Instance(generator_id=f"g{place}", slots=8, curve=LatencyCurve((1,), (0.01,)))
            for place in range(generators)
        ],
    )
    thin = model.thinned(found)
    assert list(thin.groups) == list(found.groups[::step])
    assert list(thin.instances) == list(found.instances[::step])
