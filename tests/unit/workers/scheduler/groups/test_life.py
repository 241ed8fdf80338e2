"""The tables of life: exact sequences, and every event that is not in them."""

import itertools

import pytest

from streamrl_workers.scheduler.groups.life import (
    GROUP_LIFE,
    SAMPLE_LIFE,
    GroupEvent,
    GroupState,
    IllegalEventError,
    SampleEvent,
    SampleState,
    after,
    sample_after,
)

LIVES = {
    "trained": ("issue begin finish score deliver consume", "issued running finished scored delivered consumed"),
    "lost before a token": ("issue lose issue begin finish", "issued planned issued running finished"),
    "no rewards": ("issue begin finish reward_failed", "issued running finished dropped"),
    "error while planned": ("generation_failed", "dropped"),
    "error while issued": ("issue generation_failed", "issued dropped"),
    "error while running": ("issue begin generation_failed", "issued running dropped"),
    "delivered back": (
        "issue begin finish score deliver roll_back deliver consume",
        "issued running finished scored delivered scored delivered consumed",
    ),
    "repeated": (
        "issue begin finish score deliver consume roll_back deliver consume",
        "issued running finished scored delivered consumed scored delivered consumed",
    ),
    "left over": ("issue begin run_ended", "issued running dropped"),
}


@pytest.mark.parametrize("name", LIVES)
def test_life(name):
    events, expected = LIVES[name]
    state, seen = GroupState.PLANNED, []
    for event in events.split():
        state = after(state, GroupEvent(event))
        seen.append(state.value)
    assert seen == expected.split()


@pytest.mark.parametrize(
    ("state", "event"),
    [(s, e) for s, e in itertools.product(GroupState, GroupEvent) if e not in GROUP_LIFE[s]],
)
def test_illegal_event_raises(state, event):
    with pytest.raises(IllegalEventError, match=f"a {state} group cannot {event}"):
        after(state, event)


def test_handed_and_consumed_groups_are_never_dropped():
    for state in (GroupState.DELIVERED, GroupState.CONSUMED):
        assert GroupState.DROPPED not in GROUP_LIFE[state].values()


def test_sample_life():
    state = SampleState.WAITING
    for event in (SampleEvent.ISSUE, SampleEvent.LOSE, SampleEvent.ISSUE, SampleEvent.FINISH, SampleEvent.SCORE):
        state = sample_after(state, event)
    assert state is SampleState.SCORED


def test_sample_life_with_turns():
    state, seen = SampleState.WAITING, []
    for event in ("issue", "ask", "go_on", "issue", "lose", "issue", "ask", "finish", "score"):
        state = sample_after(state, SampleEvent(event))
        seen.append(state.value)
    assert seen == ["out", "answering", "waiting", "out", "waiting", "out", "answering", "finished", "scored"]


@pytest.mark.parametrize(
    ("state", "event"),
    [(s, e) for s, e in itertools.product(SampleState, SampleEvent) if e not in SAMPLE_LIFE[s]],
)
def test_illegal_sample_event_raises(state, event):
    with pytest.raises(IllegalEventError, match=f"a {state} sample cannot {event}"):
        sample_after(state, event)
