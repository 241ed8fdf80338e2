"""The policy `auto` of a pool of agents: as many hosts as sessions ask for.

    n = (sessions that are played + turns that wait) / places of a host, rounded up

It grows at once to n, since what waits holds generators up. It shrinks one by one, each time after a cool-down in which n was lower
all the while: a host that leaves has its sessions played again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from streamrl.spec.generators import AutoScaling, Scaling
from streamrl_operator.autoscaler.values import Decision, ScalingState


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCounts:
    """What the scheduler says of all agent hosts."""

    played: int
    waiting: int
    """Turns without a place; prompts are asked ahead, and can wait."""
    places: int
    """Of one host."""


def observe(numbers: Mapping[str, Any] | None) -> SessionCounts | None:
    """As the page shows it; None without a page, after the run's end, or if the page is not whole."""
    if numbers is None or numbers.get("ended"):
        return None
    try:
        page = numbers["agents"]
        played, waiting, places = (int(page[key]) for key in ("sessions", "waiting", "places"))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return SessionCounts(played=played, waiting=waiting, places=places) if places > 0 else None


def decide(
    scaling: Scaling, *, state: ScalingState, seen: SessionCounts | None, now_s: float
) -> tuple[Decision, ScalingState]:
    """The decision for a pool with `scaling.auto`. `state.changed_s`: when it last changed, or all hosts were needed."""
    auto = scaling.value
    assert isinstance(auto, AutoScaling), "asked of this policy alone"
    bounded = min(max(state.wanted, auto.min_replicas), auto.max_replicas)
    if bounded != state.wanted:
        return _changed(bounded, state, now_s=now_s, reason=f"bounds are {auto.min_replicas} to {auto.max_replicas}")
    if seen is None:
        return Decision(replicas=state.wanted, reason="the scheduler's numbers are not known"), state
    needed = ceil((seen.played + seen.waiting) / seen.places)
    reason = f"{seen.played} sessions and {seen.waiting} that wait, {seen.places} a host"
    if needed > state.wanted and state.wanted < auto.max_replicas:
        return _changed(min(needed, auto.max_replicas), state, now_s=now_s, reason=reason)
    if needed >= state.wanted or state.changed_s is None:
        return Decision(replicas=state.wanted, reason=reason), replace(state, changed_s=now_s)
    if now_s - state.changed_s < auto.cooldown_seconds or state.wanted == auto.min_replicas:
        return Decision(replicas=state.wanted, reason=reason), state
    return _changed(state.wanted - 1, state, now_s=now_s, reason=reason)


def _changed(replicas: int, state: ScalingState, *, now_s: float, reason: str) -> tuple[Decision, ScalingState]:
    return Decision(replicas=replicas, reason=reason), replace(state, wanted=replicas, changed_s=now_s)
