"""How a stage's time follows its devices: curves, generation by lengths, training by tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl_operator.allocation.stage_times import (
    MOST_PLAYED,
    Replica,
    StageCurve,
    StepLine,
    by_list,
    by_rounds,
    floor_seconds,
    generation_curve,
    spread,
    training_curve,
)

GENERATION_7B = {8: 1.0, 16: 0.81, 24: 0.74, 32: 0.69}
"""The paper's figure: 7B, generation by GPUs."""
FLAT = LatencyCurve((1,), (0.01,))
RISING = LatencyCurve.of_milliseconds([(1, 8.3), (8, 9.0), (64, 11.7), (256, 21.7)])


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(0, float("inf")), (8, 1.0), (16, 0.81), (32, 0.69), (4, 2.0), (2, 4.0)],
)
def test_points_are_met_and_fewer_devices_share_evenly_at_best(size: int, seconds: float) -> None:
    assert StageCurve.through(GENERATION_7B).at(size) == pytest.approx(seconds)


def test_between_points_and_beyond_it_is_a_power_law() -> None:
    curve = StageCurve.through({4: 8.0, 16: 2.0, 64: 1.0})
    assert curve.at(8) == pytest.approx(4.0)
    assert curve.at(32) == pytest.approx(2**0.5)
    assert curve.at(256) == pytest.approx(0.5)
    assert StageCurve.through({4: 8.0}).at(8) == pytest.approx(4.0)


def test_more_devices_that_came_out_slower_are_as_fast_as_fewer() -> None:
    assert StageCurve.through({8: 1.0, 16: 1.2, 32: 0.9}).at(16) == 1.0


@given(points=st.dictionaries(st.integers(1, 500), st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_no_curve_ever_rises(points: dict[int, float]) -> None:
    curve = StageCurve.through(points)
    times = [curve.at(size) for size in range(1, 600)]
    assert times == sorted(times, reverse=True)
    assert all(curve.at(size) <= seconds for size, seconds in points.items())


@pytest.mark.parametrize(
    ("sizes", "seconds", "rule"),
    [
        ((), (), "at least one"),
        ((2, 1), (1.0, 1.0), "rise"),
        ((1,), (0.0,), "positive"),
        ((1, 2), (1.0, 2.0), "not rise"),
    ],
)
def test_what_is_no_curve(sizes: tuple[int, ...], seconds: tuple[float, ...], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        StageCurve(sizes, seconds)


lengths = st.lists(st.floats(1.0, 500.0), min_size=1, max_size=60)
replicas = st.builds(
    Replica, curve=st.sampled_from([FLAT, RISING]), slots=st.integers(1, 9), fill_s=st.sampled_from([0.0, 0.02])
)


@given(tokens=lengths)
def test_what_all_fits_on_one_replica_takes_the_exact_time(tokens: list[float]) -> None:
    replica = Replica(curve=RISING, slots=len(tokens))
    assert by_list([replica], lengths=tokens) == pytest.approx(replica_seconds(RISING, tokens))


def test_a_slot_that_frees_takes_the_longest_that_waits() -> None:
    two = Replica(curve=FLAT, slots=1)
    assert by_list([two, two], lengths=[100, 200, 300, 400]) == pytest.approx(5.0)  # 400 + 100 beside 300 + 200
    assert by_list([two], lengths=[100, 200, 300, 400]) == pytest.approx(10.0)


def test_admitting_a_sample_stops_the_batch() -> None:
    replica = Replica(curve=FLAT, slots=2, fill_s=0.5)
    assert by_list([replica], lengths=[100, 100]) == pytest.approx(1.0 + 2 * 0.5)
    assert by_list([replica], lengths=[100, 100, 50]) == pytest.approx(1.0 + 2 * 0.5 + 0.5 + 0.5)


@given(pool=st.lists(replicas, min_size=1, max_size=4), tokens=lengths)
def test_the_time_lies_between_what_must_be_done_and_one_after_the_other(
    pool: list[Replica], tokens: list[float]
) -> None:
    played_s = by_list(pool, lengths=tokens)
    assert played_s >= floor_seconds(pool, lengths=tokens) - 1e-9
    slowest = max(one.curve.at(one.slots) for one in pool)
    assert played_s <= sum(tokens) * slowest + len(tokens) * 0.02 + 1e-9


def test_equal_lengths_that_fill_the_slots_take_what_eq_2_says() -> None:
    pool = [Replica(curve=RISING, slots=8)] * 3
    assert by_list(pool, lengths=[100.0] * 48) == pytest.approx(2 * 100 * RISING.at(8))
    assert by_rounds(pool, samples=48, mean_tokens=100.0) == pytest.approx(2 * 100 * RISING.at(8))


def test_eq_2_shares_the_samples_by_speed() -> None:
    fast, slow = (
        Replica(curve=LatencyCurve((1,), (0.01,)), slots=4),
        Replica(curve=LatencyCurve((1,), (0.03,)), slots=4),
    )
    assert by_rounds([fast, slow], samples=16, mean_tokens=10.0) == pytest.approx(0.3)  # 12 in 3 rounds beside 4 in 1


def test_a_pools_curve_reaches_what_is_asked_and_falls_to_the_longest_answer() -> None:
    replica = Replica(curve=FLAT, slots=4)
    curve = generation_curve(replica, lengths=[10, 20, 400], samples=120, most=100, devices=2)
    assert curve.sizes[0] == 2
    assert curve.sizes[-1] == 200
    assert curve.at(200) == pytest.approx(floor_seconds([replica], lengths=[10, 20, 400]))
    assert curve.at(2) > 5 * curve.at(20)


def test_other_pools_take_their_part() -> None:
    replica = Replica(curve=FLAT, slots=4)
    alone = generation_curve(replica, lengths=[100], samples=64, most=4)
    helped = generation_curve(replica, lengths=[100], samples=64, most=4, others=[replica] * 2)
    assert helped.at(2) == pytest.approx(alone.at(4))


def test_a_very_large_step_is_not_played_through() -> None:
    replica = Replica(curve=FLAT, slots=4)
    samples = MOST_PLAYED + 1
    curve = generation_curve(replica, lengths=[100], samples=samples, most=1)
    assert curve.at(1) == pytest.approx(by_rounds([replica], samples=samples, mean_tokens=100))


@given(tokens=st.lists(st.integers(1, 1000), min_size=1, max_size=50))
def test_spread_keeps_the_distribution(tokens: list[int]) -> None:
    assert spread(tokens, count=len(tokens)) == pytest.approx(sorted(tokens))
    many = spread(tokens, count=10 * len(tokens))
    assert many == sorted(many)
    assert min(tokens) <= many[0] <= many[-1] <= max(tokens)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(100.0, 1.2), (200.0, 1.4), (400.0, 1.8)], (1.0, 0.002)),
        ([(100.0, 2.0)], (0.0, 0.02)),
        ([(100.0, 2.0), (200.0, 1.0)], (1.5, 0.0)),
        ([(100.0, 0.5), (200.0, 2.0)], (0.0, 0.009)),
    ],
)
def test_a_step_has_a_fixed_part_and_a_part_for_each_token(
    points: list[tuple[float, float]], line: tuple[float, float]
) -> None:
    found = StepLine.fit(points)
    assert (found.fixed_s, found.token_s) == pytest.approx(line)


def test_the_trainers_curve_has_a_point_for_each_number_of_processes() -> None:
    curve = training_curve([(1, 100, 1.2), (1, 200, 1.4), (2, 100, 0.7)], tokens=1000)
    assert curve.sizes == (1, 2)
    assert curve.at(1) == pytest.approx(3.0)
    assert curve.at(2) == pytest.approx(3.0)  # one point of a small step: 7 s, slower than one process
