"""First planned, first issued: key(g) = (group_id,). The baseline, and the order wherever lengths are not trusted."""

from streamrl.spec.scheduling import Fifo
from streamrl_workers.scheduler.dispatch.order import IN_ORDER, Order, PlannedBatch


class FifoPolicy:
    """In the order of planning."""

    def __init__(self, options: Fifo) -> None:
        del options  # it has none

    def order(self, batch: PlannedBatch) -> Order:
        """Always the same."""
        return IN_ORDER
