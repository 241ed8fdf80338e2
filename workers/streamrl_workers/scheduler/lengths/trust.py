"""Whether a length signal is good enough to be used, from what became of its predictions.

A pair is a predicted place in the length distribution (0..1) and the mean tokens that the group's completions then had.

    trusted = at least MIN_PAIRS pairs
              and lower limit of the recall of the longest 20 %, whole window > RECALL_BOUND
              and lower limit of the rank correlation, newest RECENT_PAIRS > 0

The second rule keeps out what does not know; the third notices when what did know no longer does. When it ends a trust,
older pairs are forgotten: they tell of a predictor that is gone. Looked at every LOOK_PAIRS pairs, so its cost stays small.
An oracle that becomes inverted is distrusted within FLIP_PAIRS pairs: with j inverted ones among the newest n the rank
correlation is 1 - 2j/n, and its lower limit reaches 0 at j = 0.41 n.

Ties are shared out: of m equal values of which only some belong to the longest, each belongs to them by that share. So
predictions that are all equal have the recall of chance, and so has every prediction where all lengths are equal.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import atanh, ceil, sqrt, tanh
from operator import mul
from statistics import StatisticsError, correlation

from streamrl_workers.scheduler.lengths.quantiles import places

MIN_PAIRS = 256
"""No trust before so many: the longest 20 % are then 51 groups, and the limit of a recall of .75 is .62."""
WINDOW_PAIRS = 1024
"""Lengths drift with the policy; this is one batch of the largest runs and some steps of the usual ones."""
RECENT_PAIRS = 128
"""Few enough to notice a flip soon, enough that the limit of a rank correlation of .5 is .35."""
LOOK_PAIRS = 16
FLIP_PAIRS = 96
"""What is inverted from one pair on is distrusted within so many."""
LONGEST_PERCENT = 20
RECALL_BOUND = 0.30
"""Chance is .20. It is asked at every look of a long run, and with 256 pairs it takes a recall of .44 to pass: 4.8 standard
deviations above chance, so that luck does not pass it."""
KEEP_BOUND = 0.25
"""The bound for one that is trusted: a signal near RECALL_BOUND would else change the order at every look."""
_Z = 1.96
"""Limits are of 95 % intervals."""
_RANK_VARIANCE = 1.06
"""Fieller, Hartley and Pearson 1957: variance of atanh of a rank correlation is 1.06 / (n - 3)."""
_NEARLY_ONE = 1.0 - 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How good the predictions of these pairs were."""

    pairs: int = 0
    recall: float | None = None
    """Share of the longest groups that were predicted to be among the longest; None without pairs."""
    recall_lower: float | None = None
    """Lower limit of its 95 % interval (Wilson 1927)."""
    rank_correlation: float | None = None
    """Spearman's, -1..1; None where it is not defined."""

    @property
    def correlation_lower(self) -> float | None:
        """Lower limit of the 95 % interval of the rank correlation."""
        if self.rank_correlation is None or self.pairs <= 3:  # noqa: PLR2004 - it has n - 3 degrees of freedom
            return None
        bounded = min(max(self.rank_correlation, -_NEARLY_ONE), _NEARLY_ONE)
        return tanh(atanh(bounded) - _Z * sqrt(_RANK_VARIANCE / (self.pairs - 3)))


class Trust:
    """The newest pairs of one signal, and what they say of it."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW_PAIRS)
        self._unseen = 0
        self.trusted = False
        self.quality = Quality()
        """Of the window, as of the newest look."""

    def add(self, predicted_place: float, *, tokens: float) -> None:
        """A group is finished: the place (0..1) that was predicted, and its mean tokens."""
        self._pairs.append((predicted_place, tokens))
        self._unseen += 1
        if self._unseen == LOOK_PAIRS:
            self._unseen = 0
            self._look()

    def _look(self) -> None:
        predicted, actual = [place for place, _ in self._pairs], [tokens for _, tokens in self._pairs]
        self.quality = measure(predicted, actual)
        newest = measure(predicted[-RECENT_PAIRS:], actual[-RECENT_PAIRS:]).correlation_lower
        recent = len(predicted) >= MIN_PAIRS and newest is not None and newest > 0
        if self.trusted and not recent:
            self._pairs = deque(list(self._pairs)[-RECENT_PAIRS:], maxlen=WINDOW_PAIRS)
        bound = KEEP_BOUND if self.trusted else RECALL_BOUND
        self.trusted = recent and (self.quality.recall_lower or 0.0) > bound


def measure(predicted: Sequence[float], actual: Sequence[float]) -> Quality:
    """The quality of these pairs."""
    if not predicted:
        return Quality()
    count = max(1, ceil(len(actual) * LONGEST_PERCENT / 100))
    hits = sum(map(mul, _longest(predicted, count), _longest(actual, count)))
    return Quality(
        pairs=len(predicted),
        recall=hits / count,
        recall_lower=_wilson_lower(hits / count, count),
        rank_correlation=_rank_correlation(predicted, actual),
    )


# ---- inside


def _longest(values: Sequence[float], count: int) -> list[float]:
    """For each value the share by which it is among the `count` largest."""
    cut = sorted(values)[-count]
    shared = (count - sum(value > cut for value in values)) / values.count(cut)
    return [1.0 if value > cut else shared if value == cut else 0.0 for value in values]


def _wilson_lower(share: float, trials: int) -> float:
    z2 = _Z * _Z / trials
    spread = _Z * sqrt(max(share * (1 - share) / trials + z2 / (4 * trials), 0.0))
    return max(0.0, (share + z2 / 2 - spread) / (1 + z2))


def _rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's; None where one side is all equal."""
    left_places, right_places = places(left), places(right)
    try:
        return correlation([left_places[value] for value in left], [right_places[value] for value in right])
    except StatisticsError:
        return None
