"""Per-token latency by batch size: the one model of an engine's speed that scheduler, simulator and planning share.

    sample latency        = PTL(BS) * L                     Eq. 1 of StreamRL (arXiv 2504.15930)
    M samples on one      = PTL(BS) * L_mean * ceil(M/BS)   Eq. 2
    samples that all fit  = sum_j PTL(j) (L_j - L_{j+1})    exact, lengths falling, L_{n+1} = 0 (TailSieve, 2026)

Pure values; times in seconds, lengths in tokens.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from operator import mul, sub


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """PTL(BS): seconds of one decoding step with BS active sequences, linear between points, constant below the first.

    Above the last point it goes on with the slope of the last two (a curve of one point is constant): a batch that
    nobody measured must not look free.
    """

    batches: tuple[int, ...]
    """Rising, at least one."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.batches) != len(self.seconds) or not self.batches:
            raise ValueError("a latency curve needs as many seconds as batches, and at least one")
        if list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"batches of a latency curve must rise from 1, got {self.batches}")
        if not all(value > 0 for value in self.seconds):
            raise ValueError(f"seconds of a latency curve must be positive, got {self.seconds}")

    @classmethod
    def of_milliseconds(cls, points: Iterable[tuple[int, float]], *, scale: float = 1.0) -> "LatencyCurve":
        """From (batch, milliseconds) points; `scale` multiplies the times."""
        known = list(points)
        return cls(tuple(batch for batch, _ in known), tuple(ms * scale / 1e3 for _, ms in known))

    def at(self, batch: float) -> float:
        """Seconds of one step with so many active sequences; 0 with none."""
        if batch <= 0:
            return 0.0
        place = bisect_left(self.batches, batch)
        if place == 0:
            return self.seconds[0]
        if place == len(self.batches):
            if place == 1:
                return self.seconds[0]
            place -= 1
        low, high = self.batches[place - 1], self.batches[place]
        share = (batch - low) / (high - low)
        inside = self.seconds[place - 1] + share * (self.seconds[place] - self.seconds[place - 1])
        return max(inside, self.seconds[-1]) if batch > self.batches[-1] else inside

    def scaled(self, factor: float) -> "LatencyCurve":
        """All times multiplied."""
        return LatencyCurve(self.batches, tuple(value * factor for value in self.seconds))

    def tokens_per_s(self, batch: float) -> float:
        """Decoding speed with so many active sequences."""
        return batch / self.at(batch)


def rounds_seconds(curve: LatencyCurve, *, batch: int, samples: int, mean_tokens: float) -> float:
    """Eq. 2: samples in rounds of `batch`; the paper's estimate, which counts a started round as a whole one."""
    return curve.at(min(batch, max(samples, 1))) * mean_tokens * ceil(samples / batch)


def replica_seconds(curve: LatencyCurve, lengths: Sequence[float]) -> float:
    """Samples that all run at once, from their first token to the end of the longest: exact.

    Args:
        curve: of the replica.
        lengths: tokens of each, in any order.
    """
    return table_seconds([curve.at(active) for active in range(len(lengths) + 1)], lengths)


def table_seconds(step_s: Sequence[float], lengths: Sequence[float]) -> float:
    """The same with the curve read off before: who asks by the thousand reads it once.

    Args:
        step_s: seconds of a step with 0, 1, .. active samples, at least up to as many as there are.
        lengths: tokens of each, in any order.
    """
    falling = sorted(lengths, reverse=True)
    return float(sum(map(mul, islice(step_s, 1, None), map(sub, falling, [*falling[1:], 0.0]))))
