"""The dispatch policies: fifo, longestFirst, skewAware, auto.

All but `fifo` need trusted lengths and measured speeds; else the order is that of planning.
"""

from dataclasses import replace
from statistics import fmean

from streamrl.spec.scheduling import Auto, Fifo, LongestFirst, SkewAware
from streamrl_workers.scheduler.dispatch.length_pools import best_pools, pools, splits
from streamrl_workers.scheduler.dispatch.model import MakespanModel, gains
from streamrl_workers.scheduler.dispatch.order import IN_ORDER, LONGEST_FIRST, Order, PlannedBatch, in_order

LEAST_GAIN = 0.005
"""Share of the makespan that pools must gain by the model."""


class FifoPolicy:
    """In the order of planning: the baseline."""

    def __init__(self, options: Fifo) -> None:
        del options  # it has none

    def order(self, batch: PlannedBatch) -> Order:
        """Always the same."""
        return IN_ORDER


class LongestFirstPolicy:
    """Longest predicted first within a batch, where that pays.

    A long completion that begins last keeps one slot busy while all others are idle; begun first, it is hidden behind the
    short ones. Where all samples have a slot there is nothing to begin first.
    """

    def __init__(self, options: LongestFirst) -> None:
        del options  # it has none

    def order(self, batch: PlannedBatch) -> Order:
        """Longest first, if predictions are trusted and it is faster."""
        return unmodelled(batch) or longest_if_faster(batch, MakespanModel(batch))


class SkewAwarePolicy:
    """Two length pools, made anew for each batch."""

    def __init__(self, options: SkewAware) -> None:
        self._options = options

    def order(self, batch: PlannedBatch) -> Order:
        """Pools by the algorithm or by search; longest first alone where there are not two of everything."""
        if (order := unmodelled(batch)) is not None:
            return order
        if not splits(batch):
            return LONGEST_FIRST
        if self._options.split == "Searched":
            return best_pools(batch, MakespanModel(batch))
        return pools(batch, long_percent=self._options.long_percent, why="Algorithm 2")


class AutoPolicy:
    """Of fifo, longest first and length pools the one whose modelled makespan is least, for each batch.

    Pools only for a batch that has the generators for itself, since the model knows nothing of what runs beside it.
    """

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


def unmodelled(batch: PlannedBatch) -> Order | None:
    """The order where nothing can be modelled: without trust, measured speeds, groups or generators; else None."""
    if not batch.trusted:
        return in_order("length predictions have not proved to be good")
    if not batch.groups or not batch.instances:
        return IN_ORDER
    return None if batch.measured else in_order("the speed of the generators has not been measured yet")


def longest_if_faster(batch: PlannedBatch, model: MakespanModel) -> Order:
    """Longest first or the order of planning, whichever is faster, and why."""
    if batch.fits:
        return in_order("there are slots for all samples")
    if not gains(model.seconds(LONGEST_FIRST), model.seconds(IN_ORDER)):
        return in_order("longest first would not be faster")
    return LONGEST_FIRST
