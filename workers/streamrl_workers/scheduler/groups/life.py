"""The life of a group (one prompt, G samples) and of each of its samples, as two tables.

Owns which event may follow which state. Knows no I/O, no clock and no data of a group: an event that
the table does not list raises `IllegalEventError` and changes nothing.

    planned -> issued -> running -> finished -> scored -> delivered -> consumed
       ^---------'  lose                           ^---------'----------'  roll_back
    planned -> scored, where the data set has the sample (algorithm supervised)
    every state before `delivered` -> dropped
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar


class GroupState(StrEnum):
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
    DELIVERED = "delivered"
    """With the trainer."""
    CONSUMED = "consumed"
    """In the record of a step."""
    DROPPED = "dropped"


class GroupEvent(StrEnum):
    """What happens to a group."""

    ISSUE = "issue"
    BEGIN = "begin"
    """The first token of the group has arrived."""
    LOSE = "lose"
    """The last sample that was out has come back without a token."""
    DEMONSTRATE = "demonstrate"
    """Its sample stands in the data set."""
    FINISH = "finish"
    """The last sample is finished."""
    SCORE = "score"
    """The last sample is scored."""
    DELIVER = "deliver"
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


_END = {GroupEvent.RUN_ENDED: GroupState.DROPPED}
_FAIL = {GroupEvent.GENERATION_FAILED: GroupState.DROPPED, **_END}

GROUP_LIFE: Mapping[GroupState, Mapping[GroupEvent, GroupState]] = MappingProxyType(
    {
        GroupState.PLANNED: {GroupEvent.ISSUE: GroupState.ISSUED, GroupEvent.DEMONSTRATE: GroupState.SCORED, **_FAIL},
        GroupState.ISSUED: {GroupEvent.BEGIN: GroupState.RUNNING, GroupEvent.LOSE: GroupState.PLANNED, **_FAIL},
        GroupState.RUNNING: {GroupEvent.FINISH: GroupState.FINISHED, **_FAIL},
        GroupState.FINISHED: {
            GroupEvent.SCORE: GroupState.SCORED,
            GroupEvent.REWARD_FAILED: GroupState.DROPPED,
            GroupEvent.ZERO_VARIANCE: GroupState.DROPPED,
            **_FAIL,
        },
        GroupState.SCORED: {GroupEvent.DELIVER: GroupState.DELIVERED, GroupEvent.TOO_STALE: GroupState.DROPPED, **_END},
        GroupState.DELIVERED: {GroupEvent.CONSUME: GroupState.CONSUMED, GroupEvent.ROLL_BACK: GroupState.SCORED},
        GroupState.CONSUMED: {GroupEvent.ROLL_BACK: GroupState.SCORED},
        GroupState.DROPPED: {},
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


_StateT = TypeVar("_StateT", GroupState, SampleState)
_EventT = TypeVar("_EventT", GroupEvent, SampleEvent)


def after(state: GroupState, event: GroupEvent) -> GroupState:
    """State of a group after `event`."""
    return _following(GROUP_LIFE, state, event, who="group")


def sample_after(state: SampleState, event: SampleEvent) -> SampleState:
    """State of a sample after `event`."""
    return _following(SAMPLE_LIFE, state, event, who="sample")


def _following(
    life: Mapping[_StateT, Mapping[_EventT, _StateT]], state: _StateT, event: _EventT, *, who: str
) -> _StateT:
    following = life[state].get(event)
    if following is None:
        can = ", ".join(life[state]) or "do nothing more"
        raise IllegalEventError(f"a {state} {who} cannot {event}; it can {can}")
    return following
