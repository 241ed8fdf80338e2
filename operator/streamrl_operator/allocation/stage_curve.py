"""Seconds that a stage needs for one step, by the number of its devices: P_gen(x) and P_train(y) of Alg. 1.

Between two profiled points the time is a power of the size, t = t0 (x0/x)^p through both: a straight line where both axes
are logarithmic. What nobody measured must not look free:

    below the first point   p of the first two, but from 1 to 2: fewer devices share the work evenly at best
    above the last point    p of the last two, but at most 1
    one point               p = 1: work that splits evenly, the best that can be hoped for
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf, log

_EVEN = 1.0
"""Exponent of work that splits evenly over the devices."""
_STEEPEST = 2.0
"""Two sizes close together may differ by noise: no steeper than this below them."""


@dataclass(frozen=True, slots=True)
class StageCurve:
    """Times of one stage. Invariant: `at` never rises with the size."""

    sizes: tuple[int, ...]
    """Devices, rising, at least one point."""
    seconds: tuple[float, ...]
    """Of one step; never rising."""

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError("a stage's curve needs as many seconds as sizes, and at least one")
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"sizes of a stage's curve must rise from 1, got {self.sizes}")
        if not all(0 < value < inf for value in self.seconds):
            raise ValueError(f"seconds of a stage's curve must be positive, got {self.seconds}")
        if list(self.seconds) != sorted(self.seconds, reverse=True):
            raise ValueError(f"seconds of a stage's curve must not rise, got {self.seconds}")

    @classmethod
    def through(cls, points: Mapping[int, float]) -> "StageCurve":
        """From devices -> seconds as measured. A size that came out slower than a smaller one gets the smaller one's time: what it has more can stand idle."""
        sizes = sorted(points)
        return cls(tuple(sizes), tuple(accumulate((points[size] for size in sizes), min)))

    def at(self, size: float) -> float:
        """Seconds of a step with so many devices; infinite with none."""
        if size <= 0:
            return inf
        place = bisect_left(self.sizes, size)
        if place < len(self.sizes) and self.sizes[place] == size:
            return self.seconds[place]
        if place == 0:
            return self._from(0, size, power=min(_STEEPEST, max(_EVEN, self._power(0))))
        if place == len(self.sizes):
            return self._from(place - 1, size, power=min(_EVEN, self._power(place - 2)))
        inside = self._from(place - 1, size, power=self._power(place - 1))
        return min(max(inside, self.seconds[place]), self.seconds[place - 1])  # rounding stays between the two

    def _from(self, place: int, size: float, *, power: float) -> float:
        seconds: float = self.seconds[place] * (self.sizes[place] / size) ** power
        return seconds

    def _power(self, place: int) -> float:
        """Exponent between a point and the next; that of even work where there are no two."""
        if len(self.sizes) == 1:
            return _EVEN
        low, high = max(place, 0), max(place, 0) + 1
        return log(self.seconds[low] / self.seconds[high]) / log(self.sizes[high] / self.sizes[low])
