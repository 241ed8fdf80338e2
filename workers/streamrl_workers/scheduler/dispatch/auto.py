"""Which policy pays now, by modelled makespan over measured curves, for the lengths that are likely.

    predictions have not proved good          ->  fifo
    requests queue                            ->  late binding, unless the model says that fifo is faster
    nothing queues, and S = 0                 ->  tail isolation if it gains `gainPercent`, else fifo
    S = 0                                     ->  static sides if they gain `gainPercent`, and are better than that

Never worse by the model: a plan other than fifo's is chosen only if its modelled makespan is below fifo's.
"""

from dataclasses import replace
from statistics import fmean

from streamrl.spec.scheduling import Auto
from streamrl_workers.scheduler.dispatch.late_binding import ordered
from streamrl_workers.scheduler.dispatch.modelled import Model, gains, likely
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, Plan, Work, unmodelled
from streamrl_workers.scheduler.dispatch.static_sides import best_static
from streamrl_workers.scheduler.dispatch.tail_isolation import holds, isolated, loads_spoil, may_have_sides


class AutoPolicy:
    """The least modelled makespan of fifo, late binding, tail isolation and static sides."""

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
        sides = (
            isolated(model, instead_of=order, previous=previous, gain=self._gain),
            static(model, instead_of=order, gain=self._gain),
        )
        plan = min((plan for plan in sides if plan), key=lambda plan: likely(model.seconds(plan)), default=order)
        plan_s = model.seconds(plan)
        in_order_s = fmean(model.seconds(IN_ORDER))
        return replace(
            plan, why=f"{plan.why}: {fmean(plan_s):.4g} s modelled, {in_order_s:.4g} s in the order of planning"
        )


def static(model: Model, *, instead_of: Plan, gain: float) -> Plan | None:
    """The plan with static sides; None where batches overlap, speeds are not known, or it does not pay.

    Longest first keeps every slot taken while samples wait. Where they wait for less than a round, or not at all, that is worth
    little, and generators that the tail has for itself are faster.
    """
    if not may_have_sides(model.work):
        return None
    best = best_static(model)
    best_s, together_s = model.seconds(best), model.seconds(instead_of)
    pays = gains(best_s, together_s, share=gain) and not loads_spoil(model.work, best_s, together_s)
    return best if pays else None
