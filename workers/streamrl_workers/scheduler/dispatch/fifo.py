"""First planned, first issued.

key(g) = (group_id,)

As for every policy, of the generators with a free slot that one takes the group on which a sample runs fastest
(`assignment.py`): the baseline knows how fast instances are.
"""

from streamrl.spec.scheduling import Fifo
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, Plan, Work


class FifoPolicy:
    """In the order of planning."""

    models = False

    def __init__(self, options: Fifo) -> None:
        del options  # it has none

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """Always the same."""
        return IN_ORDER
