"""The search for static sides: never behind Algorithm 2, near brute force, and within its time."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl.spec.scheduling import SkewAware
from streamrl_workers.scheduler.dispatch import static_sides
from streamrl_workers.scheduler.dispatch.makespan import Instance, fastest_first
from streamrl_workers.scheduler.dispatch.modelled import Model, likely, plan_seconds
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, Candidate, Work, tail_plan
from streamrl_workers.scheduler.dispatch.skew_aware import SkewAwarePolicy
from streamrl_workers.scheduler.dispatch.static_sides import best_static

CURVE = LatencyCurve.of_milliseconds([(1, 8.3), (16, 9.4), (32, 10.2), (64, 11.7)])
STEEP = LatencyCurve.of_milliseconds([(1, 8), (64, 40)])


def work(
    lengths: list[float], fleet: list[tuple[int, LatencyCurve]], *, samples: int = 1, correlation: float = 1.0
) -> Work:
    groups = [
        Candidate(group_id=place, wave=0, place=place, predicted_tokens=tokens) for place, tokens in enumerate(lengths)
    ]
    instances = [
        Instance(generator_id=f"g{number:03}", slots=slots, curve=curve) for number, (slots, curve) in enumerate(fleet)
    ]
    return Work(
        trusted=True,
        groups=groups,
        samples=samples,
        instances=fastest_first(instances),
        rank_correlation=correlation,
    )


def brute_force(found: Work) -> float:
    """Least mean makespan of all sides whose tail has the fastest instances."""
    model, ranked = Model(found), sorted(found.groups, key=lambda group: group.rank)
    return min(
        fmean(model.seconds(tail_plan(ranked[:groups], found.instances[:tail], strict=True, why="")))
        for groups in range(1, len(ranked))
        for tail in range(1, len(found.instances))
    )


FLEETS = st.lists(st.tuples(st.sampled_from([2, 4, 16]), st.sampled_from([STEEP, CURVE])), min_size=2, max_size=5)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 20_000).map(float), min_size=2, max_size=40),
    FLEETS,
    st.integers(1, 3),
    st.sampled_from([1.0, 0.8]),
)
def test_it_is_never_behind_algorithm_2_by_the_model(lengths, fleet, samples, correlation):
    found = work(lengths, fleet, samples=samples, correlation=correlation)
    model = Model(found)
    best = likely(model.seconds(best_static(model)))
    for objective in ("Max", "Sum"):
        paper = SkewAwarePolicy(SkewAware(objective=objective)).plan(found, previous=IN_ORDER)
        assert best <= likely(model.seconds(paper)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_near_brute_force(seed):
    chance = Random(seed)
    lengths = [min(20_480.0, chance.lognormvariate(8.3, 0.8)) for _ in range(48)]
    fleet = [(chance.choice((4, 8, 16)), STEEP)] * chance.choice((4, 8))
    found = work(lengths, fleet)
    assert plan_seconds(best_static(Model(found)), found) <= 1.03 * brute_force(found)


def test_where_all_would_fit_the_rest_may_wait_on_few_generators():
    """Room for twice the batch: nearly all generators hold a few of the longest each."""
    chance = Random(1)
    lengths = [min(20_480.0, chance.lognormvariate(8.3, 0.8)) for _ in range(256)]
    found = work(lengths, [(64, CURVE)] * 8, correlation=0.9)
    plan = best_static(Model(found))
    rest = sum(not plan.is_tail(group) for group in found.groups)
    assert plan.strict
    assert rest > 64 * (8 - len(plan.tail_generators))
    assert plan_seconds(plan, found) < 0.98 * plan_seconds(IN_ORDER, found)


def test_a_batch_that_is_too_large_to_search_has_the_sides_of_algorithm_2(monkeypatch):
    found = work([float(1000 + place) for place in range(64)], [(8, STEEP)] * 8)
    searched = best_static(Model(found))
    monkeypatch.setattr(static_sides, "MOST_MODELLED", 64)
    unsearched = best_static(Model(found))
    paper = [
        SkewAwarePolicy(SkewAware(objective=objective)).plan(found, previous=IN_ORDER) for objective in ("Max", "Sum")
    ]
    assert unsearched.tail_generators in [plan.tail_generators for plan in paper]
    assert plan_seconds(searched, found) < plan_seconds(unsearched, found)
