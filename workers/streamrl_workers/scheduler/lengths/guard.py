"""Whether a length signal is good enough to be used, from what became of its predictions.

Owns the window of pairs, the rule and its bounds. Does not own what is predicted, nor what is done
without trust (dispatch goes on as fifo).

    trusted = at least MIN_PAIRS pairs
              and lower limit of recall at 20 %, whole window > RECALL_BOUND
              and lower limit of the rank correlation, newest RECENT_PAIRS > 0
              and recall at 20 %, newest RECENT_PAIRS > chance

The first two rules keep out what does not know; the last two notice when what did know no longer does.
When they end a trust, older pairs are forgotten: they tell of a predictor that is gone. Looked at
every `LOOK_PAIRS` pairs, so its cost stays small and trust does not change with every pair.

An oracle that becomes inverted is distrusted within FLIP_PAIRS pairs: with j inverted ones among the
newest n the rank correlation is 1 - 2j/n, and its lower limit reaches 0 at j = 0.41 n.
"""

from collections import deque

from streamrl_workers.scheduler.lengths.quality import (
    Quality,
    measure,
    rank_correlation,
    rank_correlation_lower,
    recall,
)

MIN_PAIRS = 256
"""No trust before so many: the longest 20 % are then 51 groups, and the limit of a recall of .75 is .62."""
WINDOW_PAIRS = 1024
"""Lengths drift with the policy; this is one batch of the largest runs and some steps of the usual ones."""
RECENT_PAIRS = 128
"""Few enough to notice a flip soon, enough that the limit of a rank correlation of .5 is .35."""
LOOK_PAIRS = 16
FLIP_PAIRS = 96
"""What is inverted from one pair on is distrusted within so many."""
TAIL_PERCENT = 20
CHANCE = TAIL_PERCENT / 100
"""Recall of predictions that know nothing."""
RECALL_BOUND = 0.30
"""Bound on the lower limit. An order that knows nothing costs nothing on average, so the bound need not be far above
chance; but it is asked at every look of a long run, and with 256 pairs it takes a recall of .44 to pass: 4.8 standard
deviations above chance, so that luck does not pass it."""

KEEP_BOUND = 0.25
"""The bound for one that is trusted: a signal near RECALL_BOUND would else change the plan at every look."""


class Guard:
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
        enough = len(predicted) >= MIN_PAIRS
        recent = enough and _holds(predicted[-RECENT_PAIRS:], actual[-RECENT_PAIRS:])
        if self.trusted and not recent:
            self._pairs = deque(list(self._pairs)[-RECENT_PAIRS:], maxlen=WINDOW_PAIRS)
        bound = KEEP_BOUND if self.trusted else RECALL_BOUND
        self.trusted = recent and self.quality.recall[TAIL_PERCENT].lower > bound


def _holds(predicted: list[float], actual: list[float]) -> bool:
    """Whether the newest pairs alone still show that the signal knows something."""
    correlation = rank_correlation(predicted, actual)
    if correlation is None or rank_correlation_lower(correlation, pairs=len(predicted)) <= 0:
        return False
    return recall(predicted, actual, percent=TAIL_PERCENT).value > CHANCE
