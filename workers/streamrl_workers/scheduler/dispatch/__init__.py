"""Dispatch policies: which waiting group a free slot takes next, and on which generators.

    policy.py     what a policy sees and answers      replanning.py   when a plan is made, and from what
    makespan.py   how long a batch takes              measured.py     how fast each pool is
    uncertain.py  what lengths may turn out to be     isolation.py    the search of tail isolation
    modelled.py   what a plan is worth

A policy answers with a plan; a plan gives every waiting group a key once, and a side if it has two. The smallest
key of a side goes first, to the generator of the side on which a sample runs fastest (`assignment.py`).
`docs/dispatch.md` tells when which pays.
"""

from collections.abc import Callable
from typing import Any

from streamrl.spec.base import SpecModel
from streamrl.spec.scheduling import Dispatch
from streamrl_workers.scheduler.dispatch.auto import AutoPolicy
from streamrl_workers.scheduler.dispatch.fifo import FifoPolicy
from streamrl_workers.scheduler.dispatch.late_binding import LateBindingPolicy
from streamrl_workers.scheduler.dispatch.policy import Candidate, Key, Plan, Policy, Work
from streamrl_workers.scheduler.dispatch.skew_aware import SkewAwarePolicy
from streamrl_workers.scheduler.dispatch.tail_isolation import TailIsolationPolicy

POLICIES: dict[str, Callable[[Any], Policy]] = {
    "fifo": FifoPolicy,
    "lateBinding": LateBindingPolicy,
    "skewAware": SkewAwarePolicy,
    "tailIsolation": TailIsolationPolicy,
    "auto": AutoPolicy,
}
"""Key as users write it -> from the member of the contract to the policy."""


def policy(key: str, options: SpecModel | None = None) -> Policy:
    """The policy of this key; `options`: its member of the contract, None for the defaults."""
    found = POLICIES.get(key)
    if found is None:
        raise ValueError(f"unknown dispatch policy {key!r}; known: {', '.join(POLICIES)}")
    return found(Dispatch.model_validate({key: {}}).value if options is None else options)


__all__ = ["POLICIES", "Candidate", "Key", "Plan", "Policy", "Work", "policy"]
