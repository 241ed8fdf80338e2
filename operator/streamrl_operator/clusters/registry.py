"""Which member clusters there are: follows RLClusters at home, keeps a `Member` for each, and writes their status.

    RLCluster ─ made, changed ─▶ Member.run, a task of its own ─▶ MemberState ─▶ status of the RLCluster
              └ deleted ─▶ our finalizer stays while a job's status names it ─▶ the task ends

Owns: the tasks of members, the finalizer of RLClusters, what a reconcile is told of a job's members (`view`). One that is not valid has no Member.
Waits for: the home API server; unblocked by its answer, the deadline of each request, or cancellation.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl import names
from streamrl.clusters import RLClusterSpec
from streamrl.errors import UserErrors
from streamrl.spec.parse import parse_document
from streamrl.status import Condition, RLClusterStatus
from streamrl_operator import apply
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.credentials import kubeconfig_of
from streamrl_operator.clusters.member import Member, MemberState, MemberWork
from streamrl_operator.kube.answers import KubeError
from streamrl_operator.kube.cache import CacheSync, Key, Reflector, Store, pause_s
from streamrl_operator.kube.client import Count
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import CLUSTER, NAMESPACE, RLJOB, TLS_ROUTE, Kind
from streamrl_operator.planning import conditions, job_status, pods
from streamrl_operator.planning.conditions import Aspect
from streamrl_operator.planning.values import MemberView, Object, stamp
from streamrl_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at all members, which are few: what changed is written."""
CONNECTED, AUTHORIZED = "Connected", "Authorized"
NO_ROUTES = f"its exposure is a gateway, and the home cluster has no TLSRoute ({TLS_ROUTE.api_version}): install Gateway API 1.5"
NOT_ENABLED = "this operator knows no member clusters: set clusters.enabled of the chart"


@dataclass(slots=True)
class _Kept:
    """One RLCluster."""

    spec: object
    """As stored."""
    member: Member | None
    invalid: str = ""
    is_leaving: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, kw_only=True)
class Members:
    """All member clusters."""

    home: CachedCluster
    queue: WorkQueue
    """Of jobs that are to be reconciled at home."""
    namespace: str
    """Of the operator, with the Secrets."""
    clock: OperatorClock
    count: Count = lambda *_: None
    origin: str = ""
    """UID of the home cluster; empty until it was asked for."""
    _store: Store = field(init=False)
    _sync: CacheSync = field(init=False)
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._store = Store(lambda *_: self._changed.set())
        self._sync = CacheSync(("",), (CLUSTER,), lambda *_: self._changed.set())

    # ---- What reconciles ask.

    @property
    def is_known(self) -> bool:
        """Whether all RLClusters were listed, and each has been looked at."""
        return self._is_ready and self._kept.keys() >= {name for _, name in self._store.jobs()}

    @property
    def _is_ready(self) -> bool:
        return bool(self.origin) and self._sync.is_whole("")

    def view(self, name: str, key: Key, *, uid: str, is_there: bool) -> MemberView:
        """What is known of a job in a member. `is_there`: it has been there before; no new ones come to a member that is being deleted."""
        kept = self._kept.get(name)
        member = None if kept is None else kept.member
        if kept is not None and kept.is_leaving and not is_there:
            return MemberView(cluster=name, unreachable=f"RLCluster {name} is being deleted")
        if member is not None and member.spec.exposure.gateway and not self.home.has(TLS_ROUTE):
            return MemberView(cluster=name, unreachable=NO_ROUTES)
        if member is None:
            why = kept.invalid if kept else "" if self.is_known else "the RLClusters are not listed yet"
            return MemberView(cluster=name, unreachable=why or f"there is no RLCluster {name}")
        namespace = member.spec.namespace_of(key[0]) or ""
        return MemberView(
            cluster=name,
            cluster_uid=member.state.uid,
            origin=self.origin,
            namespace=namespace,
            allowed_secrets=member.spec.allowed_secrets,
            allowed_claims=member.spec.allowed_claims,
            exposure=member.spec.exposure,
            trainers=member.spec.trainers,
            unreachable=member.unreachable(namespace) if namespace else f"it has no namespace for jobs of {key[0]}",
            is_clean=member.is_clean(key, uid),
            refused=member.refused(key),
            made_generation=member.made_generation(key, uid),
        )

    def objects(self, kind: Kind, name: str, key: Key, *, failed: bool = False) -> list[dict[str, Any]]:
        """Those of a job in a member, as they were known last. `failed`: as of `CachedCluster.of_job`."""
        kept = self._kept.get(name)
        return [] if kept is None or kept.member is None else kept.member.objects(kind, key, failed=failed)

    def known(self, kind: Kind, name: str, key: Key, of: str) -> dict[str, Any] | None:
        """One object of a job in a member."""
        kept = self._kept.get(name)
        return None if kept is None or kept.member is None else kept.member.known(kind, key, of)

    def reached(self, name: str, key: Key) -> tuple[CachedCluster, Key] | None:
        """A member's caches, and the job as they know it; None while nothing newer is known."""
        kept = self._kept.get(name)
        return None if kept is None or kept.member is None else kept.member.reached(key)

    def want(self, name: str, key: Key, work: MemberWork) -> None:
        """What is to be in a member of a job, from now on. It is done beside this, as soon as it can be."""
        kept = self._kept.get(name)
        if kept is not None and kept.member is not None:
            kept.member.want(key, work)

    def forget(self, key: Key) -> None:
        """The job is gone."""
        for kept in self._kept.values():
            if kept.member is not None:
                kept.member.forget(key)

    def connected(self) -> Mapping[str, float]:
        """By name, for metrics."""
        return {
            name: float(kept.member is not None and kept.member.state.connected) for name, kept in self._kept.items()
        }

    # ---- The tasks.

    async def run(self) -> None:
        """Until cancelled. Nothing of a member raises out of here."""
        reflector = Reflector(client=self.home.client, kind=CLUSTER, store=self._store, cache_sync=self._sync)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._learn_origin(), name="ask who we are")
            tasks.create_task(reflector.run(), name="watch rlclusters")
            while True:
                if self._is_ready:
                    await self._look(tasks)
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), LOOK_S)
                except TimeoutError:
                    continue

    async def _learn_origin(self) -> None:
        failures = 0
        while not self.origin:
            try:
                found = await self.home.client.get(NAMESPACE, namespace="", name="kube-system")
                self.origin = str(found["metadata"]["uid"])
                self._changed.set()
            except KubeError as error:
                failures += 1
                log.warning("home cluster's UID is not known", extra={"error": str(error)})
                await asyncio.sleep(pause_s(failures))

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        there = {name: raw for _, name in self._store.jobs() if (raw := self._store.get("", name)) is not None}
        for name in self._kept.keys() - there.keys():
            self._end(name)
        for name, raw in there.items():  # all of them before the first write, which may take its time
            kept = self._kept.get(name)
            if kept is None or kept.spec != raw.get("spec"):
                self._end(name)
                self._begin(tasks, name, raw)
            self._kept[name].is_leaving = pods.is_leaving(raw)
        for name, raw in there.items():
            try:
                await self._keep_status(self._kept[name], raw)
            except KubeError as error:
                log.warning("status of an RLCluster is not written", extra={"cluster": name, "error": str(error)})
            except Exception:
                # An error of ours about one member must not stop the others.
                log.exception("status of an RLCluster is not made", extra={"cluster": name})

    def _begin(self, tasks: asyncio.TaskGroup, name: str, raw: Mapping[str, Any]) -> None:
        given = raw.get("spec")
        try:
            spec = parse_document(given, model=RLClusterSpec, rule="must be a mapping")
        except UserErrors as error:
            self._kept[name] = _Kept(spec=given, member=None, invalid=f"RLCluster {name} is not valid: {error}")
            self._tell_jobs()
            return
        member = Member(
            name=name,
            spec=spec,
            origin=self.origin,
            kubeconfig=lambda: kubeconfig_of(spec.source, client=self.home.client, namespace=self.namespace),
            told=self.queue.add,
            tell_all=self._tell_jobs,
            is_gone=self._is_gone,
            clock=self.clock,
            count=self.count,
        )
        task = tasks.create_task(member.run(), name=f"member {name}")
        self._kept[name] = _Kept(spec=given, member=member, task=task)
        self._tell_jobs()

    def _end(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None and kept.task is not None:
            kept.task.cancel()
        if kept is not None:
            self._tell_jobs()

    def _tell_jobs(self) -> None:
        for key in self.home.jobs():
            self.queue.add(key)

    def _is_gone(self, key: Key, uid: str) -> bool:
        """Whether no job at home has this UID. Of a namespace that we do not watch nothing is known, or where a list is waited for."""
        if not {"", key[0]} & set(self.home.cache_sync.namespaces) or not self._is_listed(key[0]):
            return False
        raw = self.home.known(RLJOB, *key)
        return raw is None or raw["metadata"]["uid"] != uid

    def _is_listed(self, namespace: str) -> bool:
        """Whether all jobs of it are known."""
        return self.home.cache_sync.is_whole(namespace)

    # ---- RLClusters themselves.

    async def _keep_status(self, kept: _Kept, raw: dict[str, Any]) -> None:
        """Status and finalizer.

        Raises:
            KubeError: one was not written.
        """
        metadata, name = raw["metadata"], raw["metadata"]["name"]
        finalizers, jobs = metadata.get("finalizers") or [], []
        if pods.is_leaving(raw):
            jobs = self._jobs_in(name)
            if (
                not jobs
                and names.FINALIZER in finalizers
                and all(map(self._is_listed, self.home.cache_sync.namespaces))
            ):
                await self._set_finalizers(raw, [one for one in finalizers if one != names.FINALIZER])
                return
        elif names.FINALIZER not in finalizers:
            raw = await self._set_finalizers(raw, [*finalizers, names.FINALIZER])
        before = _read_status(raw)
        status = job_status.plain_status(_status(kept, raw, before, jobs=jobs, clock=self.clock))
        if apply.status_differs(status, raw.get("status") or {}):
            about = {
                "apiVersion": raw["apiVersion"],
                "kind": raw["kind"],
                "metadata": {"name": name, "uid": metadata["uid"]},
            }
            answer = await self.home.client.apply(
                CLUSTER, {**about, "status": status}, manager=names.FIELD_MANAGER, subresource="status"
            )
            self._store.put(answer, quietly=True)

    async def _set_finalizers(self, raw: Mapping[str, Any], finalizers: list[str]) -> dict[str, Any]:
        change = {"metadata": {"finalizers": finalizers, "resourceVersion": raw["metadata"]["resourceVersion"]}}
        answer = await self.home.client.merge(CLUSTER, namespace="", name=raw["metadata"]["name"], change=change)
        if not finalizers and answer["metadata"].get("deletionTimestamp"):
            self._store.remove(answer)
        else:
            self._store.put(answer, quietly=True)
        return answer

    def _jobs_in(self, name: str) -> list[str]:
        """Jobs whose status names the member."""
        found = (self.home.known(RLJOB, *key) for key in sorted(self.home.jobs()))
        return [
            f"{raw['metadata']['namespace']}/{raw['metadata']['name']}"
            for raw in found
            if raw is not None and any(one.name == name for one in job_status.read_job_status(raw).clusters)
        ]


def _read_status(raw: Object) -> RLClusterStatus:
    try:
        return RLClusterStatus.model_validate_json(json.dumps(raw.get("status") or {}))
    except ValueError:
        return RLClusterStatus()


def _status(
    kept: _Kept, raw: Object, before: RLClusterStatus, *, jobs: Sequence[str], clock: OperatorClock
) -> RLClusterStatus:
    connection = kept.member.state if kept.member else MemberState(reason="InvalidSpec", message=kept.invalid)
    message = connection.message
    if pods.is_leaving(raw):
        message = (
            f"it is being deleted and waits for {len(jobs)} jobs, the first is {jobs[0]}"
            if jobs
            else "it is being deleted"
        )
    generation = raw["metadata"].get("generation")
    aspects = [
        Aspect(type=CONNECTED, holds=connection.connected, reason=connection.reason, message=message),
        Aspect(
            type=AUTHORIZED,
            holds=connection.authorized,
            reason={True: "Authorized", False: "RightsMissing", None: "NotAsked"}[connection.authorized],
            message=f"lacking: {connection.lacking}" if connection.lacking else "",
        ),
    ]
    contact = None if connection.contact is None else stamp(connection.contact.replace(second=0))
    found: tuple[Condition, ...] = conditions.renewed(
        before.conditions, aspects, now=clock.now(), generation=generation
    )
    return RLClusterStatus(
        observed_generation=generation,
        conditions=found,
        cluster_uid=connection.uid or before.cluster_uid,
        last_contact_time=contact or before.last_contact_time,
    )
