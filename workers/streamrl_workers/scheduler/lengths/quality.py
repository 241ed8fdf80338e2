"""How good length predictions are: recall of the longest, rank correlation, calibration. Pure functions of pairs.

A pair is a predicted place in the length distribution (0..1) and the mean tokens that the group's
completions then had. Ties are shared out: of m equal values of which only some belong to the longest,
each belongs to them by that share. So predictions that are all equal have the recall of chance, and so has
every prediction where all lengths are equal: equal lengths are no evidence for anybody.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import atanh, ceil, sqrt, tanh
from operator import mul, neg, sub

PERCENTS = (20, 10, 5)
"""The longest so many percent of the groups are looked for."""
_Z = 1.96
"""Limits are of 95 % intervals."""
_RANK_VARIANCE = 1.06
"""Fieller, Hartley and Pearson 1957: variance of atanh of a rank correlation is 1.06 / (n - 3)."""
_NEARLY_ONE = 1.0 - 1e-12
_ALL_EQUAL = 1e-9
"""Sums of squares below it are rounding: one value that differs gives far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Share of the longest groups that were predicted to be among the longest."""

    value: float
    lower: float
    """Lower limit of its 95 % interval (Wilson)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of a window of pairs."""

    pairs: int = 0
    recall: Mapping[int, Recall] = field(default_factory=dict)
    """Percent -> recall of the longest so many percent; empty without pairs."""
    rank_correlation: float | None = None
    """Spearman's, -1..1; None where it is not defined."""
    calibration: float | None = None
    """Mean distance between the predicted and the true place, 0 (exact) to 1; 1/4 if all places were predicted as the middle."""


def measure(predicted: Sequence[float], actual: Sequence[float]) -> Quality:
    """All measures of these pairs."""
    if not predicted:
        return Quality()
    predicted_ranks, actual_ranks = ranks(predicted), ranks(actual)
    sides = (_Side(predicted), _Side(actual))
    return Quality(
        pairs=len(predicted),
        recall={percent: _recall(*sides, percent=percent) for percent in PERCENTS},
        rank_correlation=_correlation(predicted_ranks, actual_ranks),
        calibration=sum(map(abs, map(sub, predicted, actual_ranks))) / len(predicted),
    )


def recall(predicted: Sequence[float], actual: Sequence[float], *, percent: float) -> Recall:
    """Share of the truly longest `percent` (at least one) that are among the predicted longest `percent`."""
    return _recall(_Side(predicted), _Side(actual), percent=percent)


class _Side:
    """Values with their order, made once."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self._falling = sorted(values, reverse=True)

    def longest(self, count: int) -> list[float]:
        """For each value the share by which it is among the `count` largest."""
        cut = self._falling[count - 1]
        first = bisect_left(self._falling, -cut, key=neg)
        shared = (count - first) / (bisect_right(self._falling, -cut, key=neg) - first)
        return [1.0 if value > cut else shared if value == cut else 0.0 for value in self.values]


def _recall(predicted: _Side, actual: _Side, *, percent: float) -> Recall:
    count = max(1, ceil(len(actual.values) * percent / 100))
    hits = sum(map(mul, predicted.longest(count), actual.longest(count)))
    return Recall(value=hits / count, lower=wilson_lower(hits, count))


def wilson_lower(hits: float, trials: int) -> float:
    """Lower limit of the 95 % interval of a share (Wilson 1927)."""
    share, z2 = hits / trials, _Z * _Z / trials
    spread = _Z * sqrt(max(share * (1 - share) / trials + z2 / (4 * trials), 0.0))
    return max(0.0, (share + z2 / 2 - spread) / (1 + z2))


def ranks(values: Sequence[float]) -> list[float]:
    """Place of each value among all, 0..1; equal values share the middle of their places."""
    counts = Counter(values)
    places: dict[float, float] = {}
    below = 0
    for value in sorted(counts):
        places[value] = (below + counts[value] / 2) / len(values)
        below += counts[value]
    return [places[value] for value in values]


def rank_correlation(predicted: Sequence[float], actual: Sequence[float]) -> float | None:
    """Spearman's; None where one side is all equal."""
    return _correlation(ranks(predicted), ranks(actual))


def rank_correlation_lower(correlation: float, *, pairs: int) -> float:
    """Lower limit of the 95 % interval of a rank correlation of more than three pairs."""
    bounded = min(max(correlation, -_NEARLY_ONE), _NEARLY_ONE)
    return tanh(atanh(bounded) - _Z * sqrt(_RANK_VARIANCE / (pairs - 3)))


def _correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Pearson's, of two lists of places, whose mean is 1/2."""
    quarter = len(left) / 4
    squares = (sum(map(mul, left, left)) - quarter) * (sum(map(mul, right, right)) - quarter)
    if squares < _ALL_EQUAL:
        return None
    products: float = sum(map(mul, left, right))
    return (products - quarter) / sqrt(squares)
