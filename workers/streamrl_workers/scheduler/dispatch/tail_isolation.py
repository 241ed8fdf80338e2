"""Longest first, and where nothing queues the longest alone on few generators (`isolation.py`).

A sample of a long answer is as slow as its batch is large. With free places for everybody, order alone gains
little; a few generators that hold the longest only, in small batches, end sooner, and the others hardly later.

The fastest generators become the tail's. Once there are sides, a plan moves one generator, and only for a modelled
gain of `gainPercent`; the sides are given up when the model says that they cost time. Nobody waits for a side that
has no free slot: predictions may be wrong, and an empty slot beside a waiting group is wrong for certain.
"""

from collections.abc import Sequence

from streamrl.spec.scheduling import TailIsolation
from streamrl_workers.scheduler.dispatch.isolation import Isolation, Split
from streamrl_workers.scheduler.dispatch.makespan import Instance, fits, servers_of, unit_samples
from streamrl_workers.scheduler.dispatch.modelled import plan_seconds
from streamrl_workers.scheduler.dispatch.policy import DISTRUST, LONGEST_FIRST, Plan, Work, tail_plan


class TailIsolationPolicy:
    """Two sides while all fit and it pays, else late binding."""

    models = True

    def __init__(self, options: TailIsolation) -> None:
        self._gain = options.gain_percent / 100

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """Sides, moved by one generator at most, or none."""
        if not work.trusted:
            return DISTRUST
        return isolated(work, previous=previous, gain=self._gain) or LONGEST_FIRST


def isolated(work: Work, *, previous: Plan, gain: float) -> Plan | None:
    """The plan with sides; None where not all fit, or it does not pay.

    Args:
        work: the batch and the generators.
        previous: its sides, if it has any, are kept but for one generator.
        gain: least share of the makespan to be won by a move.
    """
    ranked = sorted(work.groups, key=lambda group: group.rank)
    if len(ranked) < 2 or len(work.instances) < 2:  # noqa: PLR2004 - two sides
        return None
    unit = unit_samples(work.instances, samples=work.samples)
    servers = servers_of(work.instances, unit=unit)
    repeats = work.samples // unit
    if not fits(len(ranked) * repeats, servers):
        return None
    search = Isolation([group.predicted_tokens for group in ranked], servers, repeats=repeats)
    split = _choose(search, _held(work.instances, previous), len(servers), gain=gain)
    if split is None:
        return None
    tail = [work.instances[place] for place in sorted(split.replicas)]
    why = f"the {split.groups} longest of {len(ranked)} groups alone on {len(tail)} of {len(servers)} generators"
    plan = tail_plan(ranked[: split.groups], tail, strict=False, why=why)
    # The search counts from empty replicas: what runs already may spoil its split.
    busy = any(server.running for server in servers)
    return None if busy and plan_seconds(plan, work) > plan_seconds(LONGEST_FIRST, work) else plan


# ---- inside


def _held(instances: Sequence[Instance], previous: Plan) -> frozenset[int]:
    """The tail's replicas so far, as far as they are still there; none behind static pools."""
    if previous.strict:
        return frozenset()
    names = previous.tail_generators
    return frozenset(place for place, instance in enumerate(instances) if instance.generator_id in names)


def _choose(search: Isolation, held: frozenset[int], count: int, *, gain: float) -> Split | None:
    """The best split from nothing; from a split, the same or its neighbour."""
    together_s = search.together_s()
    if not held or len(held) == count:
        best = search.best()
        return best if best is not None and best.seconds < together_s * (1 - gain) else None
    now = search.at(held)
    moved = [split for replicas in _neighbours(held, count) if (split := search.at(replicas)) is not None]
    best = min(moved, key=lambda split: split.seconds, default=None)
    if best is not None and (now is None or best.seconds < now.seconds * (1 - gain)):
        now = best
    return now if now is not None and now.seconds <= together_s else None


def _neighbours(held: frozenset[int], count: int) -> list[frozenset[int]]:
    """One replica more (the fastest of the others), one less (the slowest)."""
    others = [place for place in range(count) if place not in held]
    found = [held | {others[0]}] if len(others) > 1 else []
    return [*found, held - {max(held)}] if len(held) > 1 else found
