"""Tail isolation: the search against brute force, and the controller around it."""

from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl.spec.scheduling import TailIsolation
from streamrl_workers.scheduler.dispatch.isolation import Isolation
from streamrl_workers.scheduler.dispatch.makespan import Instance, Server, list_seconds
from streamrl_workers.scheduler.dispatch.modelled import plan_seconds
from streamrl_workers.scheduler.dispatch.policy import DISTRUST, IN_ORDER, LONGEST_FIRST, Candidate, Work
from streamrl_workers.scheduler.dispatch.tail_isolation import TailIsolationPolicy

STEEP = LatencyCurve.of_milliseconds([(1, 8), (64, 40)])
SKEWED = [20_000.0, 18_000.0, *[4_000.0] * 14, *[2_000.0] * 48]
"""Two of 64 are much longer than the others."""


@st.composite
def fleets(draw: st.DrawFn) -> list[Server]:
    kinds = []
    for _ in range(draw(st.integers(1, 2))):
        seconds = sorted(draw(st.lists(st.integers(1, 40), min_size=4, max_size=4)))
        kinds.append(Server(curve=LatencyCurve((1, 2, 3, 4), tuple(map(float, seconds))), capacity=4))
    return [server for kind in kinds for server in [kind] * draw(st.integers(1, 3))]


@given(st.lists(st.integers(0, 50).map(float), min_size=2, max_size=8), fleets(), st.integers(1, 2))
def test_the_search_is_brute_force(lengths, servers, repeats):
    falling = sorted(lengths, reverse=True)
    units = [tokens for tokens in falling for _ in range(repeats)]
    assume(len(servers) > 1 and len(units) <= 4 * len(servers))
    options = [
        max(list_seconds(units[: q * repeats], servers[:m]), list_seconds(units[q * repeats :], servers[m:]))
        for m in range(1, len(servers))
        for q in range(1, len(falling))
        if q * repeats <= 4 * m and len(units) - q * repeats <= 4 * (len(servers) - m)
    ]
    search = Isolation(falling, servers, repeats=repeats)
    best = search.best()
    assert (best is None) == (not options)
    if best is not None:
        assert best.seconds == pytest.approx(min(options))
    assert search.together_s() == pytest.approx(list_seconds(units, servers))


@given(st.lists(st.integers(0, 50).map(float), min_size=2, max_size=7), fleets(), st.data())
def test_any_replicas_can_be_the_tail(lengths, servers, data):
    assume(len(servers) > 1)
    falling = sorted(lengths, reverse=True)
    picks = [pick for size in range(1, len(servers)) for pick in combinations(range(len(servers)), size)]
    pick = data.draw(st.sampled_from(picks))
    tail = [servers[place] for place in pick]
    bulk = [server for place, server in enumerate(servers) if place not in pick]
    options = [
        max(list_seconds(falling[:q], tail), list_seconds(falling[q:], bulk))
        for q in range(1, len(falling))
        if q <= 4 * len(tail) and len(falling) - q <= 4 * len(bulk)
    ]
    found = Isolation(falling, servers, repeats=1).at(pick)
    assert (found is None) == (not options)
    if found is not None:
        assert found.seconds == pytest.approx(min(options))


def work(
    lengths: list[float],
    *,
    instances: int = 4,
    slots: int = 64,
    curve: LatencyCurve = STEEP,
    running: tuple[float, ...] = (),
    trusted: bool = True,
) -> Work:
    groups = [
        Candidate(group_id=place, wave=0, place=place, predicted_tokens=tokens) for place, tokens in enumerate(lengths)
    ]
    fleet = [
        Instance(generator_id=f"g{number}", slots=slots, curve=curve, running=running) for number in range(instances)
    ]
    return Work(trusted=trusted, groups=groups, samples=1, instances=fleet)


POLICY = TailIsolationPolicy(TailIsolation())


def test_the_longest_get_a_generator_of_their_own():
    plan = POLICY.plan(work(SKEWED), previous=IN_ORDER)
    assert plan.tail_generators == {"g0", "g1"}
    assert not plan.strict
    assert [group.group_id for group in work(SKEWED).groups if plan.is_tail(group)] == [0, 1]
    assert plan_seconds(plan, work(SKEWED)) == pytest.approx(20_000 * 0.008)
    # 2,000 steps of 16, 2,000 of 4, and 16,000 alone
    together_s = 2 * STEEP.at(16) + 2 * STEEP.at(4) + 16 * STEEP.at(1)
    assert plan_seconds(LONGEST_FIRST, work(SKEWED)) == pytest.approx(1_000 * together_s)


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
    assert POLICY.plan(work(SKEWED, **changes), previous=IN_ORDER) == LONGEST_FIRST


def test_without_trust_it_is_fifo():
    plan = POLICY.plan(work(SKEWED, trusted=False), previous=IN_ORDER)
    assert plan == DISTRUST
    assert not plan.longest_first


def test_one_generator_moves_at_a_time():
    eager = TailIsolationPolicy(TailIsolation.model_validate({"gainPercent": 0}))
    plan = eager.plan(work([20_000.0, 20_000.0, *[2_000.0] * 200], instances=8), previous=IN_ORDER)
    sizes = [len(plan.tail_generators)]
    for _ in range(4):
        longer_tail = work([20_000.0, 19_000.0, 18_000.0, 17_000.0, *[2_000.0] * 200], instances=8)
        plan = eager.plan(longer_tail, previous=plan)
        sizes.append(len(plan.tail_generators))
    assert sizes == [2, 3, 4, 4, 4]


def test_a_small_gain_moves_nobody():
    stiff = TailIsolationPolicy(TailIsolation.model_validate({"gainPercent": 50}))
    first = POLICY.plan(work(SKEWED, instances=8), previous=IN_ORDER)
    again = stiff.plan(work([*SKEWED, 9_000.0, 9_000.0], instances=8), previous=first)
    assert again.tail_generators == first.tail_generators


def test_sides_that_cost_time_are_given_up():
    first = POLICY.plan(work(SKEWED), previous=IN_ORDER)
    # one long on each: 162 s; with a side of one, two or three generators 163, 170, 168 s
    assert POLICY.plan(work([20_000.0] * 4 + [2_000.0] * 8), previous=first) == LONGEST_FIRST


def test_a_tail_whose_generators_left_is_chosen_anew():
    first = POLICY.plan(work(SKEWED, instances=5), previous=IN_ORDER)
    there = work(SKEWED, instances=5)
    staying = [instance for instance in there.instances if instance.generator_id not in first.tail_generators]
    again = POLICY.plan(Work(trusted=True, groups=there.groups, instances=staying), previous=first)
    assert again.tail_generators
    assert again.tail_generators < {instance.generator_id for instance in staying}


@given(st.lists(st.integers(1, 20_000).map(float), min_size=2, max_size=80), st.integers(2, 6), st.booleans())
def test_sides_never_cost_time_by_the_model(lengths, instances, busy):
    given_work = work(lengths, instances=instances, slots=32, running=(500.0, 100.0) if busy else ())
    plan = POLICY.plan(given_work, previous=IN_ORDER)
    assert plan_seconds(plan, given_work) <= plan_seconds(LONGEST_FIRST, given_work) * (1 + 1e-9)
