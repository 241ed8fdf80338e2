"""First planned, first issued.

key(g) = (group_id,)
"""

from streamrl_workers.scheduler.dispatch.policy import Candidate, Key


def fifo(candidate: Candidate) -> Key:
    """In the order of planning."""
    return (candidate.group_id,)
