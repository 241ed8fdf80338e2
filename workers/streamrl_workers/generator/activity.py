"""Which part of the wall a generator's present situation belongs to: the bubble rule of a generator.

Owns: the decision, pure. Does not own: clocks, the situation.
"""

from dataclasses import dataclass

from streamrl_workers.metrics.bubbles import State, generating, idle

_AWAITS_WEIGHTS = frozenset({"staleness", "turn", "no_weights"})
"""Idle causes that new weights end: with a pull on its way, the transfer is what is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a generator is in between two transitions."""

    connected: bool  # welcomed by the scheduler
    usable: bool  # verified weights are in the engine
    swapping: bool  # weights go into the engine
    pulling: bool  # weights are on their way
    blocked: bool  # the scheduler does not take what is finished
    active: int  # requests in the engine
    slots: int
    queued: bool  # samples wait for a slot, here or at the scheduler
    idle_cause: str  # as the scheduler told


def activity(now: Situation) -> State:
    """The state that this situation counts as."""
    if not now.connected:
        return State(part="other")
    if now.swapping or not now.usable:
        return State(part="weights")
    if now.blocked:
        return idle("back_pressure")
    if now.active:
        return generating(active=now.active, slots=now.slots, waiting=now.queued)
    if now.pulling and now.idle_cause in _AWAITS_WEIGHTS:
        return State(part="weights")
    return idle(now.idle_cause)
