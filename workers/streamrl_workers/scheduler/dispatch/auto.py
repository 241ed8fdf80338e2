"""The order whose modelled makespan is least, for each batch: fifo's, longest first, or length pools.

Chosen only with trusted lengths and measured speeds; else the order of planning. Pools only for a batch that has the
generators for itself, since the model knows nothing of what runs beside it, and only for a gain of LEAST_GAIN.
"""

from dataclasses import replace
from statistics import fmean

from streamrl.spec.scheduling import Auto
from streamrl_workers.scheduler.dispatch.longest_first import longest_if_faster, unmodelled
from streamrl_workers.scheduler.dispatch.model import MakespanModel, gains
from streamrl_workers.scheduler.dispatch.order import IN_ORDER, Order, PlannedBatch
from streamrl_workers.scheduler.dispatch.skew_aware import best_pools, splits

LEAST_GAIN = 0.005
"""Share of the makespan that pools must gain by the model."""


class AutoPolicy:
    """What the model says."""

    def __init__(self, options: Auto) -> None:
        del options  # it has none

    def order(self, batch: PlannedBatch) -> Order:
        """The one that pays."""
        if (order := unmodelled(batch)) is not None:
            return order
        model = MakespanModel(batch)
        order = longest_if_faster(batch, model)
        if splits(batch) and not (batch.overlaps or batch.begun):
            pooled = best_pools(batch, model)
            if gains(model.seconds(pooled), model.seconds(order), share=LEAST_GAIN):
                order = pooled
        order_s, fifo_s = (fmean(model.seconds(one)) for one in (order, IN_ORDER))
        return replace(order, why=f"{order.why}: {order_s:.4g} s modelled, {fifo_s:.4g} s in the order of planning")
