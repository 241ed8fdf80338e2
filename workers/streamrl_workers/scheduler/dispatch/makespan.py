"""Modelled generation makespan: seconds until the last sample has its last token.

Owns the model of instances that take samples in a given order, each free slot at once, on the instance where a
sample runs fastest, a group's samples together as far as its slots reach. Exact for lengths that are right, with the
curves as they are; it knows no prefill, no KV limit beyond slots, no time for weights, and nothing that runs beside.
How right lengths are is for `model.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate

from streamrl.latency import LatencyCurve, table_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One generator, as an order sees it."""

    generator_id: str
    slots: int
    curve: LatencyCurve
    """By active samples."""


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


def dealt(samples: int, instances: Sequence[Instance], *, together: int = 1) -> list[int]:
    """The instance (its index) of each of the next samples, as far as slots reach; it does not depend on lengths.

    Args:
        samples: that are issued, one group after the other.
        instances: of equally fast ones the emptier goes first, as `fleet.py` has it, then the earlier.
        together: samples of a group; they go to one instance as far as its slots reach.
    """
    active = [0] * len(instances)
    offers = [(instance.curve.at(1), 0.0, index) for index, instance in enumerate(instances)]
    heapify(offers)
    places: list[int] = []
    while offers and len(places) < samples:
        index = offers[0][2]
        instance = instances[index]
        portion = min(instance.slots - active[index], together - len(places) % together, samples - len(places))
        places += [index] * portion
        active[index] += portion
        if active[index] < instance.slots:
            heapreplace(offers, (instance.curve.at(active[index] + 1), active[index] / instance.slots, index))
        else:
            heappop(offers)
    return places


class StepTables:
    """Step times of instances by active samples, read off their curves once: a makespan asks for them by the thousand."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        known: dict[tuple[LatencyCurve, int], tuple[list[float], list[float]]] = {}
        self.step_s: list[list[float]] = []
        """By instance: seconds of a step with 0 .. slots active samples."""
        self._most_s: list[list[float]] = []
        """The same, or with fewer where that takes longer."""
        for instance in instances:
            kind = (instance.curve, instance.slots)
            if kind not in known:
                step_s = [instance.curve.at(active) for active in range(instance.slots + 1)]
                known[kind] = step_s, list(accumulate(step_s, max))
            self.step_s.append(known[kind][0])
            self._most_s.append(known[kind][1])

    def left_s(self, held: Sequence[list[float]]) -> float:
        """Seconds until all that each instance holds is done: the exact replica time (`streamrl.latency`) of the slowest.

        None takes longer than its longest sample would at the pace of its full batch: those that may be the slowest are
        looked at first, and few are looked at.
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


def list_seconds(
    lengths: Sequence[float], tables: StepTables, *, places: Sequence[int], refilled: bool = False
) -> float:
    """Makespan when samples are issued in the given order.

    Args:
        lengths: tokens of each sample, in the order of issue.
        tables: of at least one instance.
        places: of the samples that find a free slot at once (`dealt`).
        refilled: whether samples of another batch take the slots that free behind these: nothing gets faster at the end.

    While samples wait every slot is taken, so each instance keeps the pace of its full batch; from the last issue on
    all that is left runs at once, and its time is exact. O((N + slots) log slots).
    """
    held: list[list[float]] = [[] for _ in tables.step_s]
    for index, tokens in zip(places, lengths, strict=False):
        held[index].append(tokens)
    rest = lengths[len(places) :]
    begun_s = _refill(rest, tables, held=held) if rest else 0.0
    if refilled:
        return begun_s + max(
            max(tokens) * step_s[-1] for tokens, step_s in zip(held, tables.step_s, strict=True) if tokens
        )
    return begun_s + tables.left_s(held)


def _refill(lengths: Sequence[float], tables: StepTables, *, held: list[list[float]]) -> float:
    """Issue the rest, one for each slot that frees; when the last was issued. `held` are then the tokens left."""
    pace_s = [step_s[len(tokens)] for step_s, tokens in zip(tables.step_s, held, strict=True)]
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
