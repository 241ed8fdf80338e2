"""Tail isolation: the longest requests alone on few replicas, where all requests run at once.

    min over (q, m) of max{ T_tail(q, m), T_bulk(N - q, R - m) }          (TailSieve, 2026)

m of R replicas take the q longest of N groups; each side spreads its own evenly, longest first, so that its time is
the exact replica time of the replica that is served first: no other has a longer sample at any place. As q grows
T_tail rises and T_bulk falls, so the best q is where they cross: bisection finds it for each m. Which replica is
served next depends on how many each holds and not on lengths: a side's ranks are worked out once.

Owns the search. Counts from empty replicas; whether what runs already spoils it is for the caller (`tail_isolation.py`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from streamrl.latency import replica_seconds
from streamrl_workers.scheduler.dispatch.makespan import Server

EVERY_UP_TO = 32
"""So many replicas of the tail are all tried; above, each step is a tenth more."""
STEP_DIVISOR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to isolate the tail."""

    groups: int
    """q: so many of the longest are the tail."""
    replicas: frozenset[int]
    """m of them, by place among the servers."""
    seconds: float
    """Makespan."""


class Isolation:
    """The search for one batch and one fleet."""

    def __init__(self, falling: Sequence[float], servers: Sequence[Server], *, repeats: int) -> None:
        """
        Args:
            falling: predicted tokens of each group, longest first.
            servers: in the order in which they would become the tail's.
            repeats: units of each group.
        """
        self._groups = len(falling)
        self._repeats = repeats
        self._falling = [tokens for tokens in falling for _ in range(repeats)]
        self._servers = [Server(curve=server.curve, capacity=server.capacity) for server in servers]
        kinds = list(dict.fromkeys(self._servers))
        self._kinds = kinds
        places = {kind: place for place, kind in enumerate(kinds)}
        self._kind_of = [places[server] for server in self._servers]
        self._all = Counter(self._kind_of)

    def together_s(self) -> float:
        """Makespan without sides; infinite if not all fit."""
        side = _Side(self._kinds, self._all, units=len(self._falling))
        return side.seconds(self._falling, start=0, stop=len(self._falling))

    def best(self) -> Split | None:
        """The best split whose tail has the first servers; None if no split fits."""
        found = [split for count in self._sizes() if (split := self.at(range(count))) is not None]
        return min(found, key=lambda split: (split.seconds, len(split.replicas)), default=None)

    def at(self, replicas: Collection[int]) -> Split | None:
        """The best q for these replicas of the tail; None if it does not fit."""
        units = len(self._falling)
        counts = Counter(self._kind_of[place] for place in replicas)
        tail, bulk = _Side(self._kinds, counts, units=units), _Side(self._kinds, self._all - counts, units=units)
        low = max(1, -((bulk.capacity - units) // self._repeats))
        high = min(self._groups - 1, tail.capacity // self._repeats)
        if low > high or not bulk.capacity:
            return None

        def sides_s(groups: int) -> tuple[float, float]:
            border = groups * self._repeats
            return tail.seconds(self._falling, start=0, stop=border), bulk.seconds(
                self._falling, start=border, stop=units
            )

        first, last = low, high
        while first < last:
            middle = (first + last) // 2
            tail_s, bulk_s = sides_s(middle)
            first, last = (first, middle) if tail_s >= bulk_s else (middle + 1, last)
        seconds, groups = min((max(sides_s(groups)), groups) for groups in {max(low, first - 1), first})
        return Split(groups=groups, replicas=frozenset(replicas), seconds=seconds)

    def _sizes(self) -> Iterable[int]:
        size = 1
        while size < len(self._servers):
            yield size
            size += 1 if size < EVERY_UP_TO else size // STEP_DIVISOR


class _Side:
    """Replicas of some kinds, and which ranks the first of each kind gets."""

    def __init__(self, kinds: Sequence[Server], counts: Counter[int], *, units: int) -> None:
        self.capacity = sum(kinds[kind].capacity * count for kind, count in counts.items())
        self._ranks = [(kinds[kind], ranks) for kind, ranks in _first_ranks(kinds, counts, units=units).items()]

    def seconds(self, falling: Sequence[float], *, start: int, stop: int) -> float:
        """Makespan of the units from `start` to `stop`; infinite if they do not fit."""
        count = stop - start
        if count > self.capacity:
            return float("inf")
        return max(
            (
                replica_seconds(kind.curve, [falling[start + rank] for rank in ranks[: bisect_left(ranks, count)]])
                for kind, ranks in self._ranks
            ),
            default=0.0,
        )


def _first_ranks(kinds: Sequence[Server], counts: Counter[int], *, units: int) -> dict[int, list[int]]:
    """Kind -> ranks of the units that its first replica gets, up to `units`."""
    offers = [(kinds[kind].curve.at(1), 1 / kinds[kind].capacity, kind, 0) for kind, count in counts.items() if count]
    heapify(offers)
    ranks: dict[int, list[int]] = {kind: [] for _, _, kind, _ in offers}
    rank = 0
    while offers and rank < units:
        _, _, kind, active = offers[0]
        ranks[kind].append(rank)
        rank += counts[kind]
        active += 1
        if active < kinds[kind].capacity:
            heapreplace(offers, (kinds[kind].curve.at(active + 1), (active + 1) / kinds[kind].capacity, kind, active))
        else:
            heappop(offers)
    return ranks
