"""Algorithm 2: splits worked out by hand, and what holds for all."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl.spec.scheduling import SkewAware
from streamrl_workers.scheduler.dispatch.makespan import Instance, fastest_first
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, Candidate, Work
from streamrl_workers.scheduler.dispatch.skew_aware import (
    SkewAwarePolicy,
    best_split,
    percentile,
    side_seconds,
    tail_count,
)

CURVE = LatencyCurve.of_milliseconds([(1, 10), (2, 12), (4, 20)])


def fleet(count: int, *, slots: int = 4, curve: LatencyCurve = CURVE) -> list[Instance]:
    return [Instance(generator_id=f"g{number}", slots=slots, curve=curve) for number in range(count)]


def work(lengths: list[float], *, instances: list[Instance], trusted: bool = True, samples: int = 1) -> Work:
    groups = [
        Candidate(group_id=place, wave=0, place=place, predicted_tokens=tokens) for place, tokens in enumerate(lengths)
    ]
    return Work(trusted=trusted, groups=groups, samples=samples, instances=instances)


@pytest.mark.parametrize(
    ("objective", "count", "tail_s", "rest_s"),
    [
        # 2 samples of 900 in the tail, 8 of 500 in the rest, 4 instances:
        #   1 | 3   tail 12 ms x 900 = 10.8   rest, 3 each: 16 ms x 500 = 8.0     max 10.8   sum 18.8
        #   2 | 2   tail 10 ms x 900 =  9.0   rest, 4 each: 20 ms x 500 = 10.0    max 10.0   sum 19.0
        #   3 | 1   tail 10 ms x 900 =  9.0   rest, 8 on one: 20 ms x 500 x 2 = 20.0
        ("Max", 2, 9.0, 10.0),
        ("Sum", 1, 10.8, 8.0),
    ],
)
def test_the_split_of_four(objective, count, tail_s, rest_s):
    split = best_split(fleet(4), tail_samples=2, rest_samples=8, tail_tokens=900, rest_tokens=500, objective=objective)
    assert (split.tail_instances, split.tail_s, split.rest_s) == (
        count,
        pytest.approx(tail_s),
        pytest.approx(rest_s),
    )


@pytest.mark.parametrize(
    ("kinds", "samples", "seconds"),
    [
        ({(CURVE, 4): 1}, 8, 2 * 0.020 * 100),  # two rounds
        ({(CURVE, 4): 1}, 5, 2 * 0.020 * 100),  # a started round counts whole
        ({(CURVE, 4): 2}, 2, 0.010 * 100),
        ({(CURVE, 4): 0, (CURVE, 2): 1}, 2, 0.012 * 100),
        # 200 and 100 tokens/s: 4 and 2 samples, one full round and half of one
        ({(CURVE, 4): 1, (CURVE.scaled(2), 4): 1}, 6, max(0.020, 0.024) * 100),
    ],
)
def test_a_side(kinds, samples, seconds):
    assert side_seconds(Counter(kinds), samples=samples, tokens=100) == pytest.approx(seconds)


@pytest.mark.parametrize(("groups", "percent", "tail"), [(10, 20, 2), (2, 20, 1), (3, 50, 2), (1024, 20, 205)])
def test_the_tail_is_some_and_never_all(groups, percent, tail):
    assert tail_count(groups, percent=percent) == tail


def test_percentiles_are_values_that_exist():
    assert [percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], percent) for percent in (10, 50, 90, 100)] == [1, 5, 9, 10]
    assert percentile([7], 90) == 7


def test_the_plan_names_groups_and_generators():
    lengths = [300.0, 1000.0, 100.0, 500.0, 900.0, 200.0, 400.0, 600.0, 700.0, 800.0]
    batch = work(lengths, instances=fleet(4))
    plan = SkewAwarePolicy(SkewAware()).plan(batch, previous=IN_ORDER)
    assert plan.tail_generators == {"g0", "g1"}
    assert [group.group_id for group in batch.groups if plan.is_tail(group)] == [1, 4]
    assert plan.strict
    assert plan.longest_first
    summed = SkewAwarePolicy(SkewAware.model_validate({"objective": "Sum"})).plan(batch, previous=IN_ORDER)
    assert summed.tail_generators == {"g0"}


def test_of_equal_predictions_the_first_planned_are_the_tail_of_every_batch():
    plan = SkewAwarePolicy(SkewAware()).plan(work([5.0] * 10, instances=fleet(4)), previous=IN_ORDER)
    later = [Candidate(group_id=40 + place, wave=4, place=place, predicted_tokens=5.0) for place in range(10)]
    assert [candidate.place for candidate in later if plan.is_tail(candidate)] == [0, 1]


@pytest.mark.parametrize(("groups", "instances"), [(1, 4), (10, 1), (0, 4), (10, 0)])
def test_there_are_not_always_two_sides(groups, instances):
    plan = SkewAwarePolicy(SkewAware()).plan(work([5.0] * groups, instances=fleet(instances)), previous=IN_ORDER)
    assert not plan.tail_generators


def test_without_trust_it_is_fifo():
    batch = work([1.0, 2.0, 3.0], instances=fleet(4), trusted=False)
    plan = SkewAwarePolicy(SkewAware()).plan(batch, previous=IN_ORDER)
    assert not plan.tail_generators
    assert [group.group_id for group in sorted(batch.groups, key=plan.key)] == [0, 1, 2]


@given(
    st.integers(1, 60),
    st.integers(1, 200),
    st.integers(500, 20_000),
    st.integers(1, 500),
    st.lists(st.tuples(st.sampled_from([1.0, 1.7, 3.0]), st.integers(1, 16)), min_size=2, max_size=8),
)
def test_max_is_never_worse_than_sum(tail, rest, tail_tokens, rest_tokens, kinds):
    instances = fastest_first(
        Instance(generator_id=f"g{number}", slots=slots, curve=CURVE.scaled(scale))
        for number, (scale, slots) in enumerate(kinds)
    )
    shape = {"tail_samples": tail, "rest_samples": rest, "tail_tokens": tail_tokens, "rest_tokens": rest_tokens}
    slowest, summed = (best_split(instances, **shape, objective=objective) for objective in ("Max", "Sum"))
    assert slowest.cost_s("Max") <= summed.cost_s("Max")
    assert summed.cost_s("Sum") <= slowest.cost_s("Sum")
