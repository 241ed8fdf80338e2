"""Which policy pays now, by modelled makespan over measured curves.

    predictions have not proved good    ->  fifo
    requests queue                      ->  late binding, unless the model says that fifo is faster
    nothing queues                      ->  tail isolation if it gains `gainPercent`, else as above

Never worse by the model: a plan other than fifo's is chosen only if its modelled makespan is not above fifo's.
"""

from dataclasses import replace

from streamrl.spec.scheduling import Auto
from streamrl_workers.scheduler.dispatch.modelled import plan_seconds
from streamrl_workers.scheduler.dispatch.policy import DISTRUST, IN_ORDER, LONGEST_FIRST, Plan, Work
from streamrl_workers.scheduler.dispatch.tail_isolation import isolated


class AutoPolicy:
    """The least modelled makespan of fifo, late binding and tail isolation."""

    models = True

    def __init__(self, options: Auto) -> None:
        self._gain = options.gain_percent / 100

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """The one that pays."""
        if not work.trusted:
            return DISTRUST
        if not work.groups or not work.instances:
            return IN_ORDER
        in_order_s = plan_seconds(IN_ORDER, work)
        plan, seconds = LONGEST_FIRST, plan_seconds(LONGEST_FIRST, work)
        if seconds > in_order_s:
            plan, seconds = IN_ORDER, in_order_s
        sides = isolated(work, previous=previous, gain=self._gain)
        if sides is not None and (sides_s := plan_seconds(sides, work)) <= seconds:
            plan, seconds = sides, sides_s
        return replace(plan, why=f"{plan.why}: {seconds:.4g} s modelled, {in_order_s:.4g} s in the order of planning")
