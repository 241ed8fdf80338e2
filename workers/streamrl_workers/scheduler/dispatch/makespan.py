"""Modelled generation makespan: seconds until the last sample has its last token.

Owns the model of instances that take samples in a given order, each free slot at once, on the instance where a
sample runs fastest, a group's samples together as far as its slots reach. Exact for lengths that are right, with the
curves as they are; it knows no prefill, no KV limit beyond slots, no time for weights. How right lengths are is for
`uncertain.py`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate

from streamrl.latency import LatencyCurve, table_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One generator, as a plan sees it."""

    generator_id: str
    slots: int
    curve: LatencyCurve
    """By active samples."""
    pool: str = ""
    running: tuple[float, ...] = ()
    """Expected tokens that samples of earlier batches still have to go, one entry for each."""


def fastest_first(instances: Iterable[Instance]) -> list[Instance]:
    """By the time of a step with one sample, then with all slots taken, then by name."""
    return sorted(
        instances,
        key=lambda instance: (
            instance.curve.at(1),
            instance.curve.at(instance.slots) / instance.slots,
            instance.slots,
            instance.generator_id,
        ),
    )


def offer(instance: Instance, active: int, *, index: int) -> tuple[float, float, int]:
    """How fast one more sample would run there; of equally fast ones the emptier goes first (as `fleet.py` has it)."""
    return instance.curve.at(active + 1), active / instance.slots, index


def dealt(samples: int, instances: Sequence[Instance], *, together: int = 1) -> list[int]:
    """The instance (its index) of each of the next samples, as far as free slots reach; it does not depend on lengths.

    Args:
        samples: that are issued, one group after the other.
        instances: of equally fast ones the earlier goes first.
        together: samples of a group; they go to one instance as far as its slots reach.
    """
    active = [len(instance.running) for instance in instances]
    offers = [
        offer(instance, active[index], index=index)
        for index, instance in enumerate(instances)
        if active[index] < instance.slots
    ]
    heapify(offers)
    places: list[int] = []
    while offers and len(places) < samples:
        index = offers[0][2]
        slots = instances[index].slots
        portion = min(slots - active[index], together - len(places) % together, samples - len(places))
        places += [index] * portion
        active[index] += portion
        if active[index] < slots:
            heapreplace(offers, offer(instances[index], active[index], index=index))
        else:
            heappop(offers)
    return places


class Pace:
    """Instances with their step times by active samples as tables: a makespan asks for them by the thousand."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        known: dict[tuple[LatencyCurve, int], tuple[list[float], list[float]]] = {}
        self.instances = instances
        self.step_s: list[list[float]] = []
        """By instance: seconds of a step with 0 .. slots active samples."""
        self._most_s: list[list[float]] = []
        """The same, or with fewer where that takes longer."""
        for instance in instances:
            kind = (instance.curve, max(instance.slots, len(instance.running)))
            if kind not in known:
                step_s = [instance.curve.at(active) for active in range(kind[1] + 1)]
                known[kind] = step_s, list(accumulate(step_s, max))
            self.step_s.append(known[kind][0])
            self._most_s.append(known[kind][1])

    def left_s(self, held: Sequence[list[float]]) -> float:
        """Seconds until all that each instance holds is done: the exact replica time (`streamrl.latency`) of the slowest.

        None takes longer than its longest sample would at the pace of its full batch: those that may be the slowest are looked at first,
        and few are looked at.
        """
        bounds = [
            (max(tokens) * most_s[len(tokens)], index)
            for index, (tokens, most_s) in enumerate(zip(held, self._most_s, strict=True))
            if tokens
        ]
        slowest_s = 0.0
        for bound_s, index in sorted(bounds, reverse=True):
            if bound_s <= slowest_s:
                break
            slowest_s = max(slowest_s, table_seconds(self.step_s[index], held[index]))
        return slowest_s


class Together:
    """Samples that all begin now, each at its place (`dealt`), beside what runs already: for many draws of their lengths."""

    def __init__(self, pace: Pace, places: Sequence[int]) -> None:
        self._pace = pace
        self._numbers: list[list[int]] = [[] for _ in pace.instances]
        """By instance: which samples it gets."""
        for number, index in enumerate(places):
            self._numbers[index].append(number)

    def seconds(self, lengths: Sequence[float]) -> float:
        """Makespan of the first so many samples."""
        held = [
            [*instance.running, *map(lengths.__getitem__, numbers[: bisect_left(numbers, len(lengths))])]
            for instance, numbers in zip(self._pace.instances, self._numbers, strict=True)
        ]
        return self._pace.left_s(held)


def list_seconds(
    lengths: Sequence[float], pace: Pace, *, places: Sequence[int], following: Sequence[float] = ()
) -> float:
    """Makespan when samples are issued in the given order, beside what runs already.

    Args:
        lengths: tokens of each sample, in the order of issue.
        pace: at least one instance.
        places: of the samples that find a free slot at once (`dealt`).
        following: tokens of samples of later batches, which take the slots that free behind these; the makespan is not theirs.
            They count where not all of these find a slot at once.

    While samples wait every slot is taken, so each instance keeps the pace of its full batch; from the last issue on
    all that is left runs at once, and its time is exact. O((N + slots) log slots).
    """
    held = [list(instance.running) for instance in pace.instances]
    for index, tokens in zip(places, lengths, strict=False):
        held[index].append(tokens)
    rest = lengths[len(places) :]
    begun_s = _refill(rest, pace, held=held) if rest else 0.0
    if rest and following:
        return begun_s + _followed(following, pace, held=held)
    return begun_s + pace.left_s(held)


def bound_seconds(lengths: Iterable[float], instances: Sequence[Instance], *, samples: int) -> float:
    """No order and no placement is faster: the longest sample alone on the fastest instance, all tokens at full speed.

    Args:
        lengths: predicted tokens of each group's samples.
        instances: at least one; what runs there counts.
        samples: of each group.
    """
    known = list(lengths)
    tokens = samples * sum(known) + sum(sum(instance.running) for instance in instances)
    alone_s = max(known, default=0.0) * min(instance.curve.at(1) for instance in instances)
    running_s = max(instance.curve.at(1) * max(instance.running, default=0.0) for instance in instances)
    return max(alone_s, running_s, tokens / sum(_most_tokens_per_s(instance) for instance in instances))


# ---- inside


def _refill(lengths: Sequence[float], pace: Pace, *, held: list[list[float]]) -> float:
    """Issue the rest, one for each slot that frees; when the last was issued. `held` are then the tokens left."""
    pace_s = [step_s[len(tokens)] for step_s, tokens in zip(pace.step_s, held, strict=True)]
    ends = [(tokens * pace_s[index], index) for index, all_tokens in enumerate(held) for tokens in all_tokens]
    heapify(ends)
    now_s = 0.0
    for tokens in lengths:
        now_s, index = ends[0]
        heapreplace(ends, (now_s + tokens * pace_s[index], index))
    for all_tokens in held:
        all_tokens.clear()
    for end_s, index in ends:
        held[index].append((end_s - now_s) / pace_s[index])
    return now_s


def _followed(following: Sequence[float], pace: Pace, *, held: Sequence[Sequence[float]]) -> float:
    """Until all that is held is done, while these take every slot that frees, as far as they reach."""
    pace_s = [step_s[len(tokens)] for step_s, tokens in zip(pace.step_s, held, strict=True)]
    ends = [(tokens * pace_s[index], index, True) for index, all_tokens in enumerate(held) for tokens in all_tokens]
    heapify(ends)
    now_s = done_s = 0.0
    for tokens in following:
        now_s, index, own = ends[0]
        if own:
            done_s = now_s
        heapreplace(ends, (now_s + tokens * pace_s[index], index, False))
    left: list[list[float]] = [[] for _ in held]
    last = [0.0 for _ in held]
    for end_s, index, own in ends:
        tokens = (end_s - now_s) / pace_s[index]
        left[index].append(tokens)
        if own:
            done_s, last[index] = now_s, max(last[index], tokens)
    return done_s + pace.left_s([[min(tokens, end) for tokens in one] for one, end in zip(left, last, strict=True)])


def _most_tokens_per_s(instance: Instance) -> float:
    """Between two points of a curve b / PTL(b) has no peak: the ends are enough."""
    points = [batch for batch in instance.curve.batches if batch < instance.slots]
    return max(instance.curve.tokens_per_s(batch) for batch in (*points, 1, instance.slots))
