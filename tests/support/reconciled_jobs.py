"""A job at an API server, and an operator that reconciles it when a test calls it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from streamrl import names
from streamrl_operator.clock import OperatorClock
from streamrl_operator.events import Events
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import EVENT, GENERATOR_POOL, POD, RLJOB, STATEFUL_SET
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.reconcile import Reconciler, ReconcileResult
from support.api_server import ApiServer, Doc
from support.observed_jobs import JOB, NOW, SETTINGS, container, trainer

LAB = "default"
LIVES = Lives(ca_s=90 * 86_400, leaf_s=30 * 86_400, settle_s=600)


class Ticks:
    """Half a minute goes by between two readings: every look is due for everything."""

    seconds, each_s = 0.0, 30.0

    def __call__(self) -> float:
        self.seconds += self.each_s
        return self.seconds

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self())


@dataclass
class World:
    """A job at an API server, and its operator."""

    server: ApiServer
    cluster: CachedCluster
    reconciler: Reconciler
    ticks: Ticks

    @property
    def job(self) -> Doc:
        return self.server.objects[RLJOB.path(LAB, JOB)]

    @property
    def status(self) -> Doc:
        found: Doc = self.job["status"]
        return found

    def put(self, document: Doc) -> None:
        """Store the job as its owner wants it."""
        document["metadata"] |= {"finalizers": [names.FINALIZER]}
        self.cluster.job_watches[""].store.put(self.server.put(RLJOB.path(LAB, JOB), document))

    def edit(self, *, pool: str = "", fields: Doc | None = None, **spec: Any) -> None:
        """Change fields of a pool, and of the spec."""
        pools = [each | (fields or {} if each["name"] == pool else {}) for each in self.job["spec"]["generators"]]
        self.put({**self.job, "spec": {**self.job["spec"], "generators": pools, **spec}})

    async def pods_are(self, *pods: Doc) -> None:
        """Pods as they are now."""
        for each in pods:
            owner = {"kind": "StatefulSet", "name": "s", "uid": "u", "controller": True}
            metadata = {**each["metadata"], "namespace": LAB, "ownerReferences": [owner]}
            whole = {**each, "apiVersion": "v1", "kind": "Pod", "metadata": metadata}
            await self.cluster.merge(self.server.put(POD.path(LAB, metadata["name"]), whole), {})

    async def trainer_is_ready(self) -> None:
        """As a kubelet says it."""
        await self.pods_are(trainer(init=[container("scheduler")], containers=[container("trainer")]))

    async def scale(self, pool: str, replicas: int) -> None:
        """As through /scale."""
        found = self.server.objects[GENERATOR_POOL.path(LAB, names.pool(JOB, pool))]
        await self.cluster.merge(found, {"spec": {"replicas": replicas}})

    async def look(self, times: int = 1, *, has_changed: bool = True) -> ReconcileResult:
        """So many looks; the last."""
        assert times > 0
        for _ in range(times):
            reconciled = await self.reconciler.reconcile((LAB, JOB), has_changed=has_changed)
        return reconciled

    def sizes(self) -> dict[str, int]:
        found = self.server.under(STATEFUL_SET.path(LAB))
        return {each["metadata"]["name"].rpartition("-")[2]: each["spec"]["replicas"] for each in found}

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(each for each in self.status["conditions"] if each["type"] == kind)
        return found["status"], found["reason"]

    def ready_message(self) -> str:
        return str(self.status["conditions"][0]["message"])

    def warnings(self) -> list[str]:
        return [each["reason"] for each in self.server.under(EVENT.path(LAB)) if each["type"] == "Warning"]

    def refuse(self, what: str) -> None:
        """Every write of one object, as a webhook of somebody does."""
        self.server.refuse = lambda _, path, __: (403, "denied by a policy") if path.endswith(what) else None


@asynccontextmanager
async def world_of() -> AsyncIterator[World]:
    """Provide an API server without a job."""
    server, ticks = ApiServer(), Ticks()
    async with server.client() as client:
        cluster, clock = CachedCluster(client, changed=lambda *_: None), OperatorClock(now=ticks.now, monotonic=ticks)
        events = Events(client=client, clock=clock, instance="test")
        reconciler = Reconciler(
            cluster=cluster, events=events, settings=replace(SETTINGS, numbers_by_proxy=True), lives=LIVES, clock=clock
        )
        yield World(server=server, cluster=cluster, reconciler=reconciler, ticks=ticks)
