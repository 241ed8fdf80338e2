"""Longest first, and where nothing queues the longest alone on some generators (`isolation.py`).

A sample of a long answer is as slow as its batch is large. With free places for everybody, order alone gains
little; generators that hold few and the longest only end sooner, and the others hardly later.

Sides are for batches that begin on an idle fleet (S = 0, Batch, Colocated). Beside samples of earlier batches, of which
nobody knows when they end, the model's gains did not hold (docs/dispatch.md).

The fastest generators become the tail's. Once there are sides, a plan moves one generator, and only for a modelled
gain of `gainPercent`; the sides are given up when the model says that they cost time. Nobody waits for a side that
has no free slot: predictions may be wrong, and an empty slot beside a waiting group is wrong for certain.
"""

from collections.abc import Sequence

from streamrl.spec.scheduling import TailIsolation
from streamrl_workers.scheduler.dispatch.isolation import Isolation, Split
from streamrl_workers.scheduler.dispatch.late_binding import ordered
from streamrl_workers.scheduler.dispatch.makespan import Instance
from streamrl_workers.scheduler.dispatch.measured import Guess
from streamrl_workers.scheduler.dispatch.modelled import Model, gains
from streamrl_workers.scheduler.dispatch.policy import DISTRUST, IN_ORDER, Plan, Work, tail_plan


class TailIsolationPolicy:
    """Two sides while all fit and it pays, else late binding."""

    models = True

    def __init__(self, options: TailIsolation) -> None:
        self._gain = options.gain_percent / 100

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """Sides, moved by one generator at most, or none."""
        if not work.trusted:
            return DISTRUST
        if not work.groups or not work.instances:
            return IN_ORDER
        model = Model(work)
        order = ordered(model)
        return isolated(model, instead_of=order, previous=previous, gain=self._gain) or order


def isolated(model: Model, *, instead_of: Plan, previous: Plan, gain: float) -> Plan | None:
    """The plan with sides; None where not all fit, something runs already, speeds are not known, or it does not pay.

    Args:
        model: of the batch and the generators.
        instead_of: the plan without sides.
        previous: its sides, if it has any, are kept but for one generator.
        gain: least share of the makespan to be won by a move.
    """
    work = model.work
    ranked = sorted(work.groups, key=lambda group: group.rank)
    if len(ranked) < 2 or len(work.instances) < 2 or not model.fits:  # noqa: PLR2004 - two sides
        return None
    if any(instance.running or isinstance(instance.curve, Guess) for instance in work.instances):
        return None
    split = _choose(
        Isolation(model, ranked), _held(work.instances, previous), model.seconds(instead_of), model=model, gain=gain
    )
    if split is None:
        return None
    tail = [work.instances[place] for place in sorted(split.replicas)]
    why = f"the {split.groups} longest of {len(ranked)} groups alone on {len(tail)} of {len(work.instances)} generators"
    return tail_plan(ranked[: split.groups], tail, strict=False, why=why)


# ---- inside


def _held(instances: Sequence[Instance], previous: Plan) -> frozenset[int]:
    """The tail's replicas so far, as far as they are still there; none behind static pools."""
    if previous.strict:
        return frozenset()
    names = previous.tail_generators
    return frozenset(place for place, instance in enumerate(instances) if instance.generator_id in names)


def _choose(
    search: Isolation, held: frozenset[int], together_s: Sequence[float], *, model: Model, gain: float
) -> Split | None:
    """The best split from nothing; from a split, the same or its neighbour."""
    count = len(model.work.instances)
    if not held or len(held) == count:
        best = search.best()
        return best if best is not None and gains(best.seconds, together_s, share=gain) else None
    now = search.at(held)
    moved = [split for replicas in _neighbours(held, count) if (split := search.at(replicas)) is not None]
    best = min(moved, key=lambda split: split.likely_s, default=None)
    if best is not None and (now is None or gains(best.seconds, now.seconds, share=gain)):
        now = best
    return now if now is not None and gains(now.seconds, together_s) else None


def _neighbours(held: frozenset[int], count: int) -> list[frozenset[int]]:
    """One replica more (the fastest of the others), one less (the slowest)."""
    others = [place for place in range(count) if place not in held]
    found = [held | {others[0]}] if len(others) > 1 else []
    return [*found, held - {max(held)}] if len(held) > 1 else found
