"""Puts together what is known of a job: from the caches, and the scheduler's numbers.

Owns: when the numbers are asked for: of jobs with a running scheduler, at most once in `resync_s`, or as often as pools that we scale are
looked at; when a namespace's defaults are. Decides nothing.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from streamrl import keys, names
from streamrl.errors import UserError, UserErrors
from streamrl.spec import RLJob
from streamrl.spec.pod import DEFAULTS_NAME
from streamrl_operator.autoscaler.values import ScalingState
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.registry import NOT_ENABLED, Members
from streamrl_operator.kube import answers
from streamrl_operator.kube.answers import KubeError, NotFoundError
from streamrl_operator.kube.cache import Key
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import (
    CLUSTER_KINDS,
    CONFIG_MAP,
    GENERATOR_POOL,
    JOB_DEFAULTS,
    POD,
    RLJOB,
    SERVICE,
    STATEFUL_SET,
    WORKLOAD,
    Kind,
)
from streamrl_operator.planning import admission, defaults, pods, replicas
from streamrl_operator.planning.failures import failures_of_pod, is_rejected
from streamrl_operator.planning.job_status import read_job_status
from streamrl_operator.planning.life import AUTO_RECONCILE_S
from streamrl_operator.planning.members import NOT_ALLOWED, clusters_of, is_another, refused, replaced
from streamrl_operator.planning.objects.job_file import read_job
from streamrl_operator.planning.values import (
    MemberView,
    Object,
    Observed,
    PlanningSettings,
    SignalsUnreachable,
    seconds_since,
    trainer_cluster,
)

log = logging.getLogger(__name__)

NUMBERS_TIMEOUT_S = 3.0
DEFAULTS_KEPT_S = 10.0
"""The defaults of a namespace are read again after so long, as long as jobs there wait."""
_SOON_S = 1.0
"""A job whose next reconcile is this close to the next reading is read now: two reconciles are not needed."""


@dataclass(slots=True, kw_only=True)
class Memory:
    """What is kept of a job between two reconciles. All of it can be lost: it only saves requests and speeds up scaling."""

    uid: str
    """Of the job; another one of the same name begins anew."""
    generation: object = None
    """Of the job, when it was looked at last."""
    generation_s: float = 0.0
    """Monotonic: when that generation was first looked at."""
    numbers: bytes | None = None
    """The page as it came (`client.read_page`)."""
    signals_unreachable: SignalsUnreachable | None = None
    """Since when they cannot be read."""
    asked_s: float | None = None
    """Monotonic: when the numbers were last asked for."""
    unreachable: bool = False
    """Whether that is told."""
    scaling: Mapping[str, ScalingState] = field(default_factory=dict)
    looked_up: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """Flavours and priorities, for as long as they are needed."""
    settled: object = None
    """Spec, wish and versions of all objects when a reconcile last found them in order: while they are the same, they are."""
    warnings: Sequence[str] | None = None
    """As of `Observed`."""
    certificates_at: datetime | None = None
    """When a certificate is due next; of `settled`."""


def validated(raw: Object) -> tuple[RLJob | None, str]:
    """The job, or one line for each mistake."""
    metadata = {key: raw["metadata"][key] for key in ("name", "namespace") if key in raw["metadata"]}
    document = {key: raw.get(key) for key in ("apiVersion", "kind", "spec")} | {"metadata": metadata}
    try:
        return read_job(document), ""
    except UserErrors as error:
        return None, str(error)


@dataclass(slots=True)
class NamespaceDefaults:
    """The RLJobDefaults of each namespace as they were read last: jobs that wait are looked at often, and have the same."""

    _read: dict[str, tuple[float, Object]] = field(default_factory=dict)
    """Namespace -> (monotonic: when it was asked for, what there was)."""

    async def inherited(
        self, cluster: CachedCluster, raw: Object, *, memory: Memory, clock: OperatorClock, settings: PlanningSettings
    ) -> str:
        """What the job took when it began; of one that has not, what it would take now, as of `DEFAULTS_KEPT_S` ago at the earliest. What
        was read before somebody made or changed the job does not do: whoever changes the defaults first, and then that, means the new ones.

        Raises:
            KubeError: the namespace's defaults cannot be read.
        """
        namespace, name, now_s = raw["metadata"]["namespace"], raw["metadata"]["name"], clock.monotonic()
        if memory.generation != raw["metadata"].get("generation"):
            memory.generation, memory.generation_s = raw["metadata"].get("generation"), now_s
        kept = _resolved(cluster, (namespace, name), uid=raw["metadata"]["uid"])
        if keys.FILE_IMAGES in kept or pods.is_leaving(raw) or (raw.get("status") or {}).get("completionTime"):
            return kept.get(keys.FILE_DEFAULTS, "")
        asked_s, found = self._read.get(namespace, (float("-inf"), {}))
        if asked_s < max(memory.generation_s, now_s - DEFAULTS_KEPT_S):
            try:
                found = await cluster.client.get(JOB_DEFAULTS, namespace=namespace, name=DEFAULTS_NAME)
            except NotFoundError:
                found = {}
            self._read[namespace] = now_s, found
        own = f"{JOB_DEFAULTS.kind} {namespace}/{DEFAULTS_NAME}"
        return defaults.write_layers({defaults.OF_CLUSTER: settings.job_defaults, own: found.get("spec")})


def observe(
    cluster: CachedCluster,
    raw: Object,
    *,
    memory: Memory,
    clock: OperatorClock,
    settings: PlanningSettings,
    inherited: str = "",
    members: Members | None = None,
) -> Observed:
    """Everything of the job at this moment, with the numbers that were read last. `inherited`: as of `NamespaceDefaults`."""
    key: Key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
    job, invalid = validated(raw)
    reason = "InvalidSpec"
    if job is not None:
        try:
            job, _ = defaults.inherit(job, defaults.read_layers(inherited))
        except UserErrors as error:
            job, invalid, reason = None, str(error), "InvalidDefaults"
    if job is not None and (problems := defaults.refused_here(job, namespace=key[0], settings=settings)):
        job, invalid = None, str(UserErrors(problems))
    views = _views(raw, job, members=members)
    at = trainer_cluster(raw)
    if job is not None and (problems := _not_allowed(job, raw, views=views)):
        job, invalid, reason = None, str(UserErrors(problems)), NOT_ALLOWED
    workers = _workers(cluster, key)
    far_sets, far_pods = (_in_members(kind, raw, job, views=views, members=members) for kind in (STATEFUL_SET, POD))
    told = _told([*workers, *far_pods], uid=raw["metadata"]["uid"])
    exposed = names.exposed(key[1])
    return Observed(
        now=clock.now(),
        raw=raw,
        job=job,
        invalid=invalid,
        invalid_reason=reason,
        defaults=inherited,
        pools=_pools(cluster, key),
        sets={each["metadata"]["name"]: each for each in (*cluster.of_job(STATEFUL_SET, key), *far_sets)},
        pods=[*workers, *far_pods],
        rejected=_rejected(cluster, raw, job, views=views, members=members),
        exposed=members.known(SERVICE, at, key, exposed) if at and members else cluster.known(SERVICE, key[0], exposed),
        members=views,
        resolved=_resolved(cluster, key, uid=raw["metadata"]["uid"]),
        numbers=told or (None if memory.numbers is None else answers.read_page(memory.numbers)),
        signals_unreachable=memory.signals_unreachable,
        warnings=memory.warnings,
        older_stuck=_older_stuck(cluster, raw, now=clock.now()),
        workloads={each["metadata"]["name"]: each for each in cluster.of_job(WORKLOAD, key)},
        kueue=cluster.has(WORKLOAD),
        scaling=memory.scaling,
        at_s=memory.asked_s if memory.numbers is not None and memory.asked_s is not None else clock.monotonic(),
    )


def _older_stuck(cluster: CachedCluster, raw: Object, *, now: datetime) -> str:
    """Return the oldest of the older jobs that cannot start either; empty: there is none, or this one's deadline has not come."""
    begun = read_job_status(raw).start
    waited_s = seconds_since(begun.stuck_since if begun else None, now=now)
    deadline_s = (raw.get("spec") or {}).get("startDeadlineSeconds")
    if waited_s is None or not isinstance(deadline_s, int) or waited_s < deadline_s:
        return ""
    others = (cluster.known(RLJOB, *key) for key in cluster.jobs())
    stuck = [one for one in others if one is not None and _is_stuck(one)]
    older = sorted((one for one in stuck if _age(one) < _age(raw)), key=_age)
    return "/".join((older[0]["metadata"]["namespace"], older[0]["metadata"]["name"])) if older else ""


def _is_stuck(raw: Object) -> bool:
    begun = read_job_status(raw).start
    return begun is not None and begun.stuck_since is not None


def _age(raw: Object) -> tuple[str, str]:
    return str(raw["metadata"].get("creationTimestamp") or ""), str(raw["metadata"]["uid"])


def _views(raw: Object, job: RLJob | None, *, members: Members | None) -> dict[str, MemberView]:
    """Of every member that the job's trainer or pools name, or that it has been in."""
    entries = read_job_status(raw).clusters
    there, at = {entry.name for entry in entries}, trainer_cluster(raw)
    named = there | ({at} if at else set()) | set(clusters_of(job) if job else ())
    key, uid = (raw["metadata"]["namespace"], raw["metadata"]["name"]), raw["metadata"]["uid"]
    if members is None:
        return {name: MemberView(cluster=name, unreachable=NOT_ENABLED) for name in sorted(named)}
    views = {name: members.view(name, key, uid=uid, is_there=name in there) for name in sorted(named)}
    for entry in entries:
        if views[entry.name].namespace not in ("", entry.namespace):
            why = f"the job is in namespace {entry.namespace} there, which is not its place any more"
            views[entry.name] = replace(views[entry.name], unreachable=why)
        if entry.name == at and is_another(entry, views[at]) and not pods.is_leaving(raw):
            views[at] = replace(views[at], unreachable="it is not the cluster any more that the trainer is in")
    return views


def _not_allowed(job: RLJob, raw: Object, *, views: Mapping[str, MemberView]) -> list[UserError]:
    queue = (raw["metadata"].get("labels") or {}).get(names.LABEL_QUEUE, "")
    return replaced(raw, views) or refused(job, namespace=raw["metadata"]["namespace"], queue=queue, members=views)


def _rejected(
    cluster: CachedCluster,
    raw: Object,
    job: RLJob | None,
    *,
    views: Mapping[str, MemberView],
    members: Members | None,
) -> list[dict[str, Any]]:
    """Return the pods of this job that kubelets rejected, and that are gone by now."""
    far = _in_members(POD, raw, job, views=views, members=members, failed=True)
    key, uid = (raw["metadata"]["namespace"], raw["metadata"]["name"]), raw["metadata"]["uid"]
    found = [*_workers(cluster, key, failed=True), *far]
    return [pod for pod in found if pods.label(pod, names.LABEL_JOB_UID) == uid and is_rejected(pod)]


def _in_members(
    kind: Kind,
    raw: Object,
    job: RLJob | None,
    *,
    views: Mapping[str, MemberView],
    members: Members | None,
    failed: bool = False,
) -> list[dict[str, Any]]:
    """Pods of the job's generators and trainer, or their StatefulSets, in all members that it has to do with, as they were known last.

    A member has no say in anything else, and in the trainer only where that is; in which cluster an object is, its cache says. Of a pool
    that is elsewhere by now, only pods that are known to be there still count. `failed`: as of `CachedCluster.of_job`.
    """
    found: list[dict[str, Any]] = []
    key, at = (raw["metadata"]["namespace"], raw["metadata"]["name"]), trainer_cluster(raw)
    pools = {pool.name: pool.cluster_name for pool in job.spec.generators} if job else {}
    if members is None:
        return found
    for name, view in views.items():
        for obj in members.objects(kind, name, key, failed=failed):
            pool, is_trainer = pods.label(obj, names.LABEL_POOL), _is_of_trainer(obj, kind, job_name=key[1])
            has_moved = job is not None and not is_trainer and pools.get(pool) != name
            stays = kind is POD and not view.unreachable
            is_whole = name == at if is_trainer else _is_of_generators(obj, kind, job_name=key[1], pool=pool)
            is_ours = is_whole and _is_readable(obj, kind)
            if is_ours and (stays or not has_moved):
                obj["metadata"]["labels"] |= {names.LABEL_CLUSTER: name}
                found.append(obj)
    return found


def _is_of_generators(obj: Object, kind: Kind, *, job_name: str, pool: str) -> bool:
    if not pool:
        return False
    if kind is POD:
        return pods.is_generator(obj) and not pods.is_foreign(obj)
    return bool(obj["metadata"]["name"] == names.pool(job_name, pool))


def _is_of_trainer(obj: Object, kind: Kind, *, job_name: str) -> bool:
    if kind is POD:
        return pods.trains(obj) and not pods.is_foreign(obj)
    return obj["metadata"]["name"] in (names.trainer(job_name), names.trainer_workers(job_name))


def _is_readable(obj: Object, kind: Kind) -> bool:
    """Whether all that is asked of it can be asked: a member may send anything, and it must not stop its job."""
    try:
        if kind is POD:
            pods.waiting_reason(obj)
            failures_of_pod(obj)
        else:
            pods.asked(obj)
            replicas.newest_revision(obj)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        extra = {"object": str(obj["metadata"]["name"]), "error": type(error).__name__}
        log.warning("object of a member cannot be read", extra=extra)
        return False
    return True


async def look_up(
    cluster: CachedCluster, observed: Observed, *, memory: Memory, members: Members | None = None
) -> Observed:
    """With what has no namespace and is needed of it, asked for once, for as long as it is needed; and with the user's modules.

    Raises:
        KubeError: a request failed.
    """
    found: dict[tuple[str, str], Object] = {}
    for kind, name in admission.lookups(observed):
        known = memory.looked_up.get((kind, name))
        with contextlib.suppress(NotFoundError):
            found[kind, name] = known or await cluster.client.get(CLUSTER_KINDS[kind], namespace="", name=name)
    memory.looked_up = found
    return replace(observed, looked_up=found, code=await _code(cluster, observed, members=members))


async def _code(cluster: CachedCluster, observed: Observed, *, members: Members | None) -> Object | None:
    """For a trainer in a member: as its copy is there, or from home while there certainly is none. So it stays as it was when the job began.

    Empty: there is none at home either. None: it is not needed, or nobody knows whether the copy is there.
    """
    at, job = trainer_cluster(observed.raw), observed.job
    if not at or job is None or job.spec.task.code is None or members is None or pods.is_leaving(observed.raw):
        return None
    copy = members.known(CONFIG_MAP, at, observed.key, names.code(observed.name))
    if copy is not None and pods.label(copy, names.LABEL_JOB_UID) == observed.metadata["uid"]:
        return copy
    if members.view(at, observed.key, uid=observed.metadata["uid"], is_there=True).unreachable:
        return None
    with contextlib.suppress(NotFoundError):
        return await cluster.client.get(CONFIG_MAP, namespace=observed.key[0], name=job.spec.task.code.config_map_name)
    return {}


def _resolved(cluster: CachedCluster, key: Key, *, uid: str) -> Mapping[str, str]:
    """Not of an earlier job of this name."""
    found = cluster.known(CONFIG_MAP, key[0], names.resolved(key[1])) or {"metadata": {}}
    is_its_own = (found["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID) == uid
    return found.get("data") or {} if is_its_own else {}


def _told(workers: Sequence[Object], *, uid: str) -> Mapping[str, Any] | None:
    """What a scheduler's container left when the run ended: seen with the pod, whoever may be reached. Not of an earlier job of this name."""
    mine = (pod for pod in workers if pods.label(pod, names.LABEL_JOB_UID) == uid)
    return next((page for pod in mine if (page := pods.last_word(pod)) is not None), None)


def _workers(cluster: CachedCluster, key: Key, *, failed: bool = False) -> list[dict[str, Any]]:
    """Without what somebody runs beside the job under its label: that would count as a failing trainer."""
    found = cluster.of_job(POD, key, failed=failed)
    return [pod for pod in found if not pods.is_foreign(pod) and (pods.trains(pod) or pods.is_pooled(pod))]


def _pools(cluster: CachedCluster, key: Key) -> dict[str, Object]:
    """By name, without what somebody has made under the job's label and the name of one of its pools."""
    found = ((str(pool["spec"]["poolName"]), pool) for pool in cluster.of_job(GENERATOR_POOL, key))
    return {name: pool for name, pool in found if pool["metadata"]["name"] == names.pool(key[1], name)}


def _schedulers(found: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that may answer: the trainer's pod has one as a sidecar, which starts before the trainer is ready."""
    return [
        status
        for pod in found
        if pods.is_trainer(pod)
        for status in pods.containers(pod)
        if status.get("name") == names.CONTAINER_SCHEDULER and "running" in (status.get("state") or {})
    ]


async def refresh(
    cluster: CachedCluster,
    raw: Object,
    *,
    memory: Memory,
    clock: OperatorClock,
    settings: PlanningSettings,
    aside: Callable[[], AbstractAsyncContextManager[None]],
    members: Members | None = None,
) -> None:
    """Ask for the numbers, if a scheduler runs and it is time: in a member by its API server's proxy. `aside` is entered for the wait."""
    key: Key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
    at, schedulers = trainer_cluster(raw), []
    reached = (members.reached(at, key) if members else None) if at else (cluster, key)
    if reached is not None:
        cluster, key = reached
        schedulers = _schedulers([pod for pod in _workers(cluster, key) if _is_readable(pod, POD)])
    if not schedulers:
        memory.numbers, memory.asked_s, memory.signals_unreachable = None, None, None
        return
    since_s = float("inf") if memory.asked_s is None else clock.monotonic() - memory.asked_s
    # By the document as it is: of a job that is refused the numbers are asked for more often, and nothing else follows.
    pools = (raw.get("spec") or {}).get("generators") or ()
    is_scaled_by_us = any((pool.get("scaling") or {}).get("auto") is not None for pool in pools)
    every_s = min(settings.resync_s, AUTO_RECONCILE_S) if is_scaled_by_us else settings.resync_s
    if since_s < every_s - min(_SOON_S, every_s / 10):
        return
    memory.asked_s, before = clock.monotonic(), memory.signals_unreachable
    async with aside():
        page, error = await _page(cluster, key, by_proxy=bool(at) or settings.numbers_by_proxy)
    memory.numbers, memory.signals_unreachable = page, None
    if page is None and any(status.get("ready") for status in schedulers):
        since = clock.now() if before is None else before.since
        memory.signals_unreachable = SignalsUnreachable(since=since, error=error)


async def _page(cluster: CachedCluster, key: Key, *, by_proxy: bool) -> tuple[bytes | None, str]:
    """The page, or why it is not to be had."""
    address = None if by_proxy else _address(cluster, key)
    if not by_proxy and address is None:
        return None, f"Service {names.scheduler(key[1])} has no address"
    try:
        return await cluster.client.read_page(
            namespace=key[0],
            service=names.scheduler(key[1]),
            port=names.PORT_NAME_SIGNALS,
            page="numbers",
            timeout_s=NUMBERS_TIMEOUT_S,
            address=address,
        ), ""
    except KubeError as error:
        log.info("no numbers", extra={"job": key[1], "namespace": key[0], "error": str(error)})
        return None, str(error)


def _address(cluster: CachedCluster, key: Key) -> str | None:
    """Of the signals port, at the job's own Service: no name is asked for, so nobody else can answer to it."""
    found = cluster.known(SERVICE, key[0], names.scheduler(key[1]))
    host = ((found or {}).get("spec") or {}).get("clusterIP")
    if not host or host == "None":
        return None
    return f"[{host}]:{names.PORT_SIGNALS}" if ":" in host else f"{host}:{names.PORT_SIGNALS}"
