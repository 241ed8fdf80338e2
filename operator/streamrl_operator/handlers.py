"""Wires changes to looks: every change of anything of a job makes the job dirty, and what is dirty is looked at, a few jobs at once.

Consumes: changes from the cluster's stores, which kopf (jobs) and the reflectors (what jobs have) fill. Produces: calls of
`Reconciler.reconcile`, one at a time for each job.
Waits for: a job that is due. In a namespace that is not known whole none is looked at; all of them are when it is. A look that fails is
repeated after a while that doubles, with jitter, and the job says so where the server itself fails for long; the process goes on.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from streamrl_operator import refusals
from streamrl_operator.jobs import JobWatch
from streamrl_operator.kube.cluster import Cluster, NameTakenError
from streamrl_operator.kube.errors import ConflictError, ForbiddenError, KubeError, NotFoundError
from streamrl_operator.kube.kinds import RLJOB
from streamrl_operator.kube.store import Key
from streamrl_operator.metrics import Metrics
from streamrl_operator.reconcile import Reconciler
from streamrl_operator.work import Hands, WorkQueue

log = logging.getLogger(__name__)

WORKERS = 16
"""Jobs looked at at once. Most of a look is waiting for the API server. Looks that wait for a pod are not counted (`Hands`)."""


@dataclass(slots=True, kw_only=True)
class Handlers:
    """The operator's work on one cluster."""

    cluster: Cluster
    jobs: JobWatch
    reconciler: Reconciler
    queue: WorkQueue
    hands: Hands
    metrics: Metrics

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.cluster.follow(), name="follow")
            tasks.create_task(self.jobs.run(), name="jobs")
            while True:
                await self.hands.take()
                key = await self._next()
                tasks.create_task(self._work(key), name=f"look at {key[0]}/{key[1]}")

    async def _next(self) -> Key:
        while True:
            key = await self.queue.get()
            if self.cluster.sight.is_whole(key[0]):
                return key
            self.queue.done(key, look_again_s=None)
            self.queue.forget(key)

    async def _work(self, key: Key) -> None:
        begun_s = time.monotonic()
        try:
            reason = await self._look(key)
        finally:
            self.hands.give_back()
        self.metrics.looked(reason, seconds=time.monotonic() - begun_s)

    async def _look(self, key: Key) -> str:
        """One look; the reason why it failed or was held up, empty if it was not."""
        extra = {"namespace": key[0], "job": key[1]}
        asked_s = None
        try:
            looked = await self.reconciler.reconcile(key)
        except (ConflictError, NotFoundError) as error:
            reason, text = error.reason, str(error)  # the caches are behind: usually the next look is fine
            if isinstance(error, NotFoundError):
                self.jobs.doubt()
        except KubeError as error:
            reason, text, asked_s = error.reason, str(error), error.retry_after_s
            if isinstance(error, ForbiddenError) and self.cluster.namespaces:
                self.jobs.doubt()  # the namespace may not be ours any more
            await self._say_lasting(key, error)
        except NameTakenError as error:
            reason, text = "NameTaken", str(error)
        except Exception as error:
            # An error of ours in one job must not stop the others.
            log.exception("look failed", extra=extra)
            reason, text = "Internal", type(error).__name__
        else:
            self.queue.done(key, look_again_s=looked.again_s)
            if self.cluster.known(RLJOB, *key) is None:
                self.queue.forget(key)
            return looked.refused
        wait_s = self.queue.failed(key, asked_s=asked_s)
        log.warning("look failed", extra={**extra, "reason": reason, "error": text, "again_s": round(wait_s, 2)})
        return reason

    async def _say_lasting(self, key: Key, error: KubeError) -> None:
        told = refusals.lasting(error, failures=self.queue.failures(key) + 1)
        if told is None:
            return
        try:
            await self.reconciler.say(key, told)
        except KubeError as unsaid:
            log.warning("nothing can be said", extra={"namespace": key[0], "job": key[1], "error": str(unsaid)})
