"""How many generators a pool should have. Pure: the local runner and the cluster's operator run the same code.

numbers page ─ observation.py ─▶ Observation ─┐
                                              ├─ balance.py (pace.py, growth.py, shrinking.py) ─▶ Decision, next State
                       State of the last call ─┘

Owns the registry of scaling policies. Does not own how replicas are started or ended, nor where the state is kept.
Invariants: clock and state are parameters; a decision is within the pool's bounds; without data nothing is taken away.
"""

from streamrl_operator.autoscaler import balance, external, static
from streamrl_operator.autoscaler.values import Policy

POLICIES: dict[str, Policy] = {"static": static.decide, "auto": balance.decide, "external": external.decide}
"""Key of `scaling` in a pool, as users write it -> what decides."""
