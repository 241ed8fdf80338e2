"""How long generation takes for one step, from latency by batch size and the lengths of answers.

Two estimates, both of B groups of G samples on x replicas:

    by_list     list scheduling, longest first: one queue, a slot that frees takes the next sample. Exact for the given
                lengths where late binding knows them; no staircase, and the longest answer's own time is in it.
    by_rounds   Eq. 2 of StreamRL (arXiv 2504.15930): each replica works off its share of the samples in rounds of full
                batches of mean length, PTL(BS) · L_mean · ceil(M/BS). Knows no tail. For batches too large to play through.

A replica steps all its active sequences at once, so each step of the batch takes PTL(active); admitting a sample stops
it for `fill_s`. Lengths in tokens, times in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, inf

from streamrl.latency import LatencyCurve, rounds_seconds
from streamrl_operator.allocation.stage_curve import StageCurve

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

    @property
    def tokens_per_s(self) -> float:
        """Of a full batch."""
        return self.curve.tokens_per_s(self.slots)


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
    speed = sum(replica.tokens_per_s for replica in replicas)
    return max(
        _rounds(replica, samples=ceil(samples * replica.tokens_per_s / speed), mean_tokens=mean_tokens)
        for replica in replicas
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
