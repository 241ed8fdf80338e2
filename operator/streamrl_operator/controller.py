"""Wires changes to reconciles: what has changed makes its job due, and what is due is reconciled, a few jobs at once.

    caches ──add──▶ WorkQueue ──get──▶ a free worker ──▶ Reconciler.reconcile ──done, failed──▶ WorkQueue

Owns: how many jobs are reconciled at once, and what is said of those that fail. `work_queue.py` has when each is due.
Waits for: a job that is due; unblocked by a change, time, or cancellation. In a namespace whose caches are not in sync none is reconciled;
all of them are when they are. A reconcile that fails is repeated after a while that doubles, with jitter, and the job says so where the
server itself fails for long; the process goes on. The queue is bounded by the number of jobs that there are.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streamrl_operator import events
from streamrl_operator.clusters.registry import Members
from streamrl_operator.kube.answers import ConflictError, ForbiddenError, KubeError, NotFoundError
from streamrl_operator.kube.cache import Key
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import RLJOB
from streamrl_operator.metrics import OperatorMetrics
from streamrl_operator.reconcile import Reconciler
from streamrl_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

WORKERS = 16
"""Jobs reconciled at once. Most of one is waiting for the API server. Those that wait for a pod are not counted (`aside`)."""


@asynccontextmanager
async def aside(workers: asyncio.Semaphore) -> AsyncIterator[None]:
    """Without a worker in the block, where a reconcile waits for a pod: pods that keep silent would hold all of them, and no job be looked at."""
    workers.release()
    try:
        yield
    finally:
        await workers.acquire()


@dataclass(slots=True, kw_only=True)
class Controller:
    """The operator's work at home, and beside it in members."""

    cluster: CachedCluster
    reconciler: Reconciler
    queue: WorkQueue
    workers: asyncio.Semaphore
    """One for each job that is reconciled at once."""
    metrics: OperatorMetrics
    members: Members | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.cluster.follow(), name="follow")
            if self.members is not None:
                tasks.create_task(self.members.run(), name="members")
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
            reconciled = await self.reconciler.reconcile(key, has_changed=self.queue.has_changed(key))
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
