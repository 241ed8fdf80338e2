"""A job with a pool or its trainer in a member, the API server at home, and a member that only writes down what it is told."""

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

from streamrl import names
from streamrl.clusters import Exposure
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.member import MemberWork
from streamrl_operator.clusters.registry import Members
from streamrl_operator.events import Events
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import RLJOB, Kind
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.planning.values import MemberView
from streamrl_operator.reconcile import Reconciler
from support.api_server import ApiServer, Doc
from support.observed_jobs import JOB, NOW, SETTINGS

LAB = "default"
VIEW = MemberView(
    cluster="east",
    cluster_uid="u-east",
    origin="u-home",
    namespace="there",
    exposure=Exposure.model_validate({"address": {"host": "192.0.2.7"}}),
)


@dataclass
class FakeMembers:
    """One member that only writes down what it is told."""

    seen: MemberView = VIEW
    there: dict[str, list[Doc]] = field(default_factory=dict)
    """By kind."""
    home: CachedCluster | None = None
    """Given: the member's caches are these."""
    told: list[MemberWork] = field(default_factory=list)
    is_known: bool = True
    made: int | None = None
    """Generation of the last work that it has brought about, which it does at once unless it refuses something."""

    def view(self, _name: str, _key: object, **_: object) -> MemberView:
        return replace(self.seen, made_generation=self.made)

    def objects(self, kind: Kind, name: str, _key: object, *, failed: bool = False) -> list[Doc]:
        is_there = name == "east" and not failed
        return copy.deepcopy(self.there.get(kind.kind, []) if is_there else [])

    def known(self, kind: Kind, name: str, key: object, of: str) -> Doc | None:
        return next((one for one in self.objects(kind, name, key) if one["metadata"]["name"] == of), None)

    def reached(self, _name: str, key: tuple[str, str]) -> tuple[CachedCluster, tuple[str, str]] | None:
        return None if self.home is None or self.seen.unreachable else (self.home, ("there", key[1]))

    def want(self, _name: str, _key: object, work: MemberWork) -> None:
        self.told.append(work)
        if work.action == "Apply" and not self.seen.refused:
            self.made = work.generation

    def forget(self, _key: object) -> None:
        self.told.clear()


@dataclass
class Home:
    """The job at home, and the one member."""

    server: ApiServer
    cluster: CachedCluster
    reconciler: Reconciler
    member: FakeMembers

    @property
    def job(self) -> Doc:
        return self.server.objects[RLJOB.path(LAB, JOB)]

    async def look(self) -> float | None:
        return (await self.reconciler.reconcile((LAB, JOB))).again_s

    def put(self, document: Doc) -> None:
        self.cluster.job_watches[""].store.put(self.server.put(RLJOB.path(LAB, JOB), document))

    def edit(self, *, metadata: Doc | None = None, **spec: Any) -> None:
        self.put(
            {**self.job, "metadata": self.job["metadata"] | (metadata or {}), "spec": {**self.job["spec"], **spec}}
        )

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(each for each in self.job["status"]["conditions"] if each["type"] == kind)
        return found["status"], found["reason"]


@asynccontextmanager
async def home_of(document: Doc) -> AsyncIterator[Home]:
    """A job that is in a member."""
    server, seconds = ApiServer(), iter(range(0, 10**6, 30))
    document["metadata"] |= {"finalizers": [names.FINALIZER]}
    async with server.client() as client:
        clock = OperatorClock(
            now=lambda: NOW + timedelta(seconds=next(seconds)), monotonic=lambda: float(next(seconds))
        )
        cluster, member = CachedCluster(client, changed=lambda *_: None), FakeMembers()
        reconciler = Reconciler(
            cluster=cluster,
            events=Events(client=client, clock=clock, instance="test"),
            settings=replace(SETTINGS, numbers_by_proxy=True),
            lives=Lives(),
            clock=clock,
            members=cast(Members, member),
        )
        made = Home(server=server, cluster=cluster, reconciler=reconciler, member=member)
        made.put(document)
        yield made


def sent(name: str, **parts: Any) -> Doc:
    """An object of pool `sim` as a member sends it."""
    labels = {
        names.LABEL_JOB: JOB,
        names.LABEL_JOB_UID: "u-job",
        names.LABEL_POOL: "sim",
        names.LABEL_ROLE: "generator",
    }
    return {"metadata": {"name": name, "namespace": "there", "uid": f"u-{name}", "labels": labels}, **parts}


def environment(stateful_set: Doc) -> dict[str, str]:
    """Of its generators."""
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}
