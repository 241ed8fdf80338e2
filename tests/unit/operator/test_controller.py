"""Looks at many jobs at once: which of them may keep the others waiting."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from streamrl_operator.controller import WORKERS, Controller, aside
from streamrl_operator.kube.answers import ConflictError, KubeError, UnavailableError
from streamrl_operator.kube.cache import CacheSync, Key, pause_s
from streamrl_operator.kube.kinds import RLJOB
from streamrl_operator.metrics import OperatorMetrics
from streamrl_operator.planning.conditions import Aspect
from streamrl_operator.reconcile import ReconcileResult
from streamrl_operator.work_queue import BURST, LONGEST_S, REFILL_S, SETTLE_S, WorkQueue

SILENT = [("lab", f"silent-{number}") for number in range(3 * WORKERS)]
OTHER = ("lab", "other")


@dataclass
class Jobs:
    """What there is, and looks: those at silent jobs wait for a pod, for ever or until `answers`."""

    workers: asyncio.Semaphore
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    waits: set[Key] = field(default_factory=set)
    reconciled: list[Key] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    cache_sync: CacheSync = field(default_factory=lambda: CacheSync(("lab", "refused"), (RLJOB,)))

    fails: list[KubeError] = field(default_factory=list)
    """What looks at the other job fail with, one after the other."""
    said: list[tuple[int, Aspect]] = field(default_factory=list)
    """(failures that were left, what was told of the job)."""

    async def say(self, _: Key, reported: Aspect) -> None:
        self.said.append((len(self.fails), reported))
        raise failure(503)

    async def reconcile(self, key: Key, *, has_changed: bool) -> ReconcileResult:
        if key == OTHER and self.fails:
            raise self.fails.pop(0)
        with self._counted():
            if key in SILENT:
                self.waits.add(key)
                await self._pod()
            await asyncio.sleep(0)
            self.reconciled.append(key)
        return ReconcileResult()

    async def _pod(self) -> None:
        self.at_once -= 1
        async with aside(self.workers):
            await self.answers.wait()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        yield
        self.at_once -= 1

    async def follow(self) -> None:
        await asyncio.Event().wait()

    async def run(self) -> None:
        await asyncio.Event().wait()

    def known(self, *_: object) -> dict[str, Any]:
        return {}


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(workers=asyncio.Semaphore(WORKERS))


async def until(check: Any, *, deadline_s: float = 120.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not check():  # noqa: ASYNC110 - a poll with a deadline: what is awaited sets no event
            await asyncio.sleep(0.01)


def failure(status: int) -> KubeError:
    """An answer with that status; 0: none."""
    kind = UnavailableError if status in (0, 429) or status >= 500 else ConflictError
    return kind("apply /x", status=status, reason="InternalError", message="failed calling webhook")


@asynccontextmanager
async def working(jobs: Jobs) -> AsyncIterator[WorkQueue]:
    """Controller at work; what they are to look at goes into the queue."""
    queue = WorkQueue(clock=time.monotonic)
    one = cast(Any, jobs)
    running = asyncio.ensure_future(
        Controller(cluster=one, reconciler=one, queue=queue, workers=jobs.workers, metrics=OperatorMetrics()).run()
    )
    try:
        yield queue
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([500] * 3, []),
        ([500] * 4, [0]),
        ([409, 0, 500, 500], [0]),
        ([0] * 4, []),
        ([429] * 4, []),
    ],
    ids=["passes", "lasts", "with others", "no answer", "too many requests"],
)
async def test_a_server_that_fails_for_long_is_told_of(jobs: Jobs, statuses: list[int], said: list[int]) -> None:
    jobs.fails = [failure(status) for status in statuses]
    jobs.cache_sync.listed("lab", RLJOB)
    async with working(jobs) as queue:
        queue.add(OTHER)
        await until(lambda: OTHER in jobs.reconciled)
    assert [left for left, _ in jobs.said] == said
    for _, reported in jobs.said:
        assert (reported.reason, reported.holds) == ("ServerError", False)
        assert "failed calling webhook" in reported.message


async def test_jobs_whose_pods_keep_silent_keep_no_other_waiting(jobs: Jobs) -> None:
    jobs.cache_sync.listed("lab", RLJOB)
    async with working(jobs) as queue:
        for key in SILENT:
            queue.add(key)
        await until(lambda: jobs.waits == set(SILENT))
        queue.add(OTHER)
        await until(lambda: jobs.reconciled == [OTHER])
        jobs.answers.set()
        await until(lambda: set(jobs.reconciled) == {*SILENT, OTHER})
        assert jobs.most_at_once <= WORKERS


async def test_only_jobs_of_namespaces_that_are_known_are_looked_at(jobs: Jobs) -> None:
    jobs.cache_sync.listed("lab", RLJOB)
    async with working(jobs) as queue:
        for number in range(2 * WORKERS):
            queue.add(("refused", f"job-{number}"))
        queue.add(OTHER)
        await until(lambda: jobs.reconciled == [OTHER])
        jobs.cache_sync.listed("refused", RLJOB)
        queue.add(("refused", "job-0"))
        await until(lambda: jobs.reconciled == [OTHER, ("refused", "job-0")])


A, B = ("lab", "a"), ("lab", "b")


class FakeClock:
    """Goes when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(clock: FakeClock) -> WorkQueue:
    return WorkQueue(clock=clock)


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


def test_many_changes_make_one_look(queue: WorkQueue, clock: FakeClock) -> None:
    for key in (A, B, A, A):
        queue.add(key)
    assert due(queue) == []
    clock.now_s += SETTLE_S
    assert due(queue) == [A, B]
    assert due(queue) == []


def test_a_change_during_a_look_makes_one_more(queue: WorkQueue, clock: FakeClock) -> None:
    queue.add_after(A, 0)
    assert due(queue) == [A]
    queue.add(A)
    queue.add(A)
    clock.now_s += 1
    assert due(queue) == []  # one look at a time
    queue.done(A, requeue_after_s=None)
    assert due(queue) == [A]
    queue.done(A, requeue_after_s=None)
    clock.now_s += 100
    assert due(queue) == []


def test_the_queue_knows_whether_a_job_has_changed_or_its_time_has_come(queue: WorkQueue, clock: FakeClock) -> None:
    queue.add_after(A, 0)
    assert (due(queue), queue.has_changed(A)) == ([A], False)
    queue.add(A)  # the one in work may be too early to see it
    assert not queue.has_changed(A)
    queue.done(A, requeue_after_s=30)
    clock.now_s += SETTLE_S
    assert (due(queue), queue.has_changed(A)) == ([A], True)
    queue.done(A, requeue_after_s=30)
    clock.now_s += 30
    assert (due(queue), queue.has_changed(A)) == ([A], False)


def test_the_earlier_of_two_plans_counts(queue: WorkQueue, clock: FakeClock) -> None:
    queue.add_after(A, 30)
    queue.add_after(A, 5)
    queue.add_after(A, 60)
    clock.now_s = 5
    assert due(queue) == [A]
    queue.done(A, requeue_after_s=30)
    clock.now_s = 34
    assert due(queue) == []
    clock.now_s = 35
    assert due(queue) == [A]


def test_one_that_fails_waits_longer_each_time_and_changes_do_not_make_it_hot(
    queue: WorkQueue, clock: FakeClock
) -> None:
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


def test_a_new_wish_of_the_owner_ends_the_pause(queue: WorkQueue, clock: FakeClock) -> None:
    queue.add_after(A, 0)
    assert due(queue) == [A]
    queue.failed(A, asked_s=50)
    queue.add(A, True)
    clock.now_s += SETTLE_S
    assert due(queue) == [A]


def test_a_change_during_the_look_after_a_failure_is_not_lost(queue: WorkQueue, clock: FakeClock) -> None:
    """Found by the crash-point campaign: that look succeeded, was too early to see the change, and nobody looked again."""
    queue.add_after(A, 0)
    assert due(queue) == [A]
    clock.now_s += queue.failed(A)
    assert due(queue) == [A]
    queue.add(A)
    queue.done(A, requeue_after_s=None)
    clock.now_s += 1
    assert due(queue) == [A]


def test_a_success_forgets_the_failures(queue: WorkQueue, clock: FakeClock) -> None:
    queue.add_after(A, 0)
    for _ in range(5):
        assert due(queue) == [A]
        clock.now_s += queue.failed(A)
    assert due(queue) == [A]
    queue.done(A, requeue_after_s=0)
    assert due(queue) == [A]
    assert queue.failed(A) <= 0.2


def test_one_that_changes_without_end_is_looked_at_less_and_less_often(queue: WorkQueue, clock: FakeClock) -> None:
    looks = 0
    while clock.now_s < 600:
        queue.add(A)
        for key in due(queue):
            looks += 1
            queue.add(key)
            queue.done(key, requeue_after_s=None)
        clock.now_s += 0.1
    assert BURST + 600 / REFILL_S * 0.9 <= looks <= BURST + 600 / REFILL_S + 1
    queue.add(A, True)
    clock.now_s += SETTLE_S
    assert due(queue) == [A]


def test_an_owner_who_changes_the_spec_without_end_is_looked_at_less_and_less_often(
    queue: WorkQueue, clock: FakeClock
) -> None:
    """100 edits a second were ten looks a second, each with its writes; the other jobs waited for a worker meanwhile."""
    looks = 0
    while clock.now_s < 600:
        queue.add(A, True)
        for key in due(queue):
            looks += 1
            queue.add(key, True)
            queue.done(key, requeue_after_s=None)
        clock.now_s += 0.01
    assert BURST / 10 <= looks <= BURST + 600 / REFILL_S + 1
    clock.now_s += BURST * REFILL_S
    queue.add(A, True)
    clock.now_s += SETTLE_S
    assert A in due(queue)


async def test_a_waiter_is_woken_by_a_change_and_by_time() -> None:
    queue = WorkQueue(clock=asyncio.get_running_loop().time)
    waiter = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    assert not waiter.done()
    queue.add_after(B, 3600)
    queue.add(A)
    assert await asyncio.wait_for(waiter, 120) == A


def test_pauses() -> None:
    assert [pause_s(n, drawn=1.0) for n in (1, 2, 3)] == [0.2, 0.4, 0.8]
    assert pause_s(1, drawn=0.0) == 0.1
    assert pause_s(50, drawn=1.0) == 15.0
    assert pause_s(1, asked_s=7.0) == 7.0
