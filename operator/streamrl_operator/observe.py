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
from streamrl.errors import UserErrors
from streamrl.spec import RLJob
from streamrl.spec.pod import DEFAULTS_NAME
from streamrl.spec.rljob import MaxCost
from streamrl_operator.autoscaler.values import ScalingState
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters import seen
from streamrl_operator.clusters.registry import Members
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
)
from streamrl_operator.planning import admission, defaults, pods
from streamrl_operator.planning.failures import is_rejected
from streamrl_operator.planning.job_status import calls, read_job_status
from streamrl_operator.planning.life import AUTO_RECONCILE_S
from streamrl_operator.planning.members import NOT_ALLOWED
from streamrl_operator.planning.objects.job_file import read_job
from streamrl_operator.planning.values import (
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
    address: str | None = None
    """Host and port where the numbers were read last; None: the API server's proxy."""
    rest: "Rest | None" = None
    """What the latest reconcile found, if there is nothing to do."""
    settled: object = None
    """Spec, wish and versions of all objects when a reconcile last found them in order: while they are the same, they are."""
    warnings: Sequence[str] | None = None
    """As of `Observed`."""
    certificates_at: datetime | None = None
    """When a certificate is due next; of `settled`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """A running job that needs nothing, while nothing but the time and its numbers changes."""

    until_s: float
    """Monotonic: latest time of the next reconcile."""
    calls: object
    """Of the numbers then."""
    max_cost: MaxCost | None


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
    elsewhere = seen.look(members, raw, job)
    if elsewhere.not_allowed:
        job, invalid, reason = None, str(UserErrors(elsewhere.not_allowed)), NOT_ALLOWED
    uid = raw["metadata"]["uid"]
    workers = [*_workers(cluster, key), *elsewhere.pods]
    told = _told(workers, uid=uid)
    return Observed(
        now=clock.now(),
        raw=raw,
        job=job,
        invalid=invalid,
        invalid_reason=reason,
        defaults=inherited,
        pools=_pools(cluster, key),
        sets={each["metadata"]["name"]: each for each in (*cluster.of_job(STATEFUL_SET, key), *elsewhere.sets)},
        pods=workers,
        rejected=_rejected([*_workers(cluster, key, failed=True), *elsewhere.failed_pods], uid=uid),
        exposed=elsewhere.exposed if trainer_cluster(raw) else cluster.known(SERVICE, key[0], names.exposed(key[1])),
        members=elsewhere.views,
        resolved=_resolved(cluster, key, uid=uid),
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


def _rejected(found: Sequence[dict[str, Any]], *, uid: str) -> list[dict[str, Any]]:
    """Return the pods of this job that kubelets rejected, and that are gone by now."""
    return [pod for pod in found if pods.label(pod, names.LABEL_JOB_UID) == uid and is_rejected(pod)]


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
    return replace(observed, looked_up=found, code=await seen.code(members, cluster, observed))


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
    place, schedulers = seen.scheduler_place(members, cluster, raw), []
    if place is not None:
        schedulers = _schedulers([pod for pod in _workers(*place) if seen.is_readable(pod, POD)])
    if place is None or not schedulers:
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
    by_proxy = bool(trainer_cluster(raw)) or settings.numbers_by_proxy
    memory.address = None if by_proxy else _address(*place)
    if not by_proxy and memory.address is None:
        page, error = None, f"Service {names.scheduler(place[1][1])} has no address"
    else:
        async with aside():
            page, error = await _page(*place, address=memory.address)
    memory.numbers, memory.signals_unreachable = page, None
    if page is None and any(status.get("ready") for status in schedulers):
        since = clock.now() if before is None else before.since
        memory.signals_unreachable = SignalsUnreachable(since=since, error=error)


async def read_at_rest(
    cluster: CachedCluster,
    key: Key,
    *,
    memory: Memory,
    clock: OperatorClock,
    aside: Callable[[], AbstractAsyncContextManager[None]],
) -> float | None:
    """Read the numbers of a job at rest, at the address of the last reading, and nothing else of it.

    Return how long it will rest; None: it needs a reconcile.
    """
    rest, now_s = memory.rest, clock.monotonic()
    if rest is None or now_s >= rest.until_s:
        return None
    async with aside():
        page, _ = await _page(cluster, key, address=memory.address)
    if page is None:
        return None
    memory.numbers, memory.asked_s = page, now_s
    left_s = rest.until_s - clock.monotonic()
    return left_s if left_s > 0 and calls(answers.read_page(page), max_cost=rest.max_cost) == rest.calls else None


async def _page(cluster: CachedCluster, key: Key, *, address: str | None) -> tuple[bytes | None, str]:
    """Return the page, or why it cannot be read. `address`: as of `Memory`."""
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
