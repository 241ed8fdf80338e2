"""When a whole batch can be handed over: tables, and against trying it out with the window."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.scheduler.barrier import batch_complete
from streamrl_workers.scheduler.staleness import Window


@pytest.mark.parametrize(
    ("ready", "room", "due", "complete"),
    [
        ({}, 2, {}, False),
        ({0: 1}, 2, {}, False),
        ({0: 2}, 2, {}, True),
        ({0: 3}, 2, {}, True),
        ({3: 1, 4: 1}, 2, {}, True),
        ({4: 2}, 2, {3: 1}, False),
        ({3: 1, 4: 1}, 2, {3: 1}, True),
        ({2: 1, 4: 1}, 2, {3: 1}, True),
        ({3: 1, 4: 5}, 2, {3: 2}, False),
        ({1: 1, 3: 1}, 2, {1: 1, 2: 2}, False),
        ({1: 1, 2: 1}, 2, {1: 1, 2: 2}, True),
    ],
)
def test_complete_is_enough_groups_and_all_that_are_due(ready, room, due, complete):
    assert batch_complete(ready, room=room, due=due) is complete


@st.composite
def batches(draw: st.DrawFn) -> tuple[Window, Counter[int]]:
    """A feasible window, and the versions of those of its live groups that are scored."""
    batch, staleness, step = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 5))
    window = Window(batch_groups=batch, staleness=staleness, step=step)
    ready: Counter[int] = Counter()
    for _ in range(draw(st.integers(0, 14))):
        version = draw(st.integers(max(0, step - staleness), step))
        if window.may_begin(version):
            window.begin(version)
            ready[version] += draw(st.booleans())
    return window, +ready


def fill(window: Window, ready: Counter[int]) -> bool:
    """Hand scored groups over, the oldest first, until the step is full; whether it became full."""
    ready = Counter(ready)
    while window.room and +ready:
        version = min(+ready)
        if not window.may_hand(version):
            return False
        window.hand(version)
        ready[version] -= 1
    return window.room == 0


@settings(max_examples=400, deadline=None)
@given(batches())
def test_a_batch_is_complete_exactly_when_the_scored_groups_can_fill_the_step(state):
    window, ready = state
    complete = batch_complete(ready, room=window.room, due=window.due())
    assert complete == fill(window, ready)


@settings(max_examples=400, deadline=None)
@given(batches(), st.randoms())
def test_a_complete_batch_goes_in_any_order_that_the_window_allows(state, chance):
    window, ready = state
    if not batch_complete(ready, room=window.room, due=window.due()):
        return
    while window.room:
        allowed = [version for version in +ready if window.may_hand(version)]
        assert allowed, "open, and yet nothing may go"
        version = chance.choice(allowed)
        window.hand(version)
        ready[version] -= 1
