"""Modelled generation makespan: seconds until the last sample has its last token.

Owns the model of instances that take samples in a given order, each free slot at once, on the instance where a
sample runs fastest. Exact for lengths that are right, with the curves as they are; it knows no prefill, no KV
limit beyond slots, no time for weights.

A group's samples share a prompt and go to one instance as far as its slots reach. The model moves them in *units*:
the largest number of samples that divides a group and every instance's slots, all of the group's predicted length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import ceil, floor, gcd

from streamrl.latency import LatencyCurve, replica_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One generator, as a plan sees it."""

    generator_id: str
    slots: int
    curve: LatencyCurve
    """By active samples."""
    running: tuple[float, ...] = ()
    """Expected tokens that samples of earlier batches still have to go, one entry for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An instance in units."""

    curve: LatencyCurve
    """By active units."""
    capacity: int
    running: tuple[float, ...] = ()


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


def unit_samples(instances: Sequence[Instance], *, samples: int) -> int:
    """Samples of one unit, for groups of so many."""
    return gcd(samples, *(instance.slots for instance in instances))


def servers_of(instances: Sequence[Instance], *, unit: int) -> list[Server]:
    """Instances in units of so many samples; instances with equal curves share one."""
    curves: dict[LatencyCurve, LatencyCurve] = {}
    found = []
    for instance in instances:
        curve = curves.get(instance.curve)
        if curve is None:
            curve = curves[instance.curve] = unit_curve(instance.curve, unit=unit)
        running = sorted(instance.running, reverse=True)[::unit]
        found.append(Server(curve=curve, capacity=instance.slots // unit, running=tuple(running)))
    return found


def unit_curve(curve: LatencyCurve, *, unit: int) -> LatencyCurve:
    """The same times by units: equal at every whole number of units."""
    if unit == 1:
        return curve
    counts = {1, ceil(curve.batches[-1] / unit) + 1}
    for batch in curve.batches:
        counts |= {max(1, floor(batch / unit)), ceil(batch / unit)}
    batches = tuple(sorted(counts))
    return LatencyCurve(batches, tuple(curve.at(count * unit) for count in batches))


def fits(count: int, servers: Sequence[Server]) -> bool:
    """Whether so many units all find a free place at once."""
    return count <= sum(max(0, server.capacity - len(server.running)) for server in servers)


def list_seconds(lengths: Sequence[float], servers: Sequence[Server]) -> float:
    """Makespan when units are issued in the given order, beside what runs already.

    Args:
        lengths: tokens of each unit, in the order of issue.
        servers: at least one; of equally fast ones the earlier goes first.

    While units wait every place is taken, so each server keeps the pace of its full batch; from the last issue on
    all that is left runs at once, and its time is exact (`replica_seconds`). O((N + places) log places).
    """
    held = [list(server.running) for server in servers]
    rest = _fill(lengths, servers, held=held)
    begun_s = _refill(rest, servers, held=held) if rest else 0.0
    return begun_s + max(
        (replica_seconds(server.curve, tokens) for server, tokens in zip(servers, held, strict=True) if tokens),
        default=0.0,
    )


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


def _fill(lengths: Sequence[float], servers: Sequence[Server], *, held: list[list[float]]) -> Sequence[float]:
    """Issue while places are free; what still waits then."""
    offers = [
        _offer(server, len(held[index]), index=index)
        for index, server in enumerate(servers)
        if len(held[index]) < server.capacity
    ]
    heapify(offers)
    for placed, tokens in enumerate(lengths):
        if not offers:
            return lengths[placed:]
        index = offers[0][2]
        held[index].append(tokens)
        if len(held[index]) < servers[index].capacity:
            heapreplace(offers, _offer(servers[index], len(held[index]), index=index))
        else:
            heappop(offers)
    return ()


def _offer(server: Server, active: int, *, index: int) -> tuple[float, float, int]:
    """How fast one more unit would run there; of equally fast ones the emptier goes first."""
    return server.curve.at(active + 1), (active + 1) / server.capacity, index


def _refill(lengths: Sequence[float], servers: Sequence[Server], *, held: list[list[float]]) -> float:
    """Issue the rest, one for each place that frees; when the last was issued. `held` are then the tokens left."""
    pace_s = [server.curve.at(len(tokens)) for server, tokens in zip(servers, held, strict=True)]
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


def _most_tokens_per_s(instance: Instance) -> float:
    """Between two points of a curve b / PTL(b) has no peak: the ends are enough."""
    points = [batch for batch in instance.curve.batches if batch < instance.slots]
    return max(instance.curve.tokens_per_s(batch) for batch in (*points, 1, instance.slots))
