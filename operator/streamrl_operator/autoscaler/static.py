"""A fixed number of replicas: what the pool's `scaling.static` says."""

from dataclasses import replace

from streamrl.spec.generators import Scaling
from streamrl_operator.autoscaler.values import Curve, Decision, Observation, State, inverse


def decide(
    scaling: Scaling, *, state: State, seen: Observation | None, now_s: float, curve: Curve = inverse
) -> tuple[Decision, State]:
    """The number of the specification, whatever is seen."""
    del seen, now_s, curve
    return Decision(replicas=scaling.initial, reason="scaling.static.replicas"), replace(state, wanted=scaling.initial)
