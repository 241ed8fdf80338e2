"""Which policy pays now, by modelled makespan over measured curves, for the lengths that are likely.

    predictions have not proved good    ->  fifo
    requests queue                      ->  late binding, unless the model says that fifo is faster
    nothing queues, and S = 0           ->  tail isolation if it gains `gainPercent`, else as above

Never worse by the model: a plan other than fifo's is chosen only if its modelled makespan is below fifo's.
"""

from dataclasses import replace
from statistics import fmean

from streamrl.spec.scheduling import Auto
from streamrl_workers.scheduler.dispatch.late_binding import ordered
from streamrl_workers.scheduler.dispatch.modelled import Model
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, Plan, Work, unmodelled
from streamrl_workers.scheduler.dispatch.tail_isolation import isolated


class AutoPolicy:
    """The least modelled makespan of fifo, late binding and tail isolation."""

    models = True

    def __init__(self, options: Auto) -> None:
        self._gain = options.gain_percent / 100

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """The one that pays."""
        if (plan := unmodelled(work)) is not None:
            return plan
        model = Model(work)
        order = ordered(model)
        plan = isolated(model, instead_of=order, previous=previous, gain=self._gain) or order
        plan_s = model.seconds(plan)
        in_order_s = fmean(model.seconds(IN_ORDER))
        return replace(
            plan, why=f"{plan.why}: {fmean(plan_s):.4g} s modelled, {in_order_s:.4g} s in the order of planning"
        )
