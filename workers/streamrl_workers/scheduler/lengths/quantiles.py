"""A bounded sliding window of numbers with its empirical distribution.

Owns the map between a number and its place in the distribution. Places are those of Hazen: of n sorted
values the i-th (from 1) is at (i - 1/2) / n, linear between; equal values share the middle of their places.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence

UNKNOWN_PLACE = 0.5
"""Of anything, in a distribution of which nothing is known."""


def places(values: Sequence[float]) -> dict[float, float]:
    """Value -> its place among all of them, 0..1."""
    counts, found, below = Counter(values), {}, 0
    for value in sorted(counts):
        found[value] = (below + counts[value] / 2) / len(values)
        below += counts[value]
    return found


class SlidingQuantiles:
    """The newest `window` values, sorted."""

    def __init__(self, values: Iterable[float] = (), *, window: int) -> None:
        assert window > 0
        self._window = window
        self._arrivals: deque[float] = deque()
        self._sorted: list[float] = []
        self.seen = 0
        """Values that were ever added."""
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """One more value; the oldest one leaves a full window."""
        if len(self._arrivals) == self._window:
            oldest = self._arrivals.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._arrivals.append(value)
        self.seen += 1
        insort(self._sorted, value)

    def place(self, value: float) -> float:
        """Share of the window below `value`, 0..1; `UNKNOWN_PLACE` of an empty window."""
        if not self._sorted:
            return UNKNOWN_PLACE
        return (bisect_left(self._sorted, value) + bisect_right(self._sorted, value)) / (2 * len(self._sorted))

    def at(self, place: float) -> float:
        """The value at this place (0..1), in the unit of the values; 0 of an empty window."""
        if not self._sorted:
            return 0.0
        last = len(self._sorted) - 1
        position = min(max(place * len(self._sorted) - 0.5, 0.0), float(last))
        lower = int(position)
        upper = min(lower + 1, last)
        return self._sorted[lower] + (position - lower) * (self._sorted[upper] - self._sorted[lower])
