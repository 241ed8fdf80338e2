"""Dispatch policies: which planned group a free slot takes next.

A policy gives every planned group a key once, when it begins to wait; the smallest key goes first.
It sees the least it needs: the group's number, its place in the batch it was planned for, and the
predicted length.
"""

from streamrl_workers.scheduler.dispatch.fifo import fifo
from streamrl_workers.scheduler.dispatch.late_binding import late_binding
from streamrl_workers.scheduler.dispatch.policy import Candidate, Key, Policy

POLICIES: dict[str, Policy] = {
    "fifo": fifo,
    "lateBinding": late_binding,
}


def policy(key: str) -> Policy:
    """The policy of this key."""
    found = POLICIES.get(key)
    if found is None:
        raise ValueError(f"unknown dispatch policy {key!r}; known: {', '.join(POLICIES)}")
    return found


__all__ = ["POLICIES", "Candidate", "Key", "Policy", "policy"]
