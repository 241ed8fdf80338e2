"""Alg. 1: the same as trying everything, the paper's examples, and the cheapest within a tolerance."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl_operator.allocation.choice import Allocation, Sizes, Stage, neighbours, one_datacenter, two_datacenters
from streamrl_operator.allocation.stage_times import StageCurve

MACHINE = Sizes(unit=8, least=8)
"""The paper's unit: a machine of 8 GPUs."""


def stage(points: dict[int, float], *, sizes: Sizes = MACHINE, cost: float = 1.0) -> Stage:
    return Stage(seconds=StageCurve.through(points).at, sizes=sizes, device_cost_per_hour=cost)


@pytest.mark.parametrize(
    ("model", "devices", "generation", "training", "chosen", "times"),
    [
        ("32B", 64, {32: 1.00, 40: 0.80}, {24: 0.73, 32: 0.73}, (40, 24), (0.80, 0.73)),
        ("72B", 128, {64: 1.00, 80: 0.81}, {48: 0.83, 64: 0.58}, (80, 48), (0.81, 0.83)),
    ],
)
@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.05])
def test_the_papers_examples(
    *,
    model: str,
    devices: int,
    generation: dict[int, float],
    training: dict[int, float],
    chosen: tuple[int, int],
    times: tuple[float, float],
    tolerance: float,
) -> None:
    found = one_datacenter(stage(generation), stage(training), devices=devices, tolerance=tolerance)
    assert (found.generator_devices, found.trainer_devices) == chosen, model
    assert (found.generation_s, found.training_s) == times
    even = max(generation[devices // 2], training[devices // 2])
    assert even / found.step_s == pytest.approx({"32B": 1.25, "72B": 1.205}[model], abs=0.005)


curves = st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e3), min_size=1, max_size=5).map(StageCurve.through)
sizes = st.builds(
    Sizes, unit=st.sampled_from([1, 2, 3, 8]), least=st.integers(1, 12), most=st.sampled_from([16, 40, 1000])
)
stages = st.builds(
    lambda curve, sizes, cost: Stage(seconds=curve.at, sizes=sizes, device_cost_per_hour=cost),
    curves,
    sizes,
    st.sampled_from([0.0, 0.35, 1.0, 2.85]),
)
tolerances = st.sampled_from([0.0, 0.05, 0.3])
fixed_costs = st.sampled_from([0.0, 7.0])


def tried(generation: Stage, training: Stage, *, x: int, y: int, fixed: float) -> Allocation:
    return Allocation(
        generator_devices=x,
        trainer_devices=y,
        generation_s=generation.seconds(x),
        training_s=training.seconds(y),
        cost_per_hour=fixed + x * generation.device_cost_per_hour + y * training.device_cost_per_hour,
    )


def assert_best(found: Allocation, everything: list[Allocation], *, tolerance: float) -> None:
    limit_s = min(one.step_s for one in everything) * (1 + tolerance)
    least = min(one.cost_per_step for one in everything if one.step_s <= limit_s)
    assert found.step_s <= limit_s * (1 + 1e-12)
    assert found.cost_per_step == pytest.approx(least, rel=1e-9)
    assert any(
        (one.generator_devices, one.trainer_devices) == (found.generator_devices, found.trainer_devices)
        for one in everything
    )


@given(generation=stages, training=stages, devices=st.integers(1, 60), tolerance=tolerances, fixed=fixed_costs)
def test_one_datacenter_is_as_good_as_trying_everything(
    *, generation: Stage, training: Stage, devices: int, tolerance: float, fixed: float
) -> None:
    pairs = product(generation.sizes.upto(devices), training.sizes.upto(devices))
    everything = [tried(generation, training, x=x, y=y, fixed=fixed) for x, y in pairs if x + y <= devices]
    if not everything:
        with pytest.raises(UserError, match="for one of each stage"):
            one_datacenter(generation, training, devices=devices)
        return
    found = one_datacenter(generation, training, devices=devices, tolerance=tolerance, fixed_cost_per_hour=fixed)
    assert_best(found, everything, tolerance=tolerance)


@given(
    generation=stages, training=stages, spaces=st.tuples(st.integers(1, 40), st.integers(1, 40)), tolerance=tolerances
)
def test_two_datacenters_are_as_good_as_trying_everything(
    *, generation: Stage, training: Stage, spaces: tuple[int, int], tolerance: float
) -> None:
    first, second = spaces
    pairs = product(generation.sizes.upto(first), training.sizes.upto(second))
    everything = [tried(generation, training, x=x, y=y, fixed=0.0) for x, y in pairs]
    if not everything:
        with pytest.raises(UserError, match="devices: must be at least"):
            two_datacenters(generation, training, generator_devices=first, trainer_devices=second)
        return
    found = two_datacenters(generation, training, generator_devices=first, trainer_devices=second, tolerance=tolerance)
    assert_best(found, everything, tolerance=tolerance)


def test_of_two_datacenters_the_faster_side_is_shrunk_until_both_match() -> None:
    generation, training = stage({8: 8.0, 64: 1.0}, cost=1.0), stage({8: 1.99, 16: 1.0}, cost=2.85)
    found = two_datacenters(generation, training, generator_devices=32, trainer_devices=64, tolerance=0.0)
    assert (found.generator_devices, found.trainer_devices) == (32, 8)
    assert (found.generation_s, found.training_s) == pytest.approx((2.0, 1.99))
    assert found.bound == "both"


def test_costs_and_bounds_are_told() -> None:
    one = Allocation(generator_devices=2, trainer_devices=1, generation_s=36.0, training_s=18.0, cost_per_hour=10.0)
    assert (one.step_s, one.bound) == (36.0, "generation")
    assert one.cost_per_step == pytest.approx(0.1)
    assert one.cost_of(1000, samples_per_step=500) == pytest.approx(0.2)


def test_neighbours_have_one_instance_more_or_less_or_moved() -> None:
    generation, training = stage({8: 1.0}), stage({8: 1.0})
    chosen = one_datacenter(generation, training, devices=48, tolerance=0.0)
    pairs = [(one.generator_devices, one.trainer_devices) for one in neighbours(chosen, generation, training)]
    assert (chosen.generator_devices, chosen.trainer_devices) == (24, 24)
    assert pairs == [(16, 24), (16, 32), (24, 16), (24, 32), (32, 16), (32, 24)]


def test_neighbours_are_sizes_that_can_be() -> None:
    generation, training = stage({8: 1.0}), stage({8: 1.0}, sizes=Sizes(unit=8, least=8, most=8))
    chosen = one_datacenter(generation, training, devices=16)
    assert [(one.generator_devices, one.trainer_devices) for one in neighbours(chosen, generation, training)] == [
        (16, 8)
    ]
