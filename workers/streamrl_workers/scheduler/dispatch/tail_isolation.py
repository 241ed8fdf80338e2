"""Longest first, and where nothing queues the longest alone on some generators (`isolation.py`).

A sample of a long answer is as slow as its batch is large. With free places for everybody, order alone gains
little; generators that hold few and the longest only end sooner, and the others hardly later.

Sides are for batches that have the fleet for themselves (S = 0, Batch, Colocated). Beside samples of earlier batches, of
which nobody knows when they end, and of the next, the model's gains did not hold (docs/dispatch.md).

The fastest generators become the tail's. Sides are made, and changed, only for a modelled gain of `gainPercent`; they
are given up when the model says that they cost time. All are free then: nothing runs while a plan has sides to choose. What has begun goes
on as it is: a side that is made of generators which hold half of the batch already is none, though the model takes them to be free.
All begin at once in the model: where some have loaded the weights much later than others, isolation won nothing.
Nobody waits for a side that has no free slot: predictions may be wrong, and an empty slot beside a waiting group is wrong
for certain.
"""

from collections.abc import Sequence
from statistics import fmean

from streamrl.spec.scheduling import TailIsolation
from streamrl_workers.scheduler.dispatch.isolation import Isolation, Split
from streamrl_workers.scheduler.dispatch.late_binding import ordered
from streamrl_workers.scheduler.dispatch.makespan import Instance
from streamrl_workers.scheduler.dispatch.measured import ends_in_a_guess
from streamrl_workers.scheduler.dispatch.modelled import Model, gains
from streamrl_workers.scheduler.dispatch.policy import Plan, Work, tail_plan, unmodelled

MOST_SPREAD = 0.3
"""Share of a batch's modelled time by which generators may be ready at different times, if sides do not gain more than that."""


class TailIsolationPolicy:
    """Two sides while all fit and it pays, else late binding."""

    models = True

    def __init__(self, options: TailIsolation) -> None:
        self._gain = options.gain_percent / 100

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """Sides where they pay, those in force while others do not pay more, or none."""
        if (plan := unmodelled(work)) is not None:
            return plan
        if holds(work, previous):
            return previous
        model = Model(work)
        order = ordered(model)
        return isolated(model, instead_of=order, previous=previous, gain=self._gain) or order


def isolated(model: Model, *, instead_of: Plan, previous: Plan, gain: float) -> Plan | None:
    """The plan with sides; None where not all fit, batches overlap, speeds are not known, or it does not pay.

    Args:
        model: of the batch and the generators.
        instead_of: the plan without sides.
        previous: its sides, if it has any, are kept where others are not better.
        gain: least share of the makespan to be won by sides, or by others than those in force.
    """
    work = model.work
    ranked = sorted(work.groups, key=lambda group: group.rank)
    if not model.fits or not may_have_sides(work):
        return None
    split = _choose(Isolation(model, ranked), _held(work.instances, previous), model.seconds(instead_of), gain=gain)
    if split is None or loads_spoil(work, split.seconds, model.seconds(instead_of)):
        return None
    tail = [work.instances[place] for place in sorted(split.replicas)]
    why = f"the {split.groups} longest of {len(ranked)} groups alone on {len(tail)} of {len(work.instances)} generators"
    return tail_plan(ranked[: split.groups], tail, strict=False, why=why)


def holds(work: Work, previous: Plan) -> bool:
    """Whether a batch that has begun under sides keeps them: there are generators of both."""
    tail = sum(one.generator_id in previous.tail_generators for one in work.instances)
    return work.begun and 0 < tail < len(work.instances)


def loads_spoil(work: Work, sides_s: Sequence[float], together_s: Sequence[float]) -> bool:
    """Whether generators are ready at times that differ by too much for sides with these makespans: the model has all begin at once."""
    without_s = fmean(together_s)
    return work.load_spread_s > max(MOST_SPREAD * without_s, without_s - fmean(sides_s))


def may_have_sides(work: Work) -> bool:
    """Whether there are two of everything, nothing of the batch has begun, and it has generators of known speed for itself."""
    if len(work.groups) < 2 or len(work.instances) < 2 or work.overlap or work.begun:  # noqa: PLR2004 - two sides
        return False
    return not any(instance.running or ends_in_a_guess(instance.curve) for instance in work.instances)


# ---- inside


def _held(instances: Sequence[Instance], previous: Plan) -> frozenset[int]:
    """The tail's replicas so far, as far as they are still there; none behind static pools, or where no others are left."""
    if previous.strict:
        return frozenset()
    names = previous.tail_generators
    held = frozenset(place for place, instance in enumerate(instances) if instance.generator_id in names)
    return held if len(held) < len(instances) else frozenset()


def _choose(search: Isolation, held: frozenset[int], together_s: Sequence[float], *, gain: float) -> Split | None:
    """The best split; that of the replicas which hold the tail now while the best is not better by `gain`."""
    best, now = search.best(), search.at(held) if held else None
    if now is not None and (best is None or not gains(best.seconds, now.seconds, share=gain)):
        return now if gains(now.seconds, together_s) else None
    return best if best is not None and gains(best.seconds, together_s, share=gain) else None
