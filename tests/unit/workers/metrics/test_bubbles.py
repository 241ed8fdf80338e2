"""The wall partition: its parts add up after any sequence, and the skew rule is the design's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.metrics.bubbles import (
    CAUSES,
    PARTS,
    ProcessWall,
    State,
    WallPartition,
    bubble_ratios,
    generating,
    idle,
)

SLOTS = 64

_states = st.one_of(
    st.sampled_from(PARTS).map(lambda part: State(part=part)),
    st.sampled_from([*CAUSES, "no_weights", "ended", "nonsense"]).map(idle),
    st.builds(generating, active=st.integers(1, SLOTS), slots=st.just(SLOTS), waiting=st.booleans()),
)


@given(
    begin_s=st.floats(-1e6, 1e6),
    steps=st.lists(st.tuples(_states, st.floats(0, 1e4)), max_size=200),
)
def test_parts_add_up_to_the_wall(begin_s, steps):
    now_s = begin_s
    partition = WallPartition(now_s=now_s)
    for state, elapsed_s in steps:
        partition.enter(state, now_s=now_s)
        now_s += elapsed_s
        parts = partition.parts(now_s=now_s)
        assert set(parts) == set(PARTS)
        assert all(seconds >= 0 for seconds in parts.values())
        assert math.isclose(
            math.fsum(parts.values()), partition.wall_s(now_s=now_s), rel_tol=1e-12, abs_tol=1e-9 * (1 + abs(begin_s))
        )


@pytest.mark.parametrize(
    ("state", "busy", "skew"),
    [
        (generating(active=16, slots=64, waiting=False), 2.0, 6.0),
        (generating(active=16, slots=64, waiting=True), 8.0, 0.0),
        (generating(active=64, slots=64, waiting=False), 8.0, 0.0),
        (generating(active=1, slots=1, waiting=False), 8.0, 0.0),
    ],
)
def test_empty_slots_are_skew_only_when_nothing_waits(state, busy, skew):
    partition = WallPartition(now_s=10.0)
    partition.enter(state, now_s=10.0)
    parts = partition.parts(now_s=18.0)
    assert (parts["busy"], parts["skew"]) == (busy, skew)


@pytest.mark.parametrize(
    ("cause", "part"),
    [(cause, f"pipeline_{cause}") for cause in CAUSES]
    + [("no_weights", "weights"), ("ended", "other"), ("", "other"), ("unheard_of", "other")],
)
def test_every_idle_cause_has_a_part(cause, part):
    assert idle(cause) == State(part=part)


def test_time_before_the_first_state_is_other():
    partition = WallPartition(now_s=0.0)
    partition.enter("busy", now_s=3.0)
    assert partition.parts(now_s=5.0)["other"] == 3.0
    assert partition.parts(now_s=5.0)["busy"] == 2.0


def test_ratios_are_weighted_by_cost():
    cheap = ProcessWall(wall_s=100.0, parts={"busy": 100.0}, cost_per_hour=1.0)
    dear = ProcessWall(wall_s=100.0, parts={"pipeline_staleness": 75.0, "skew": 25.0}, cost_per_hour=3.0)
    ratios = bubble_ratios([cheap, dear])
    assert ratios["busy"] == 0.25
    assert ratios["pipeline_staleness"] == ratios["pipeline"] == 0.5625
    assert ratios["skew"] == 0.1875
    assert math.isclose(sum(ratios[part] for part in PARTS), 1.0)


def test_ratios_of_nothing_are_zero():
    assert set(bubble_ratios([]).values()) == {0.0}
    assert set(bubble_ratios([])) == {*PARTS, "pipeline"}
