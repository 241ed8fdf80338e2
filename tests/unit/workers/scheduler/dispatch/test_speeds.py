"""Curves out of heartbeats."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl_workers.metrics.step_times import StepCounts, StepTimes, bucket_of
from streamrl_workers.scheduler.dispatch.speeds import (
    MEMORY,
    MIN_POINT_STEPS,
    MIN_STEPS,
    Curves,
    PoolPoints,
    fitted,
    rising,
    step_seconds,
)

H800 = LatencyCurve.of_milliseconds(
    [(1, 8.3), (2, 8.7), (4, 8.9), (8, 9.0), (16, 9.4), (32, 10.2), (64, 11.7), (128, 15.2), (256, 21.7)]
)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (StepCounts(100, 800, 1.0), (8.0, 0.01)),
        (StepCounts(100, 850, 1.0), (8.5, 0.01)),
        (StepCounts(1, 8, 1.0), (8.0, 1.0)),
        (StepCounts(100, 800, 0.0), None),
        (StepCounts(100, 800, math.inf), None),
        (StepCounts(100, 800, math.nan), None),
        (StepCounts(100, 99, 1.0), None),  # no sample at all in some steps
        (StepCounts(-100, -800, -1.0), None),
        (StepCounts(), None),
    ],
)
def test_the_speed_of_some_steps(steps, found):
    assert step_seconds(steps) == (None if found is None else pytest.approx(found))


points = st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.1, 10.0)), min_size=1, max_size=8).map(
    lambda found: [(batch, seconds, weight) for batch, (seconds, weight) in enumerate(found, start=1)]
)


@given(points)
def test_the_fit_rises_and_is_a_weighted_mean_of_what_it_pools(found):
    fit = rising(found)
    values = [seconds for _, seconds in fit]
    assert [batch for batch, _ in fit] == [batch for batch, _, _ in found]
    assert values == sorted(values)
    assert sum(s * w for s, (_, _, w) in zip(values, found, strict=True)) == pytest.approx(
        sum(seconds * weight for _, seconds, weight in found)
    )
    errors = sum(w * (seconds - s) ** 2 for s, (_, seconds, w) in zip(values, found, strict=True))
    flat = sum(seconds * w for _, seconds, w in found) / sum(w for _, _, w in found)
    assert errors <= sum(w * (seconds - flat) ** 2 for _, seconds, w in found) + 1e-9
    if [seconds for _, seconds, _ in found] == sorted(seconds for _, seconds, _ in found):
        assert values == pytest.approx([seconds for _, seconds, _ in found])


def test_violators_are_pooled_by_weight():
    assert rising([(1, 1.0, 1.0), (2, 3.0, 1.0), (4, 2.0, 3.0), (8, 5.0, 1.0)]) == [
        (1, 1.0),
        (2, 2.25),
        (4, 2.25),
        (8, 5.0),
    ]


def test_beyond_what_was_seen_a_batch_is_neither_free_nor_forbidden():
    curve = fitted([(16, 0.010, 1.0), (32, 0.010, 1.0)], slots=64)
    assert curve.at(16) == curve.at(32) == 0.010
    assert curve.at(1) == pytest.approx(0.010 * (1 + 1 / 64) / (1 + 16 / 64))
    assert curve.at(64) == pytest.approx(0.010 * 2 / 1.5)


def beats(curves: Curves, pool: str, curve: LatencyCurve, *, batches: list[int], noise: float = 0.0) -> None:
    """Heartbeats of a generator of the pool, of 500 steps each, at these batches."""
    chance = Random(1)
    for batch in batches:
        seconds = 500 * curve.at(batch) * (1 + noise * (2 * chance.random() - 1))
        before, new = StepCounts(10, 10 * batch, 1.0), StepCounts(500, 500 * batch, seconds)
        curves.observe(pool, before={bucket_of(batch): before}, now={bucket_of(batch): before + new})


def test_a_known_engine_is_found_again():
    curves = Curves()
    chance = Random(2)
    beats(curves, "p", H800, batches=[chance.randint(1, 128) for _ in range(400)], noise=0.1)
    found = curves.curve("p", slots=128)
    for batch in (4, 8, 16, 32, 64, 128):
        assert found.at(batch) == pytest.approx(H800.at(batch), rel=0.06)


def test_a_curve_follows_an_engine_that_becomes_slower():
    curves = Curves()
    beats(curves, "p", H800, batches=[64] * 100)
    beats(curves, "p", H800.scaled(2), batches=[64] * 200)
    assert curves.curve("p", slots=64).at(64) == pytest.approx(2 * H800.at(64), rel=0.05)


@pytest.mark.parametrize("step_s", [0.02, 0.3, 0.8, 1.5, 3.0])
def test_steps_that_are_longer_than_a_heartbeat_are_measured_too(step_s):
    """A heartbeat each second; steps are counted when they end."""
    curves, before = Curves(), dict[int, StepCounts]()
    for second in range(1, 201):
        steps = int(second / step_s + 1e-9)
        now = {6: StepCounts(steps, 8 * steps, steps * step_s)}
        curves.observe("p", before=before, now=now)
        before = now
    assert curves.curve("p", slots=8).at(8) == pytest.approx(step_s, rel=1e-6)


def test_a_reading_counts_by_its_steps():
    pool = PoolPoints()
    pool.add(8, 9.0, steps=1)  # a busy moment
    pool.add(8, 1.0, steps=199)
    assert pool.points() == [(8, pytest.approx(1.04), 200)]
    pool.add(8, 2.0, steps=10_000)
    assert pool.points() == [(8, pytest.approx(2.0), MEMORY)]


def test_a_few_steps_of_a_batch_are_no_point():
    pool = PoolPoints()
    pool.add(8, 1.0, steps=MIN_STEPS)
    pool.add(2, 9.0, steps=MIN_POINT_STEPS - 1)
    assert [batch for batch, _, _ in pool.points()] == [8]
    pool.add(2, 9.0, steps=1)
    assert [batch for batch, _, _ in pool.points()] == [2, 8]


def test_a_count_that_falls_tells_nothing():
    curves = Curves()
    curves.observe("p", before={6: StepCounts(999, 8000, 9.0)}, now={6: StepCounts(100, 800, 1.0)})
    assert not curves.measured("p")


def test_a_batch_that_falls_all_the_time_is_measured_whole():
    """One batch of 64 samples, each of another length: the batch never stays as it is for a second."""
    curves, clock, now_s = Curves(), StepTimes(), 0.0
    before = clock.counts()
    clock.enter(generating=True, now_s=now_s)
    for batch in range(64, 0, -1):
        for _ in range(3):
            now_s += H800.at(batch)
            clock.stepped([1] * batch, now_s=now_s)
    for _ in range(2):  # two generators
        curves.observe("p", before=before, now=clock.counts())
    assert curves.measured("p")
    found = curves.curve("p", slots=64)
    for batch in (2, 4, 8, 16, 32, 64):
        assert found.at(batch) == pytest.approx(H800.at(batch), rel=0.04)


def test_kinds_tell_when_a_speed_gets_known():
    curves, seen = Curves(), []
    for batch in (64, 64, 8, 8):
        beats(curves, "p", H800, batches=[batch])
        curves.curve("p", slots=64)
        seen.append(curves.kinds)
    assert seen == [1, 1, 1, 1]


def test_few_steps_are_not_used():
    curves = Curves()
    reading = StepCounts(MIN_STEPS - 1, 8 * (MIN_STEPS - 1), 1.0)
    curves.observe("p", before={}, now={6: reading})
    assert not curves.measured("p")
    assert curves.curve("p", slots=8).at(4) == 1.5  # the default shape, without a unit
    curves.observe("p", before={6: reading}, now={6: reading + StepCounts(1, 8, 1.0)})
    assert curves.curve("p", slots=8).at(8) == pytest.approx(2.0 / MIN_STEPS)


def test_a_pool_without_readings_is_as_fast_as_the_others():
    curves = Curves({"fast": H800, "slow": H800.scaled(3)})
    assert curves.curve("new", slots=64).at(1) == pytest.approx(2 * H800.at(1))
    beats(curves, "fast", H800.scaled(2), batches=[64] * 50)
    assert curves.curve("fast", slots=64).at(64) == pytest.approx(2 * H800.at(64), rel=1e-3)  # measured beats given


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_the_default_prefers_the_emptier(slots):
    curve = Curves().curve("p", slots=slots)
    steps = [curve.at(active) for active in range(1, slots + 1)]
    assert steps == sorted(set(steps))
