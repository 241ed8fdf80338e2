"""What goes into an allocation and what comes out. Values only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
