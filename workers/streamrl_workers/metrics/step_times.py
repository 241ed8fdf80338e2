"""How long an engine's decoding steps take, counted by batch: what a generator knows of its own speed.

    seconds of a step at a bucket's mean batch = seconds / steps,      mean batch = tokens / steps

Owns: the buckets and the counts. Does not own clocks (instants are parameters), nor what follows from them
(`scheduler/dispatch.speeds.py`). A batch that changes from step to step is counted as well as one that stays.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

BUCKETS_PER_DOUBLING = 2


def bucket_of(batch: float) -> int:
    """Which batches are counted together."""
    return round(BUCKETS_PER_DOUBLING * log2(batch))


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps of one bucket since the process began; all three only grow."""

    steps: float = 0.0
    """Decoding steps; parts of one in the simulator, whose time goes on by events."""
    tokens: float = 0.0
    """Over all samples of the batch."""
    seconds: float = 0.0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(self.steps + other.steps, self.tokens + other.tokens, self.seconds + other.seconds)

    def __sub__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(self.steps - other.steps, self.tokens - other.tokens, self.seconds - other.seconds)


class StepTimes:
    """Counts one engine's steps.

    A step's time is the wall since the one before it, or since the engine began to generate: what comes in between (the
    prompts of new samples, a cancel, the loop's own work) is part of it; waiting and new weights are not.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._counts: dict[int, StepCounts] = {}

    def enter(self, *, generating: bool, now_s: float) -> None:
        """From now on the engine generates, or does not."""
        if not generating:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def stepped(self, gained: Iterable[int], *, now_s: float) -> None:
        """The engine has given something.

        Args:
            gained: new tokens of each sample that gained any; the most of them are as many steps as there were.
        """
        tokens = [count for count in gained if count > 0]
        if not tokens or self._since_s is None:
            return
        steps, total = max(tokens), sum(tokens)
        bucket = bucket_of(total / steps)
        self._counts[bucket] = self._counts.get(bucket, StepCounts()) + StepCounts(steps, total, now_s - self._since_s)
        self._since_s = now_s

    def counts(self) -> dict[int, StepCounts]:
        """Bucket -> what was counted until now."""
        return dict(self._counts)
