"""Dispatch: in which order what waits is taken, and by which generators.

    policies.py       fifo, longestFirst, skewAware, auto     order.py      what a policy sees and answers
    length_pools.py   Algorithm 2                             makespan.py   how long a batch takes
    speeds.py         how fast each pool is                   model.py      what an order is worth

Beside this folder: `planning.py`, `Dispatcher` (when an order is made, and from what) and `extensions/rebalancing.py` (running samples that go on elsewhere, an option).
`docs/dispatch.md` tells when which policy pays.
"""

from collections.abc import Callable
from typing import Any

from streamrl.spec.base import PythonClass, SpecModel
from streamrl.spec.scheduling import Dispatch, Fifo
from streamrl_workers.plugins.load import LoadedPlugin
from streamrl_workers.scheduler.dispatch.order import Candidate, Key, Order, Policy
from streamrl_workers.scheduler.dispatch.policies import AutoPolicy, FifoPolicy, LongestFirstPolicy, SkewAwarePolicy

POLICIES: dict[str, Callable[[Any], Policy]] = {
    "fifo": FifoPolicy,
    "longestFirst": LongestFirstPolicy,
    "skewAware": SkewAwarePolicy,
    "auto": AutoPolicy,
}
"""Key as users write it -> from the member of the contract to the policy."""


def policy(key: str, options: SpecModel | LoadedPlugin | None = None) -> Policy:
    """The policy of this key; `options`: its member of the contract, or a loaded plug-in; None for the defaults."""
    if isinstance(options, LoadedPlugin):
        own: Policy = options.make()
        return own
    if isinstance(options, PythonClass):  # of who reads a run's journal, and runs no code of it
        return FifoPolicy(Fifo())
    found = POLICIES.get(key)
    if found is None:
        raise ValueError(f"unknown dispatch policy {key!r}; known: {', '.join(POLICIES)}")
    return found(Dispatch.model_validate({key: {}}).value if options is None else options)


__all__ = ["POLICIES", "Candidate", "Key", "Order", "Policy", "policy"]
