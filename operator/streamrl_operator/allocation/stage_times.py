"""Seconds that a stage needs for one step, by the number of its devices: P_gen(x) and P_train(y) of Alg. 1.

Between two profiled points the time is a power of the size, t = t0 (x0/x)^p through both: a straight line where both axes
are logarithmic. What nobody measured must not look free:

    below the first point   p of the first two, but from 1 to 2: fewer devices share the work evenly at best
    above the last point    p of the last two, but at most 1
    one point               p = 1: work that splits evenly, the best that can be hoped for

Generation, of B groups of G samples on x replicas, has two estimates. A replica steps all its active sequences at once, so each step of
the batch takes PTL(active); admitting a sample stops it for `fill_s`. Lengths in tokens, times in seconds.

    by_list     list scheduling, longest first: one queue, a slot that frees takes the next sample. The longest answer's own time is in it
    by_rounds   Eq. 2 of StreamRL: each replica works off its share in rounds of full batches of mean length. For batches too large to play through

Training: for each number of processes a fixed part and a part for each token, the straight line of least squares, neither below 0.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from math import ceil, inf, log
from statistics import fmean

from streamrl.latency import LatencyCurve, rounds_seconds

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


MOST_PLAYED = 20_000
"""Samples of a step that are still played through one by one: 3 to 5 µs each for each size, a second or two for a curve."""
_FINE_SIZES = 8
_GROWTH = 1.3
"""Every number of replicas up to the former is tried, then each this much larger than the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One generator."""

    curve: LatencyCurve
    slots: int
    """Sequences at once."""
    fill_s: float = 0.0
    """That the whole batch waits while one more sample is admitted (its prompt is read)."""


@dataclass(slots=True, eq=False)
class _Playing:
    """A replica at a moment: `done` tokens were given to each sequence that has been there all the time."""

    replica: Replica
    now_s: float = 0.0
    done: float = 0.0
    ends: list[float] = field(default_factory=list)
    """Heap: `done` at which each active sequence ends."""

    def admit(self, length: float) -> None:
        heappush(self.ends, self.done + length)
        self.now_s += self.replica.fill_s

    def next_end_s(self) -> float:
        return self.now_s + (self.ends[0] - self.done) * self.replica.curve.at(len(self.ends))

    def end_next(self) -> None:
        self.now_s = self.next_end_s()
        self.done = heappop(self.ends)


def by_list(replicas: Sequence[Replica], *, lengths: Sequence[float]) -> float:
    """Seconds until all samples are done."""
    waiting = sorted(lengths)  # the longest is taken from the end
    playing = [_Playing(replica) for replica in replicas]
    _deal(playing, waiting)
    events = [(one.next_end_s(), place) for place, one in enumerate(playing) if one.ends]
    heapify(events)
    last_s = 0.0
    while events:
        last_s, place = events[0]
        one = playing[place]
        one.end_next()
        if waiting:
            one.admit(waiting.pop())
        if one.ends:
            heapreplace(events, (one.next_end_s(), place))
        else:
            heappop(events)
    return last_s


def _deal(playing: Sequence[_Playing], waiting: list[float]) -> None:
    """Fill the slots: each sample goes to the replica that would then step fastest, the emptiest among equals."""
    free = [(one.replica.curve.at(1), 0, place) for place, one in enumerate(playing)]
    heapify(free)
    while waiting and free:
        _, active, place = heappop(free)
        one = playing[place]
        one.admit(waiting.pop())
        if active + 1 < one.replica.slots:
            heappush(free, (one.replica.curve.at(active + 2), active + 1, place))


def by_rounds(replicas: Sequence[Replica], *, samples: int, mean_tokens: float) -> float:
    """Eq. 2, the samples shared out by the speed of a full batch; the slowest replica counts."""
    speeds = [replica.curve.tokens_per_s(replica.slots) for replica in replicas]
    all_speed = sum(speeds)
    return max(
        _rounds(replica, samples=ceil(samples * speed / all_speed), mean_tokens=mean_tokens)
        for replica, speed in zip(replicas, speeds, strict=True)
    )


def _rounds(replica: Replica, *, samples: int, mean_tokens: float) -> float:
    decoding_s = rounds_seconds(replica.curve, batch=replica.slots, samples=samples, mean_tokens=mean_tokens)
    return decoding_s + samples * replica.fill_s


def spread(lengths: Sequence[float], *, count: int) -> list[float]:
    """So many lengths with the distribution of those given: its quantiles at even steps, without chance."""
    known = sorted(lengths)
    places = ((number + 0.5) / count * len(known) - 0.5 for number in range(count))
    return [_quantile(known, min(max(place, 0.0), len(known) - 1.0)) for place in places]


def _quantile(known: Sequence[float], place: float) -> float:
    low = int(place)
    high = min(low + 1, len(known) - 1)
    return known[low] + (place - low) * (known[high] - known[low])


def generation_curve(
    replica: Replica,
    *,
    lengths: Sequence[float],
    samples: int,
    most: int,
    devices: int = 1,
    others: Sequence[Replica] = (),
) -> StageCurve:
    """P_gen of a pool by its devices.

    Args:
        replica: of the pool.
        lengths: of answers, as many as are known; their distribution counts.
        samples: of a step, B · G.
        most: replicas that the curve must reach.
        devices: of one replica.
        others: replicas of other pools, which work on the same queue.
    """
    played = spread(lengths, count=samples) if samples <= MOST_PLAYED else None
    mean_tokens = sum(lengths) / len(lengths)

    def seconds(replicas: int) -> float:
        pool = [*others, *([replica] * replicas)]
        if played is None:
            return by_rounds(pool, samples=samples, mean_tokens=mean_tokens)
        return by_list(pool, lengths=played)

    return StageCurve.through({count * devices: seconds(count) for count in _sizes(most)})


def floor_seconds(replicas: Sequence[Replica], *, lengths: Sequence[float]) -> float:
    """The longest answer alone on the fastest replica: no number of replicas makes generation faster."""
    return min((max(lengths) * replica.curve.at(1) + replica.fill_s for replica in replicas), default=inf)


def _sizes(most: int) -> list[int]:
    sizes = list(range(1, min(most, _FINE_SIZES) + 1))
    while sizes[-1] < most:
        sizes.append(min(most, ceil(sizes[-1] * _GROWTH)))
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Seconds of one step by its tokens."""

    fixed_s: float
    token_s: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> "StepLine":
        """Through (tokens, seconds), at least one. One number of tokens says nothing of the fixed part: it counts as 0."""
        tokens, seconds = [t for t, _ in points], [s for _, s in points]
        mean_tokens, mean_s = fmean(tokens), fmean(seconds)
        spread = sum((t - mean_tokens) ** 2 for t in tokens)
        if spread == 0:
            return cls(fixed_s=0.0, token_s=mean_s / mean_tokens)
        slope = sum((t - mean_tokens) * (s - mean_s) for t, s in points) / spread
        fixed_s = mean_s - slope * mean_tokens
        if slope <= 0:
            return cls(fixed_s=mean_s, token_s=0.0)
        if fixed_s < 0:  # the best line through the origin
            through = sum(t * s for t, s in points) / sum(t * t for t in tokens)
            return cls(fixed_s=0.0, token_s=through)
        return cls(fixed_s=fixed_s, token_s=slope)

    def at(self, tokens: float) -> float:
        """Seconds of a step with so many tokens."""
        return self.fixed_s + self.token_s * tokens


def training_curve(points: Iterable[tuple[int, float, float]], *, tokens: float) -> StageCurve:
    """P_train by the number of processes, from (processes, tokens, seconds), for steps of so many tokens."""
    by_size: dict[int, list[tuple[float, float]]] = {}
    for processes, known, seconds in points:
        by_size.setdefault(processes, []).append((known, seconds))
    lines: Mapping[int, StepLine] = {size: StepLine.fit(those) for size, those in by_size.items()}
    return StageCurve.through({size: line.at(tokens) for size, line in lines.items()})
