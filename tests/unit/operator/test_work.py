"""The queue of jobs, with a clock of the test's own."""

import asyncio

from streamrl_operator.kube.reflector import pause_s
from streamrl_operator.work import BURST, LONGEST_S, REFILL_S, SETTLE_S, WorkQueue

A, B = ("lab", "a"), ("lab", "b")


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def due(queue: WorkQueue) -> list[tuple[str, str]]:
    """All that is due now, in order; taken."""
    found = []
    while queue.depth():
        get = queue.get()
        try:
            get.send(None)
        except StopIteration as done:
            found.append(done.value)
    return found


def test_many_changes_make_one_look() -> None:
    clock = Clock()
    queue = WorkQueue(clock=clock)
    for key in (A, B, A, A):
        queue.add(key)
    assert due(queue) == []
    clock.now_s += SETTLE_S
    assert due(queue) == [A, B]
    assert due(queue) == []


def test_a_change_during_a_look_makes_one_more() -> None:
    clock = Clock()
    queue = WorkQueue(clock=clock)
    queue.add_after(A, 0)
    assert due(queue) == [A]
    queue.add(A)
    queue.add(A)
    clock.now_s += 1
    assert due(queue) == []  # one look at a time
    queue.done(A, look_again_s=None)
    assert due(queue) == [A]
    queue.done(A, look_again_s=None)
    clock.now_s += 100
    assert due(queue) == []


def test_the_earlier_of_two_plans_counts() -> None:
    clock = Clock()
    queue = WorkQueue(clock=clock)
    queue.add_after(A, 30)
    queue.add_after(A, 5)
    queue.add_after(A, 60)
    clock.now_s = 5
    assert due(queue) == [A]
    queue.done(A, look_again_s=30)
    clock.now_s = 34
    assert due(queue) == []
    clock.now_s = 35
    assert due(queue) == [A]


def test_one_that_fails_waits_longer_each_time_and_changes_do_not_make_it_hot() -> None:
    clock = Clock()
    queue = WorkQueue(clock=clock)
    queue.add_after(A, 0)
    waits = []
    for _ in range(12):
        assert due(queue) == [A]
        queue.add(A)
        waits.append(queue.failed(A))
        queue.add(A)
        clock.now_s += waits[-1] * 0.99
        assert due(queue) == []
        clock.now_s += waits[-1] * 0.01 + 1e-6
    assert waits[0] <= 0.2
    assert LONGEST_S / 2 <= waits[-1] <= LONGEST_S


def test_a_new_wish_of_the_owner_ends_the_pause() -> None:
    clock = Clock()
    queue = WorkQueue(clock=clock)
    queue.add_after(A, 0)
    assert due(queue) == [A]
    queue.failed(A, asked_s=50)
    queue.add(A, True)
    clock.now_s += SETTLE_S
    assert due(queue) == [A]


def test_a_change_during_the_look_after_a_failure_is_not_lost() -> None:
    """Found by the crash-point campaign: that look succeeded, was too early to see the change, and nobody looked again."""
    clock = Clock()
    queue = WorkQueue(clock=clock)
    queue.add_after(A, 0)
    assert due(queue) == [A]
    clock.now_s += queue.failed(A)
    assert due(queue) == [A]
    queue.add(A)
    queue.done(A, look_again_s=None)
    clock.now_s += 1
    assert due(queue) == [A]


def test_a_success_forgets_the_failures() -> None:
    clock = Clock()
    queue = WorkQueue(clock=clock)
    queue.add_after(A, 0)
    for _ in range(5):
        assert due(queue) == [A]
        clock.now_s += queue.failed(A)
    assert due(queue) == [A]
    queue.done(A, look_again_s=0)
    assert due(queue) == [A]
    assert queue.failed(A) <= 0.2


def test_one_that_changes_without_end_is_looked_at_less_and_less_often() -> None:
    clock = Clock()
    queue = WorkQueue(clock=clock)
    looks = 0
    while clock.now_s < 600:
        queue.add(A)
        for key in due(queue):
            looks += 1
            queue.add(key)
            queue.done(key, look_again_s=None)
        clock.now_s += 0.1
    assert BURST + 600 / REFILL_S * 0.9 <= looks <= BURST + 600 / REFILL_S + 1
    queue.add(A, True)
    clock.now_s += SETTLE_S
    assert due(queue) == [A]


async def test_a_waiter_is_woken_by_a_change_and_by_time() -> None:
    queue = WorkQueue(clock=asyncio.get_running_loop().time)
    waiter = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    assert not waiter.done()
    queue.add_after(B, 3600)
    queue.add(A)
    assert await asyncio.wait_for(waiter, 10) == A


def test_pauses() -> None:
    assert [pause_s(n, drawn=1.0) for n in (1, 2, 3)] == [0.2, 0.4, 0.8]
    assert pause_s(1, drawn=0.0) == 0.1
    assert pause_s(50, drawn=1.0) == 15.0
    assert pause_s(1, asked_s=7.0) == 7.0
