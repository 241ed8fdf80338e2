"""Tail isolation: the search against brute force, and the controller around it."""

from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl.spec.scheduling import Auto, TailIsolation
from streamrl_workers.scheduler.dispatch.auto import AutoPolicy
from streamrl_workers.scheduler.dispatch.isolation import Isolation, scale
from streamrl_workers.scheduler.dispatch.makespan import Instance
from streamrl_workers.scheduler.dispatch.modelled import Model, plan_seconds
from streamrl_workers.scheduler.dispatch.policy import DISTRUST, IN_ORDER, LONGEST_FIRST, Candidate, Work, tail_plan
from streamrl_workers.scheduler.dispatch.tail_isolation import TailIsolationPolicy

STEEP = LatencyCurve.of_milliseconds([(1, 8), (64, 40)])
SKEWED = [20_000.0, 18_000.0, *[4_000.0] * 3, 3_900.0, *[2_000.0 + place for place in range(48)]]
"""Two of 54 are much longer than the others."""


def work(
    lengths: list[float],
    *,
    instances: int = 4,
    slots: int = 64,
    curve: LatencyCurve = STEEP,
    running: tuple[float, ...] = (),
    samples: int = 1,
    correlation: float = 1.0,
) -> Work:
    groups = [
        Candidate(group_id=place, wave=0, place=place, predicted_tokens=tokens) for place, tokens in enumerate(lengths)
    ]
    fleet = [
        Instance(generator_id=f"g{number}", slots=slots, curve=curve, running=running) for number in range(instances)
    ]
    return Work(trusted=True, groups=groups, samples=samples, instances=fleet, rank_correlation=correlation)


def search(found: Work) -> Isolation:
    return Isolation(Model(found), sorted(found.groups, key=lambda group: group.rank))


def split_seconds(found: Work, groups: int, replicas: tuple[int, ...]) -> float:
    ranked = sorted(found.groups, key=lambda group: group.rank)
    tail = [found.instances[place] for place in replicas]
    return plan_seconds(tail_plan(ranked[:groups], tail, strict=False, why=""), found)


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 5000), min_size=2, max_size=8, unique=True),
    st.integers(2, 4),
    st.integers(1, 2),
    st.sampled_from([1.0, 0.9, 0.5]),
    st.data(),
)
def test_what_a_split_costs_is_what_its_plan_costs(lengths, instances, samples, correlation, data):
    found = work([float(tokens) for tokens in lengths], instances=instances, samples=samples, correlation=correlation)
    sizes = range(1, instances)
    picks = [pick for size in sizes for pick in combinations(range(instances), size)]
    pick = data.draw(st.sampled_from(picks))
    split = search(found).at(pick)
    assert split is not None
    assert fmean(split.seconds) == pytest.approx(split_seconds(found, split.groups, pick))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 5000), min_size=2, max_size=12, unique=True), st.integers(2, 4), st.booleans())
def test_with_lengths_known_the_search_is_brute_force(lengths, instances, busy):
    """Rising and falling sides cross once: the coarse search finds the best of its scale, here all small numbers."""
    slots = 8
    found = work([float(n) for n in lengths], instances=instances, slots=slots, running=(700.0,) if busy else ())
    free = slots - busy
    options = [
        split_seconds(found, groups, tuple(range(size)))
        for size in range(1, instances)
        for groups in range(1, len(lengths))
        if groups <= free * size and len(lengths) - groups <= free * (instances - size)
    ]
    best = search(found).best()
    assert (best is None) == (not options)
    if best is not None:
        assert best.likely_s <= 1.05 * min(options)
        assert best.likely_s >= min(options) * (1 - 1e-9)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 5000), min_size=2, max_size=30, unique=True), st.integers(2, 4), st.integers(1, 3))
def test_no_side_gets_more_than_fits_at_once(lengths, instances, samples):
    found = work([float(tokens) for tokens in lengths], instances=instances, slots=24, samples=samples)
    assume(len(lengths) * samples <= 24 * instances)
    best = search(found).best()
    if best is not None:
        assert best.groups * samples <= 24 * len(best.replicas)
        assert (len(lengths) - best.groups) * samples <= 24 * (instances - len(best.replicas))


@pytest.mark.parametrize(("most", "numbers"), [(0, []), (1, [1]), (2, [1, 2]), (9, [1, 2, 3, 4, 5, 7, 9])])
def test_numbers_that_are_tried(most, numbers):
    assert scale(most) == numbers


POLICY = TailIsolationPolicy(TailIsolation())


def test_the_longest_get_generators_of_their_own():
    plan = POLICY.plan(work(SKEWED), previous=IN_ORDER)
    assert plan.tail_generators == {"g0", "g1"}
    assert not plan.strict
    assert [group.group_id for group in work(SKEWED).groups if plan.is_tail(group)] == [0, 1]
    assert plan_seconds(plan, work(SKEWED)) == pytest.approx(20_000 * 0.008)
    assert plan_seconds(LONGEST_FIRST, work(SKEWED)) > 1.08 * 20_000 * 0.008


def test_the_less_is_known_the_more_generators_hold_the_tail_until_none_does():
    lengths = [float(tokens) for tokens in range(1000, 1128)] + [4000.0, 6000.0, 8000.0, 12_000.0]
    sizes = []
    for correlation in (1.0, 0.97, 0.0):
        plan = POLICY.plan(work(lengths, instances=8, correlation=correlation), previous=IN_ORDER)
        sizes.append(len(plan.tail_generators))
    assert 0 < sizes[0] <= sizes[1]
    assert sizes[2] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"instances": 1},
        {"slots": 8},  # requests queue
        {"curve": LatencyCurve.of_milliseconds([(1, 8)])},  # a batch costs nothing
        {"running": (1.0,) * 60},  # most places are taken
    ],
)
def test_no_sides_where_they_cannot_pay(changes):
    assert not POLICY.plan(work(SKEWED, **changes), previous=IN_ORDER).tail_generators


def test_without_trust_it_is_fifo():
    plan = POLICY.plan(replace(work(SKEWED), trusted=False), previous=IN_ORDER)
    assert plan == DISTRUST
    assert not plan.longest_first


def test_sides_go_at_once_to_where_they_pay():
    """A plan for the first portion of a batch binds nobody: the plan for the whole is as if there had been none."""
    part = POLICY.plan(
        work([20_000.0, 20_000.5, *[2_000.0 + place for place in range(200)]], instances=8), previous=IN_ORDER
    )
    whole = work([20_000.0, 19_000.0, 18_000.0, 17_000.0, *[2_000.0 + place for place in range(200)]], instances=8)
    fresh = POLICY.plan(whole, previous=IN_ORDER)
    assert len(part.tail_generators) < len(fresh.tail_generators)
    assert POLICY.plan(whole, previous=part) == fresh


def test_a_small_gain_moves_nobody():
    stiff = TailIsolationPolicy(TailIsolation.model_validate({"gainPercent": 50}))
    first = POLICY.plan(work(SKEWED, instances=8), previous=IN_ORDER)
    again = stiff.plan(work([*SKEWED, 9_000.0, 9_000.5], instances=8), previous=first)
    assert again.tail_generators == first.tail_generators


def test_sides_that_cost_time_are_given_up():
    first = POLICY.plan(work(SKEWED), previous=IN_ORDER)
    # one long on each: 162 s; with a side of one, two or three generators 163, 170, 168 s
    together = work([20_000.0 + place for place in range(4)] + [2_000.0 + place for place in range(8)])
    assert not POLICY.plan(together, previous=first).tail_generators


def test_a_tail_whose_generators_left_is_chosen_anew():
    first = POLICY.plan(work(SKEWED, instances=5), previous=IN_ORDER)
    there = work(SKEWED, instances=5)
    staying = [instance for instance in there.instances if instance.generator_id not in first.tail_generators]
    again = POLICY.plan(Work(trusted=True, groups=there.groups, instances=staying), previous=first)
    assert again.tail_generators
    assert again.tail_generators < {instance.generator_id for instance in staying}


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 20_000).map(float), min_size=2, max_size=40),
    st.integers(2, 6),
    st.booleans(),
    st.sampled_from([1.0, 0.8]),
)
def test_sides_never_cost_time_by_the_model(lengths, instances, busy, correlation):
    running = (500.0, 100.0) if busy else ()
    given_work = work(lengths, instances=instances, slots=32, running=running, correlation=correlation)
    model = Model(given_work)
    plan = POLICY.plan(given_work, previous=IN_ORDER)
    if plan.tail_generators:
        assert fmean(model.seconds(plan)) <= fmean(model.seconds(IN_ORDER)) * (1 + 1e-9)


MUCH_TO_GAIN = [*[1_000.0] * 8, 20_000.0]
"""In the order of planning the longest gets what is left: the slow one."""


@pytest.mark.parametrize("policy", [TailIsolationPolicy(TailIsolation()), AutoPolicy(Auto())])
@pytest.mark.parametrize(
    ("lengths", "share", "sides"),
    [
        (SKEWED, 0.0, True),
        (SKEWED, 0.25, True),
        (SKEWED, 0.35, False),
        (SKEWED, 2.0, False),
        (MUCH_TO_GAIN, 0.35, True),
        (MUCH_TO_GAIN, 2.0, False),
    ],
)
def test_no_sides_where_generators_are_ready_at_times_that_differ_by_more_than_they_gain(policy, lengths, share, sides):
    found = work(lengths)
    if lengths is MUCH_TO_GAIN:
        quick, slow = found.instances[:2]
        found = replace(found, instances=[replace(quick, slots=4), replace(slow, curve=STEEP.scaled(8))])
    late = replace(found, load_spread_s=share * plan_seconds(IN_ORDER, found))
    assert bool(policy.plan(late, previous=IN_ORDER).tail_generators) == sides
