"""Alg. 1 of StreamRL (arXiv 2504.15930, section 4): how many devices generate and how many train.

    one datacenter    minimise max(P_gen(x), P_train(y)) over x + y <= n
    two datacenters   m devices generate, n devices train; the faster side is shrunk until both match

Both are one rule here: find the least time T that the devices allow, then give each stage the fewest devices with which
it is still within T. The first part is where the falling P_gen(x) meets the rising P_train(n - x): found by bisection. A
longer step may cost less, so every time from T to T (1 + tolerance) at which a stage could give devices back is tried,
and the least cost of a step wins; among equals the shorter step, then fewer devices. Nothing within the tolerance is
cheaper: a setting whose time is t has at least the fewest devices that are within t.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from streamrl.errors import UserError

SECONDS_PER_HOUR = 3600.0
BALANCED_SHARE = 0.02
"""Two stages whose times differ by less than this share of the slower one bound a step together."""

Bound = Literal["generation", "training", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers of devices that a stage may have: multiples of `unit` from `least` to `most`."""

    unit: int = 1
    """Devices of one instance: a replica's, a machine's."""
    least: int = 1
    """Fewer do not hold the model."""
    most: int = 2**31
    """More are not allowed."""

    def __post_init__(self) -> None:
        if min(self.unit, self.least, self.most) < 1:
            raise ValueError(f"sizes must be at least 1, got {self}")

    def upto(self, devices: int) -> range:
        """All of them that so many devices are enough for, rising."""
        first = -(-self.least // self.unit) * self.unit
        return range(first, min(devices, self.most) + 1, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Generation or training, as the choice sees it."""

    seconds: Callable[[int], float]
    """Devices -> seconds of a step; must not rise (`StageCurve.at`)."""
    sizes: Sizes = Sizes()
    device_cost_per_hour: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Devices of both stages, and what they bring."""

    generator_devices: int
    trainer_devices: int
    generation_s: float
    """Of one step."""
    training_s: float
    cost_per_hour: float

    @property
    def step_s(self) -> float:
        """Seconds from step to step where the stages overlap: the slower one's."""
        return max(self.generation_s, self.training_s)

    @property
    def cost_per_step(self) -> float:
        """Cost of one step."""
        return self.cost_per_hour * self.step_s / SECONDS_PER_HOUR

    @property
    def bound(self) -> Bound:
        """The stage that sets the time of a step."""
        if abs(self.generation_s - self.training_s) <= BALANCED_SHARE * self.step_s:
            return "both"
        return "generation" if self.generation_s > self.training_s else "training"

    def cost_of(self, samples: int, *, samples_per_step: int) -> float:
        """Cost of so many samples."""
        return self.cost_per_step * samples / samples_per_step


TOLERANCE = 0.05
"""A step may take this share longer than the best if that makes it cheaper; less than what a profile can tell apart."""
_FIELD = "devices"


def one_datacenter(
    generation: Stage, training: Stage, *, devices: int, tolerance: float = TOLERANCE, fixed_cost_per_hour: float = 0.0
) -> Allocation:
    """The cheapest allocation of `devices` of one kind within the tolerance of the fastest one.

    Args:
        generation: its times, sizes, cost.
        training: the same.
        devices: for both together.
        tolerance: share of the best time by which a step may be longer.
        fixed_cost_per_hour: of what the choice does not change.

    Raises:
        UserError: there are too few devices.
    """
    least = next(iter(training.sizes.upto(devices)), devices)
    sizes = generation.sizes.upto(devices - least)
    if not sizes:
        first = _least(generation) + _least(training)
        raise UserError(field=_FIELD, rule=f"must be at least {first} for one of each stage", got=devices)

    def rest(x: int) -> int:
        return training.sizes.upto(devices - x)[-1]

    met = bisect_left(sizes, x=True, key=lambda x: generation.seconds(x) <= training.seconds(rest(x)))
    beside = sizes[max(met - 1, 0) : met + 1]
    best_s = min(max(generation.seconds(x), training.seconds(rest(x))) for x in beside)
    return _cheapest(
        generation, training, spaces=(devices, devices), best_s=best_s, tolerance=tolerance, fixed=fixed_cost_per_hour
    )


def two_datacenters(
    generation: Stage,
    training: Stage,
    *,
    generator_devices: int,
    trainer_devices: int,
    tolerance: float = TOLERANCE,
    fixed_cost_per_hour: float = 0.0,
) -> Allocation:
    """The cheapest allocation of devices of two kinds within the tolerance of the fastest one: what is not needed is given back.

    Raises:
        UserError: there are too few devices of a kind.
    """
    spaces = (generator_devices, trainer_devices)
    for name, stage, space in zip(("generator", "trainer"), (generation, training), spaces, strict=True):
        if not stage.sizes.upto(space):
            raise UserError(field=f"{name} {_FIELD}", rule=f"must be at least {_least(stage)}", got=space)
    best_s = max(
        stage.seconds(stage.sizes.upto(space)[-1]) for stage, space in zip((generation, training), spaces, strict=True)
    )
    return _cheapest(generation, training, spaces=spaces, best_s=best_s, tolerance=tolerance, fixed=fixed_cost_per_hour)


def neighbours(
    chosen: Allocation, generation: Stage, training: Stage, *, fixed_cost_per_hour: float = 0.0
) -> list[Allocation]:
    """The allocations with one instance more or less of a stage, and those with one moved; by generators, then trainers."""
    steps = (-1, 0, 1)
    pairs = [
        (chosen.generator_devices + i * generation.sizes.unit, chosen.trainer_devices + j * training.sizes.unit)
        for i in steps
        for j in steps
        if (i, j) != (0, 0) and i * j <= 0
    ]
    return [
        _allocation(generation, training, x=x, y=y, fixed=fixed_cost_per_hour)
        for x, y in pairs
        if x in generation.sizes.upto(x) and y in training.sizes.upto(y)
    ]


def _least(stage: Stage) -> int:
    return -(-stage.sizes.least // stage.sizes.unit) * stage.sizes.unit


def _cheapest(
    generation: Stage, training: Stage, *, spaces: tuple[int, int], best_s: float, tolerance: float, fixed: float
) -> Allocation:
    most_s = best_s * (1 + tolerance)
    stages = (generation, training)
    limits = {
        best_s,
        *(s for stage, space in zip(stages, spaces, strict=True) for s in _times(stage, space, best_s, most_s)),
    }
    found = [
        _allocation(
            generation,
            training,
            x=_fewest(generation, spaces[0], within_s=limit_s),
            y=_fewest(training, spaces[1], within_s=limit_s),
            fixed=fixed,
        )
        for limit_s in limits
    ]
    return min(found, key=lambda one: (one.cost_per_step, one.step_s, one.generator_devices + one.trainer_devices))


def _times(stage: Stage, space: int, above_s: float, most_s: float) -> Iterator[float]:
    """The stage's times in the window, by rising size."""
    sizes = stage.sizes.upto(space)
    first = bisect_left(sizes, -most_s, key=lambda size: -stage.seconds(size))
    last = bisect_left(sizes, -above_s, key=lambda size: -stage.seconds(size))
    return (stage.seconds(size) for size in sizes[first:last])


def _fewest(stage: Stage, space: int, *, within_s: float) -> int:
    sizes = stage.sizes.upto(space)
    return sizes[bisect_left(sizes, x=True, key=lambda size: stage.seconds(size) <= within_s)]


def _allocation(generation: Stage, training: Stage, *, x: int, y: int, fixed: float) -> Allocation:
    return Allocation(
        generator_devices=x,
        trainer_devices=y,
        generation_s=generation.seconds(x),
        training_s=training.seconds(y),
        cost_per_hour=fixed + x * generation.device_cost_per_hour + y * training.device_cost_per_hour,
    )
