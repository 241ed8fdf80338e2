"""Modelled generation makespan: seconds until the last sample has its last token.

Owns the model of instances that take samples in a given order, each free slot at once, on the instance where a
sample runs fastest, a group's samples together as far as its slots reach. Exact for lengths that are right, with the
curves as they are; it knows no prefill, no KV limit beyond slots, no time for weights, and nothing that runs beside.
How right lengths are is for `model.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

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
        instances: of equally fast ones the emptier goes first, as `generators.py` has it, then the earlier.
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


def step_tables(instances: Sequence[Instance]) -> list[list[float]]:
    """By instance: seconds of a step with 0 .. slots active samples. Read off a curve once: a makespan asks by the thousand."""
    kinds = {(one.curve, one.slots) for one in instances}
    known = {(curve, slots): [curve.at(active) for active in range(slots + 1)] for curve, slots in kinds}
    return [known[one.curve, one.slots] for one in instances]


def list_seconds(
    lengths: Sequence[float], tables: Sequence[list[float]], *, places: Sequence[int], refilled: bool = False
) -> float:
    """Makespan when samples are issued in the given order.

    Args:
        lengths: tokens of each sample, in the order of issue.
        tables: `step_tables` of at least one instance.
        places: of the samples that find a free slot at once (`dealt`).
        refilled: whether samples of another batch take the slots that free behind these: nothing gets faster at the end.

    While samples wait every slot is taken, so each instance keeps the pace of its full batch; from the last issue on
    all that is left runs at once, and its time is exact. O((N + slots) log slots).
    """
    held: list[list[float]] = [[] for _ in tables]
    for index, tokens in zip(places, lengths, strict=False):
        held[index].append(tokens)
    rest = lengths[len(places) :]
    begun_s = _refill(rest, tables, held=held) if rest else 0.0
    if refilled:
        return begun_s + max(max(tokens) * step_s[-1] for tokens, step_s in zip(held, tables, strict=True) if tokens)
    return begun_s + max(table_seconds(step_s, tokens) for tokens, step_s in zip(held, tables, strict=True))


def _refill(lengths: Sequence[float], tables: Sequence[list[float]], *, held: list[list[float]]) -> float:
    """Issue the rest, one for each slot that frees; when the last was issued. `held` are then the tokens left."""
    pace_s = [step_s[len(tokens)] for step_s, tokens in zip(tables, held, strict=True)]
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
