"""Pools of several clusters: as good as trying every subset of clusters and every number of devices."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.link_shares import ClusterRates, best_plan
from streamrl_operator.allocation.choice import Sizes, Stage
from streamrl_operator.allocation.over_clusters import (
    HOME,
    AllocationProblem,
    ClusterAllocation,
    ClusterPool,
    LinkTimes,
    over_clusters,
)
from streamrl_operator.allocation.stage_times import StageCurve

SAMPLES = 100


def stage(one_s: float, *, most: int, cost: float = 1.0, unit: int = 1, power: float = 1.0) -> Stage:
    """`one_s` seconds of a step with one device."""
    curve = StageCurve.through({1: one_s, 64: one_s / 64**power})
    return Stage(seconds=curve.at, sizes=Sizes(unit=unit, most=most), device_cost_per_hour=cost)


def pool(name: str, generation: Stage, *, cluster: str = HOME, floor_s: float = 0.0) -> ClusterPool:
    return ClusterPool(name=name, cluster=cluster, generation=generation, floor_s=floor_s)


def everything(asked: AllocationProblem) -> Iterator[tuple[float, float, tuple[int, ...], int]]:
    """Step, cost of a step, devices of pools, devices that train: of every choice, by the plan of shares for each."""
    counts = [(0, *one.generation.sizes.upto(one.generation.sizes.most)) for one in asked.pools]
    for devices in product(*counts):
        rates: dict[str, float] = {}
        for one, count in zip(asked.pools, devices, strict=True):
            if count:
                rates[one.cluster] = rates.get(one.cluster, 0.0) + asked.samples / one.generation.seconds(count)
        if not rates:
            continue
        clusters = {
            name: ClusterRates(sample_s=1 / rate)
            if name == HOME
            else ClusterRates(
                sample_s=1 / rate,
                version_s=asked.links[name].version_s,
                sample_bytes_s=asked.links[name].sample_bytes_s,
                most_link=asked.links[name].most_link,
            )
            for name, rate in rates.items()
        }
        plan = best_plan(clusters, samples=asked.samples, is_overlapped=asked.is_overlapped, needed=clusters)
        floor_s = min(one.floor_s for one, count in zip(asked.pools, devices, strict=True) if count)
        hourly = asked.fixed_cost_per_hour + sum(
            one.generation.device_cost_per_hour * count for one, count in zip(asked.pools, devices, strict=True)
        )
        for trainers in asked.training.sizes.upto(asked.trainer_devices):
            step_s = max(plan.step_s, floor_s, asked.training.seconds(trainers))
            cost = hourly + trainers * asked.training.device_cost_per_hour
            yield step_s, cost * step_s / 3600, devices, trainers


def assert_best(found: ClusterAllocation, asked: AllocationProblem, *, tolerance: float) -> None:
    tried = list(everything(asked))
    limit_s = min(step_s for step_s, *_ in tried) * (1 + tolerance)
    least = min(cost for step_s, cost, *_ in tried if step_s <= limit_s * (1 + 1e-9))
    assert found.sizes.step_s <= limit_s * (1 + 1e-6)
    assert found.sizes.cost_per_step == pytest.approx(least, rel=1e-6)
    of_same = [one for one in tried if one[2:] == (tuple(found.pool_devices.values()), found.sizes.trainer_devices)]
    assert [one[:2] for one in of_same] == [pytest.approx((found.sizes.step_s, found.sizes.cost_per_step))]


THREE = AllocationProblem(
    pools=(
        pool("home", stage(60, most=4, cost=2.0)),
        pool("near", stage(80, most=4, cost=1.0), cluster="near"),
        pool("thin", stage(60, most=4, cost=0.5), cluster="thin"),
    ),
    links={
        "near": LinkTimes(version_s=2.0, sample_bytes_s=0.001, most_link=0.9),
        "thin": LinkTimes(version_s=2.0, sample_bytes_s=0.001, most_link=0.02),
    },
    training=stage(20, most=4, cost=3.0),
    trainer_devices=4,
    samples=SAMPLES,
    is_overlapped=True,
)


@pytest.mark.parametrize("is_overlapped", [True, False])
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.5])
def test_the_cluster_behind_a_thin_link_is_left_out_though_its_devices_are_the_cheapest(
    *, is_overlapped: bool, tolerance: float
) -> None:
    asked = replace(THREE, is_overlapped=is_overlapped)
    found = over_clusters(asked, tolerance=tolerance)
    assert found.pool_devices["thin"] == 0
    assert min(found.pool_devices["home"], found.pool_devices["near"]) > 0
    assert_best(found, asked, tolerance=tolerance)


def test_it_is_taken_behind_a_link_like_the_others() -> None:
    asked = replace(THREE, links=THREE.links | {"thin": replace(THREE.links["thin"], most_link=0.1 * 9)})
    found = over_clusters(asked)
    assert found.pool_devices["thin"] == 4
    assert_best(found, asked, tolerance=0.05)


@pytest.mark.parametrize("is_overlapped", [True, False])
@pytest.mark.parametrize(("most_link", "floor_s"), [(0.02, 40.0), (0.9, 5.0)])
def test_a_step_takes_as_long_as_the_longest_answer_on_the_fastest_pool_that_is_taken(
    *, most_link: float, floor_s: float, is_overlapped: bool
) -> None:
    """Behind a thin link the fast pool has no version in time: its devices shorten nothing."""
    home, near, fast = (
        replace(one, floor_s=longest) for one, longest in zip(THREE.pools, (40.0, 50.0, 5.0), strict=True)
    )
    links = THREE.links | {"thin": replace(THREE.links["thin"], most_link=most_link)}
    asked = replace(THREE, pools=(home, near, fast), links=links, is_overlapped=is_overlapped)
    found = over_clusters(asked)
    assert (found.pool_devices["thin"] > 0) is (floor_s < 40)
    assert found.sizes.generation_s >= floor_s
    assert_best(found, asked, tolerance=0.05)


def many(clusters: int, *, pools: int = 1, devices: int = 16) -> AllocationProblem:
    """Clusters that differ a little: none betters another one plainly."""
    named = [HOME, *(f"c{number}" for number in range(1, clusters))]
    return replace(
        THREE,
        pools=[
            pool(
                f"{name}-{number}",
                stage(40.0 + 7 * place + 3 * number, most=devices, cost=1.0 + 0.13 * place + 0.04 * number, power=0.9),
                cluster=name,
            )
            for place, name in enumerate(named)
            for number in range(pools)
        ],
        links={
            name: LinkTimes(version_s=0.02 * place, sample_bytes_s=0.0003 * place, most_link=0.9)
            for place, name in enumerate(named)
            if place
        },
        training=stage(60, most=32, cost=3.0),
        trainer_devices=32,
        is_overlapped=False,
    )


@pytest.mark.parametrize(("clusters", "pools", "devices"), [(6, 1, 16), (8, 1, 64)])
def test_among_many_the_search_is_ended_and_says_so(clusters: int, pools: int, devices: int) -> None:
    asked = many(clusters, pools=pools, devices=devices)
    found = over_clusters(asked, most_plans=50)
    assert not found.is_best
    assert over_clusters(asked, most_plans=0).sizes.cost_per_step >= found.sizes.cost_per_step


@pytest.mark.parametrize("most_plans", [0, 1, 4, 16])
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.5])
def test_also_a_search_that_is_ended_keeps_to_the_tolerance(most_plans: int, tolerance: float) -> None:
    asked = many(3, devices=4)
    found = over_clusters(asked, tolerance=tolerance, most_plans=most_plans)
    fastest_s = min(step_s for step_s, *_ in everything(asked))
    assert found.sizes.step_s <= fastest_s * (1 + tolerance) * (1 + 1e-6)
    if found.is_best:
        assert_best(found, asked, tolerance=tolerance)


def test_among_few_the_search_comes_to_its_end() -> None:
    assert over_clusters(THREE).is_best


stages = st.builds(
    stage,
    st.floats(1, 100),
    most=st.integers(1, 3),
    cost=st.sampled_from([0.0, 0.35, 1.0, 2.85]),
    unit=st.sampled_from([1, 2]),
    power=st.sampled_from([0.3, 0.8, 1.0]),
)
links = st.builds(
    LinkTimes,
    version_s=st.sampled_from([0.0, 0.1, 1.0, 20.0]),
    sample_bytes_s=st.sampled_from([0.0, 0.001, 0.3]),
    most_link=st.sampled_from([0.1, 0.5, 1.0]),
)


@st.composite
def questions(draw: st.DrawFn) -> AllocationProblem:
    """Up to four pools in up to three clusters."""
    places = draw(st.lists(st.sampled_from([HOME, "a", "b"]), min_size=1, max_size=4))
    return AllocationProblem(
        pools=[
            pool(f"p{number}", draw(stages), cluster=place, floor_s=draw(st.sampled_from([0.0, 10.0, 30.0])))
            for number, place in enumerate(places)
        ],
        links={name: draw(links) for name in ("a", "b")},
        training=draw(stages),
        trainer_devices=draw(st.integers(2, 3)),
        samples=SAMPLES,
        is_overlapped=draw(st.booleans()),
        fixed_cost_per_hour=draw(st.sampled_from([0.0, 2.0])),
    )


@given(questions(), st.sampled_from([0.0, 0.05, 0.5, 3.0]))
@settings(max_examples=60, deadline=None)
def test_as_good_as_trying_everything(asked: AllocationProblem, tolerance: float) -> None:
    if not list(everything(asked)):
        with pytest.raises(UserError, match="must be"):
            over_clusters(asked, tolerance=tolerance)
        return
    assert_best(over_clusters(asked, tolerance=tolerance), asked, tolerance=tolerance)


def test_the_best_of_a_given_choice_of_clusters() -> None:
    found = over_clusters(THREE, exactly={HOME, "thin"})
    assert (found.pool_devices["near"], found.pool_devices["thin"] > 0) == (0, True)
    assert found.sizes.cost_per_step > over_clusters(THREE).sizes.cost_per_step


def test_one_cluster_alone_is_the_choice_without_clusters() -> None:
    asked = replace(THREE, pools=THREE.pools[:1])
    found = over_clusters(asked)
    assert found.link_plan.shares[HOME].samples == pytest.approx(SAMPLES)
    assert found.sizes.generation_s == pytest.approx(asked.pools[0].generation.seconds(found.pool_devices["home"]))


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(UserError, match="trainer devices: must be enough for one trainer, got 0"):
        over_clusters(replace(THREE, trainer_devices=0))
    big = pool("big", replace(stage(1, most=4), sizes=Sizes(unit=8, most=4)))
    with pytest.raises(UserError, match="devices of pools: must be enough for one generator"):
        over_clusters(replace(THREE, pools=[big]))
