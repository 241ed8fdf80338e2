"""The window's answers against brute force: is there any way left to meet all deadlines?"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.scheduler.model import Window, batch_complete


def solvable(begun: list[int], *, step: int, room: int, batch: int, staleness: int) -> bool:
    """Whether some order meets all deadlines: places go to the earliest deadline, one after the other."""
    for place, version in enumerate(sorted(begun)):
        taken_in = step if place < room else step + 1 + (place - room) // batch
        if taken_in - version > staleness:
            return False
    return True


def any_order_solvable(begun: Counter[int], *, step: int, room: int, batch: int, staleness: int) -> bool:
    """The same by trying every order."""
    if not +begun:
        return True
    if not room:
        return any_order_solvable(begun, step=step + 1, room=batch, batch=batch, staleness=staleness)
    return any(
        step - version <= staleness
        and any_order_solvable(begun - Counter([version]), step=step, room=room - 1, batch=batch, staleness=staleness)
        for version in +begun
    )


@st.composite
def states(draw: st.DrawFn) -> tuple[Window, list[int], dict[str, int]]:
    """A feasible window and the versions of its live groups."""
    batch, staleness, step = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 6))
    window = Window(batch_groups=batch, staleness=staleness, step=step)
    begun: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        version = draw(st.integers(max(0, step - staleness), step))
        if window.may_begin(version):
            window.begin(version)
            begun.append(version)
    for version in draw(st.lists(st.sampled_from(begun), max_size=batch - 1)) if begun else []:
        if version in begun and window.may_deliver(version):
            window.deliver(version)
            begun.remove(version)
    return window, begun, {"step": step, "room": window.room, "batch": batch, "staleness": staleness}


@settings(max_examples=300, deadline=None)
@given(states(), st.integers(-1, 7))
def test_may_begin_exactly_what_can_still_be_consumed_in_time(state, version):
    window, begun, where = state
    expected = version <= where["step"] and solvable([*begun, version], **where)
    assert window.may_begin(version) == expected


@settings(max_examples=300, deadline=None)
@given(states())
def test_may_hand_exactly_what_leaves_a_way(state):
    window, begun, where = state
    for version in set(begun):
        rest = list(begun)
        rest.remove(version)
        after = {**where, "room": where["room"] - 1}
        assert window.may_deliver(version) == (where["room"] > 0 and solvable(rest, **after))


@settings(max_examples=300, deadline=None)
@given(states(), st.integers(0, 6))
def test_may_lower_exactly_what_leaves_a_way(state, to):
    window, begun, where = state
    for version in {version for version in begun if version > to}:
        rest = list(begun)
        rest.remove(version)
        assert window.may_lower(version, to=to) == solvable([*rest, to], **where)


@settings(max_examples=200, deadline=None)
@given(states())
def test_due_is_what_the_later_steps_have_no_place_for(state):
    window, begun, where = state
    for version in range(where["step"]):
        older = [b for b in begun if b <= version]
        later = sum(where["batch"] for step in range(where["step"] + 1, version + where["staleness"] + 1))
        assert window.due().get(version, 0) == max(0, len(older) - later)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=7), st.integers(0, 3), st.integers(0, 2), st.integers(1, 3))
def test_earliest_deadline_first_is_as_good_as_any_order(begun, room, staleness, batch):
    where = {"step": 3, "room": min(room, batch), "batch": batch, "staleness": staleness}
    assert solvable(begun, **where) == any_order_solvable(Counter(begun), **where)


@settings(max_examples=150, deadline=None)
@given(states())
def test_the_oldest_may_always_be_handed_over(state):
    window, begun, _ = state
    if begun and window.room:
        assert window.may_deliver(min(begun))


def test_the_example_of_the_document():
    window = Window(batch_groups=2, staleness=1, step=0)
    for _ in range(4):
        assert window.may_begin(0)
        window.begin(0)
    assert not window.may_begin(0)
    window.deliver(0)
    window.deliver(0)
    window.advance()
    window.begin(1)
    assert window.may_deliver(0)
    assert not window.may_deliver(1)


def test_an_unlawful_change_is_caught():
    window = Window(batch_groups=1, staleness=0, step=0)
    window.begin(0)
    window.begin(0)
    with pytest.raises(AssertionError, match="2 groups begun at <= 0 have 1 places left"):
        window.may_deliver(0)


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
        if not window.may_deliver(version):
            return False
        window.deliver(version)
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
        allowed = [version for version in +ready if window.may_deliver(version)]
        assert allowed, "open, and yet nothing may go"
        version = chance.choice(allowed)
        window.deliver(version)
        ready[version] -= 1
