"""The tables of life: exact sequences, and every event that is not in them."""

import itertools

import pytest

from streamrl_workers.scheduler.model import GROUP_LIFE, GroupEvent, GroupState, after
from streamrl_workers.scheduler.sample import SAMPLE_LIFE, IllegalEventError, SampleEvent, SampleState, sample_after

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


SAMPLE_LIVES = {
    "lost once": ("issue lose issue finish score", "out waiting out finished scored"),
    "with turns": (
        "issue ask continue issue lose issue ask finish score",
        "out answering waiting out waiting out answering finished scored",
    ),
}
GROUP = (after, GroupState, GroupEvent, GROUP_LIFE, "group")
SAMPLE = (sample_after, SampleState, SampleEvent, SAMPLE_LIFE, "sample")


@pytest.mark.parametrize(
    ("kind", "events", "expected"),
    [*((GROUP, *life) for life in LIVES.values()), *((SAMPLE, *life) for life in SAMPLE_LIVES.values())],
    ids=[*LIVES, *SAMPLE_LIVES],
)
def test_life(kind, events, expected):
    follow, states, kinds_of_event, *_ = kind
    state, seen = next(iter(states)), []
    for event in events.split():
        state = follow(state, kinds_of_event(event))
        seen.append(state.value)
    assert seen == expected.split()


@pytest.mark.parametrize(
    ("kind", "state", "event"),
    [
        pytest.param(kind, state, event, id=f"{kind[-1]}-{state}-{event}")
        for kind in (GROUP, SAMPLE)
        for state, event in itertools.product(kind[1], kind[2])
        if event not in kind[3][state]
    ],
)
def test_illegal_event_raises(kind, state, event):
    with pytest.raises(IllegalEventError, match=f"a {state} {kind[-1]} cannot {event}"):
        kind[0](state, event)


def test_handed_and_consumed_groups_are_never_dropped():
    for state in (GroupState.DELIVERED, GroupState.CONSUMED):
        assert GroupState.DROPPED not in GROUP_LIFE[state].values()
