"""Which policy pays now, by modelled makespan over measured curves, for the lengths that are likely.

    predictions have not proved good          ->  fifo
    requests queue                            ->  late binding, unless the model says that fifo is faster
    they queue for little, and S = 0          ->  Algorithm 2's static sides if they gain `gainPercent` over that
    nothing queues, and S = 0                 ->  tail isolation if it gains `gainPercent`, else fifo

Never worse by the model: a plan other than fifo's is chosen only if its modelled makespan is below fifo's.
"""

from dataclasses import replace
from statistics import fmean

from streamrl.spec.scheduling import Auto, SkewAware
from streamrl_workers.scheduler.dispatch.late_binding import ordered
from streamrl_workers.scheduler.dispatch.modelled import Model, gains, likely
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, Plan, Work, unmodelled
from streamrl_workers.scheduler.dispatch.skew_aware import SkewAwarePolicy
from streamrl_workers.scheduler.dispatch.tail_isolation import holds, isolated, may_have_sides

STATIC = (SkewAware(objective="Max"), SkewAware(objective="Sum"))


class AutoPolicy:
    """The least modelled makespan of fifo, late binding, tail isolation and Algorithm 2."""

    models = True

    def __init__(self, options: Auto) -> None:
        self._gain = options.gain_percent / 100

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """The one that pays."""
        if (plan := unmodelled(work)) is not None:
            return plan
        if holds(work, previous):
            return previous
        model = Model(work)
        order = ordered(model)
        sides = isolated(model, instead_of=order, previous=previous, gain=self._gain)
        plan = sides or static(model, instead_of=order, gain=self._gain) or order
        plan_s = model.seconds(plan)
        in_order_s = fmean(model.seconds(IN_ORDER))
        return replace(
            plan, why=f"{plan.why}: {fmean(plan_s):.4g} s modelled, {in_order_s:.4g} s in the order of planning"
        )


def static(model: Model, *, instead_of: Plan, gain: float) -> Plan | None:
    """Algorithm 2's plan with the better objective; None where all fit, where sides are not for the batch, or where it does not pay.

    Longest first keeps every slot taken while samples wait. Where they wait for less than a round that is worth little, and
    generators that the tail has for itself are faster.
    """
    if model.fits or not may_have_sides(model.work):
        return None
    plans = [SkewAwarePolicy(options).plan(model.work, previous=instead_of) for options in STATIC]
    best = min(plans, key=lambda plan: likely(model.seconds(plan)))
    return best if gains(model.seconds(best), model.seconds(instead_of), share=gain) else None
