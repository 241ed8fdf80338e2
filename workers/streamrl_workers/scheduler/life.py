"""The life of a group (one prompt, G samples) and of each of its samples, as two tables.

Owns which event may follow which state. Knows no I/O, no clock and no data of a group: an event that
the table does not list raises `IllegalEventError` and changes nothing.

    planned -> issued -> running -> finished -> scored -> handed -> consumed
       ^---------'  lose                           ^---------'----------'  roll_back
    every state before `handed` -> dropped
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """Where a group is in its life."""

    PLANNED = "planned"
    """No sample is with a generator, no token has arrived."""
    ISSUED = "issued"
    """A sample is with a generator, no token has arrived."""
    RUNNING = "running"
    """A token has arrived."""
    FINISHED = "finished"
    """All samples are finished."""
    SCORED = "scored"
    """All samples are scored."""
    HANDED = "handed"
    """With the trainer."""
    CONSUMED = "consumed"
    """In the record of a step."""
    DROPPED = "dropped"


class Event(StrEnum):
    """What happens to a group."""

    ISSUE = "issue"
    BEGIN = "begin"
    """The first token of the group has arrived."""
    LOSE = "lose"
    """The last sample that was out has come back without a token."""
    FINISH = "finish"
    """The last sample is finished."""
    SCORE = "score"
    """The last sample is scored."""
    HAND = "hand"
    CONSUME = "consume"
    ROLL_BACK = "roll_back"
    """The trainer does not have it (any more)."""
    REWARD_FAILED = "reward_failed"
    GENERATION_FAILED = "generation_failed"
    ZERO_VARIANCE = "zero_variance"
    """Its rewards are all equal, and another group takes its place."""
    RUN_ENDED = "run_ended"
    TOO_STALE = "too_stale"
    """Found in a journal that was written under a larger staleness."""


class SampleState(StrEnum):
    """Where one sample is, until its group is scored."""

    WAITING = "waiting"
    OUT = "out"
    """With a generator, under a lease."""
    ANSWERING = "answering"
    """A turn of it is with the environment."""
    FINISHED = "finished"
    SCORED = "scored"


class SampleEvent(StrEnum):
    """What happens to a sample."""

    ISSUE = "issue"
    LOSE = "lose"
    ASK = "ask"
    """A turn has ended; the environment is to answer it."""
    GO_ON = "go_on"
    """The environment has answered, and the model has another turn."""
    FINISH = "finish"
    SCORE = "score"


class IllegalEventError(AssertionError):
    """The event cannot happen in this state: a fault of the scheduler itself."""


_END = {Event.RUN_ENDED: State.DROPPED}
_FAIL = {Event.GENERATION_FAILED: State.DROPPED, **_END}

GROUP_LIFE: Mapping[State, Mapping[Event, State]] = MappingProxyType(
    {
        State.PLANNED: {Event.ISSUE: State.ISSUED, **_FAIL},
        State.ISSUED: {Event.BEGIN: State.RUNNING, Event.LOSE: State.PLANNED, **_FAIL},
        State.RUNNING: {Event.FINISH: State.FINISHED, **_FAIL},
        State.FINISHED: {
            Event.SCORE: State.SCORED,
            Event.REWARD_FAILED: State.DROPPED,
            Event.ZERO_VARIANCE: State.DROPPED,
            **_END,
        },
        State.SCORED: {Event.HAND: State.HANDED, Event.TOO_STALE: State.DROPPED, **_END},
        State.HANDED: {Event.CONSUME: State.CONSUMED, Event.ROLL_BACK: State.SCORED},
        State.CONSUMED: {Event.ROLL_BACK: State.SCORED},
        State.DROPPED: {},
    }
)

SAMPLE_LIFE: Mapping[SampleState, Mapping[SampleEvent, SampleState]] = MappingProxyType(
    {
        SampleState.WAITING: {SampleEvent.ISSUE: SampleState.OUT},
        SampleState.OUT: {
            SampleEvent.LOSE: SampleState.WAITING,
            SampleEvent.ASK: SampleState.ANSWERING,
            SampleEvent.FINISH: SampleState.FINISHED,
        },
        SampleState.ANSWERING: {SampleEvent.GO_ON: SampleState.WAITING, SampleEvent.FINISH: SampleState.FINISHED},
        SampleState.FINISHED: {SampleEvent.SCORE: SampleState.SCORED},
        SampleState.SCORED: {},
    }
)


def after(state: State, event: Event) -> State:
    """State of a group after `event`."""
    following = GROUP_LIFE[state].get(event)
    if following is None:
        raise IllegalEventError(f"a {state} group cannot {event}; it can {_listed(GROUP_LIFE[state])}")
    return following


def sample_after(state: SampleState, event: SampleEvent) -> SampleState:
    """State of a sample after `event`."""
    following = SAMPLE_LIFE[state].get(event)
    if following is None:
        raise IllegalEventError(f"a {state} sample cannot {event}; it can {_listed(SAMPLE_LIFE[state])}")
    return following


def _listed(events: Mapping[Event, State] | Mapping[SampleEvent, SampleState]) -> str:
    return ", ".join(events) or "do nothing more"
