"""How many replicas a pool should have. Pure: the local runner and the cluster's operator run the same code.

    numbers page ─ values.observe ─▶ PoolObservation ─┐
                                                      ├─ a policy (balance.py, by the paces of pace.py) ─▶ Decision, next state
                        ScalingState of the last call ─┘

Of agents `auto` goes by their sessions (`sessions.py`).

Owns the registry of scaling policies. Does not own how replicas are started or ended, nor where the state is kept.
Invariants: clock and state are parameters; a decision is within the pool's bounds; without data nothing is taken away.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamrl.spec.generators import GeneratorPool, Scaling
from streamrl.spec.task import AgentPool
from streamrl_operator.autoscaler import balance, sessions
from streamrl_operator.autoscaler.values import Decision, PoolObservation, ScalingPolicy, ScalingState, observe


def _static(
    scaling: Scaling, *, state: ScalingState, seen: PoolObservation | None, now_s: float
) -> tuple[Decision, ScalingState]:
    """The number of the specification, whatever is seen."""
    del seen, now_s
    return Decision(replicas=scaling.initial, reason="scaling.static.replicas"), replace(state, wanted=scaling.initial)


def _external(
    scaling: Scaling, *, state: ScalingState, seen: PoolObservation | None, now_s: float
) -> tuple[Decision, ScalingState]:
    """The number that is wanted already: an HPA, KEDA or a person decides."""
    del scaling, seen, now_s
    return Decision(replicas=state.wanted, reason="scaling.external"), state


POLICIES: dict[str, ScalingPolicy] = {"static": _static, "auto": balance.decide, "external": _external}
"""Key of `scaling` in a pool, as users write it -> what decides."""


def decide(
    pool: GeneratorPool | AgentPool, *, state: ScalingState, numbers: Mapping[str, Any] | None, now_s: float
) -> tuple[Decision, ScalingState]:
    """How many replicas the pool should have, and the state for the next call. `numbers`: the scheduler's page; None: not to be had."""
    if isinstance(pool, AgentPool) and pool.scaling.auto is not None:
        return sessions.decide(pool.scaling, state=state, seen=sessions.observe(numbers), now_s=now_s)
    seen = observe(numbers, pool=pool.name, wanted=state.wanted, now_s=now_s)
    return POLICIES[pool.scaling.key](pool.scaling, state=state, seen=seen, now_s=now_s)
