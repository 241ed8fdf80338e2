"""Wires changes to reconciles: what has changed makes its job due, and what is due is reconciled, a few jobs at once.

    caches ──add──▶ WorkQueue ──get──▶ a free worker ──▶ Reconciler.reconcile ──done, failed──▶ WorkQueue

Owns: that a job is reconciled by one worker at a time, that many changes make one reconcile, and that a failing job waits longer each time.
Waits for: a job that is due; unblocked by a change, time, or cancellation. In a namespace whose caches are not in sync none is reconciled;
all of them are when they are. A reconcile that fails is repeated after a while that doubles, with jitter, and the job says so where the
server itself fails for long; the process goes on. The queue is bounded by the number of jobs that there are.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from streamrl_operator import events
from streamrl_operator.kube.answers import ConflictError, ForbiddenError, KubeError, NotFoundError
from streamrl_operator.kube.cache import Key, pause_s
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import RLJOB
from streamrl_operator.metrics import OperatorMetrics
from streamrl_operator.reconcile import Reconciler

log = logging.getLogger(__name__)

WORKERS = 16
"""Jobs reconciled at once. Most of one is waiting for the API server. Those that wait for a pod are not counted (`aside`)."""
SETTLE_S = 0.1
"""A change is looked at so long after it: changes come in bursts, and one reconcile serves them all."""
LONGEST_S = 60.0
"""Between two reconciles of a job that fails."""
BURST, REFILL_S = 40.0, 2.0
"""So many reconciles of one job may follow each other at once, and one more each `REFILL_S`: whatever fights with us over an object, or
changes without end, does not make us hot."""


@asynccontextmanager
async def aside(workers: asyncio.Semaphore) -> AsyncIterator[None]:
    """Without a worker in the block, where a reconcile waits for a pod: pods that keep silent would hold all of them, and no job be looked at."""
    workers.release()
    try:
        yield
    finally:
        await workers.acquire()


@dataclass(slots=True)
class WorkQueue:
    """Jobs that wait to be looked at. `clock`: monotonic seconds."""

    clock: Callable[[], float]
    _due: dict[Key, float] = field(default_factory=dict)
    _calendar: list[tuple[float, Key]] = field(default_factory=list)
    """Entries that `_due` no longer agrees with are skipped."""
    _working: dict[Key, float | None] = field(default_factory=dict)
    """Job in work -> when it became due again meanwhile."""
    _failures: dict[Key, int] = field(default_factory=dict)
    _budgets: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """Job -> (reconciles left, when that was)."""
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: Key, is_asked: bool = False) -> None:  # noqa: FBT001, FBT002 - as a store calls it
        """Something of the job has changed. A job that fails keeps its pause, unless its owner asks for something else.

        A change during the reconcile after such a pause counts: that reconcile may be the one that succeeds, and was too early to see it.
        """
        if is_asked:
            self.add_after(key, SETTLE_S)
        elif key in self._working or not self._failures.get(key):
            self.add_after(key, SETTLE_S + max(0.0, 1.0 - self._budget_left(key)) * REFILL_S)

    def _budget_left(self, key: Key) -> float:
        left, at_s = self._budgets.get(key, (BURST, 0.0))
        return min(BURST, left + (self.clock() - at_s) / REFILL_S)

    def add_after(self, key: Key, seconds: float) -> None:
        """Look at it so long from now, or earlier if that is planned already."""
        at_s = self.clock() + seconds
        if key in self._working:
            planned = self._working[key]
            self._working[key] = at_s if planned is None else min(planned, at_s)
            return
        if at_s < self._due.get(key, float("inf")):
            self._due[key] = at_s
            heapq.heappush(self._calendar, (at_s, key))
            self._stirred.set()

    async def get(self) -> Key:
        """The next job that is due; it is the caller's until `done` or `failed`."""
        while True:
            now_s = self.clock()
            while self._calendar and self._due.get(self._calendar[0][1]) != self._calendar[0][0]:
                heapq.heappop(self._calendar)
            if self._calendar and self._calendar[0][0] <= now_s:
                _, key = heapq.heappop(self._calendar)
                del self._due[key]
                self._working[key] = None
                self._budgets[key] = (max(0.0, self._budget_left(key) - 1.0), now_s)
                return key
            self._stirred.clear()
            wait_s = self._calendar[0][0] - now_s if self._calendar else None
            try:
                await asyncio.wait_for(self._stirred.wait(), wait_s)
            except TimeoutError:
                continue

    def done(self, key: Key, *, requeue_after_s: float | None) -> None:
        """It was looked at."""
        self._failures.pop(key, None)
        self._finish(key, requeue_after_s)

    def failed(self, key: Key, *, asked_s: float | None = None) -> float:
        """It could not be brought about; the seconds until the next attempt."""
        self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = pause_s(self._failures[key], asked_s=asked_s, longest_s=LONGEST_S)
        self._working[key] = None
        self._finish(key, wait_s)
        return wait_s

    def failures(self, key: Key) -> int:
        """How often in a row it could not be brought about."""
        return self._failures.get(key, 0)

    def _finish(self, key: Key, seconds: float | None) -> None:
        again_s = self._working.pop(key)
        if again_s is not None:
            self.add_after(key, max(0.0, again_s - self.clock()))
        if seconds is not None:
            self.add_after(key, seconds)

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._budgets.pop(key, None)

    def depth(self) -> int:
        """Jobs that are due and wait for a worker."""
        now_s = self.clock()
        return sum(at_s <= now_s for at_s in self._due.values())


@dataclass(slots=True, kw_only=True)
class Controller:
    """The operator's work on one cluster."""

    cluster: CachedCluster
    reconciler: Reconciler
    queue: WorkQueue
    workers: asyncio.Semaphore
    """One for each job that is reconciled at once."""
    metrics: OperatorMetrics

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.cluster.follow(), name="follow")
            while True:
                await self.workers.acquire()
                key = await self._next()
                tasks.create_task(self._work(key), name=f"reconcile {key[0]}/{key[1]}")

    async def _next(self) -> Key:
        while True:
            key = await self.queue.get()
            if self.cluster.cache_sync.is_whole(key[0]):
                return key
            self.queue.done(key, requeue_after_s=None)
            self.queue.forget(key)

    async def _work(self, key: Key) -> None:
        begun_s = time.monotonic()
        try:
            reason = await self._reconcile(key)
        finally:
            self.workers.release()
        self.metrics.reconciled(reason, seconds=time.monotonic() - begun_s)

    async def _reconcile(self, key: Key) -> str:
        """One reconcile; the reason why it failed or was held up, empty if it was not."""
        extra = {"namespace": key[0], "job": key[1]}
        asked_s = None
        try:
            reconciled = await self.reconciler.reconcile(key)
        except (ConflictError, NotFoundError) as error:
            reason, text = error.reason, str(error)  # the caches are behind: usually the next reconcile is fine
            if isinstance(error, NotFoundError):
                self.cluster.doubt(key[0])
        except KubeError as error:
            reason, text, asked_s = error.reason, str(error), error.retry_after_s
            if isinstance(error, ForbiddenError) and self.cluster.namespaces:
                self.cluster.doubt(key[0])  # the namespace may not be ours any more
            await self._say_lasting(key, error)
        except NameTakenError as error:
            reason, text = "NameTaken", str(error)
        except Exception as error:
            # An error of ours in one job must not stop the others.
            log.exception("reconcile failed", extra=extra)
            reason, text = "Internal", type(error).__name__
        else:
            self.queue.done(key, requeue_after_s=reconciled.again_s)
            if self.cluster.known(RLJOB, *key) is None:
                self.queue.forget(key)
            return reconciled.refused
        wait_s = self.queue.failed(key, asked_s=asked_s)
        log.warning("reconcile failed", extra={**extra, "reason": reason, "error": text, "again_s": round(wait_s, 2)})
        return reason

    async def _say_lasting(self, key: Key, error: KubeError) -> None:
        reported = events.server_error_condition(error, failures=self.queue.failures(key) + 1)
        if reported is None:
            return
        try:
            await self.reconciler.say(key, reported)
        except KubeError as unsaid:
            log.warning("nothing can be said", extra={"namespace": key[0], "job": key[1], "error": str(unsaid)})
