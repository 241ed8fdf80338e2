"""What a reconcile sees of a job in member clusters, and what it fetches for one. Without members nothing is there, and pools that name one wait.

A member has no say in anything but generators, and in the trainer only where that is. In which cluster an object is, its cache says.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamrl import names
from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl_operator.clusters.registry import NOT_ENABLED, Members
from streamrl_operator.kube.answers import NotFoundError
from streamrl_operator.kube.cache import Key
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import CONFIG_MAP, POD, SERVICE, STATEFUL_SET, Kind
from streamrl_operator.planning import pods, replicas
from streamrl_operator.planning.failures import failures_of_pod
from streamrl_operator.planning.job_status import read_job_status
from streamrl_operator.planning.members import clusters_of, is_another, refused, replaced
from streamrl_operator.planning.values import MemberView, Object, Observed, trainer_cluster

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenInMembers:
    """What is known of a job in all members that it has to do with."""

    views: Mapping[str, MemberView]
    not_allowed: list[UserError]
    """Why the trainer or pools may not be where they say."""
    sets: Sequence[dict[str, Any]]
    pods: Sequence[dict[str, Any]]
    failed_pods: Sequence[dict[str, Any]]
    exposed: dict[str, Any] | None
    """The Service by which a scheduler in a member is reached from other clusters."""


def look(members: Members | None, raw: Object, job: RLJob | None) -> SeenInMembers:
    """Return what is known of the job in its members."""
    key, at = _key(raw), trainer_cluster(raw)
    views = _views(members, raw, job)

    def found(kind: Kind, *, failed: bool = False) -> list[dict[str, Any]]:
        return [] if members is None else _in_members(members, kind, raw, job, views=views, failed=failed)

    return SeenInMembers(
        views=views,
        not_allowed=[] if job is None else _not_allowed(job, raw, views=views),
        sets=found(STATEFUL_SET),
        pods=found(POD),
        failed_pods=found(POD, failed=True),
        exposed=members.known(SERVICE, at, key, names.exposed(key[1])) if at and members else None,
    )


def scheduler_place(members: Members | None, home: CachedCluster, raw: Object) -> tuple[CachedCluster, Key] | None:
    """Return the caches of the cluster with the job's scheduler, and the job as they know it; None while nothing newer is known."""
    at = trainer_cluster(raw)
    if not at:
        return home, _key(raw)
    return members.reached(at, _key(raw)) if members else None


def _key(raw: Object) -> Key:
    return raw["metadata"]["namespace"], raw["metadata"]["name"]


def _views(members: Members | None, raw: Object, job: RLJob | None) -> dict[str, MemberView]:
    """Of every member that the job's trainer or pools name, or that it has been in."""
    entries = read_job_status(raw).clusters
    there, at = {entry.name for entry in entries}, trainer_cluster(raw)
    named = there | ({at} if at else set()) | set(clusters_of(job) if job else ())
    key, uid = _key(raw), raw["metadata"]["uid"]
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


def _in_members(
    members: Members,
    kind: Kind,
    raw: Object,
    job: RLJob | None,
    *,
    views: Mapping[str, MemberView],
    failed: bool,
) -> list[dict[str, Any]]:
    """Pods of the job's generators and trainer, or their StatefulSets, in all members, as they were known last.

    Of a pool that is elsewhere by now, only pods that are known to be there still count. `failed`: as of `CachedCluster.of_job`.
    """
    found: list[dict[str, Any]] = []
    key, at = _key(raw), trainer_cluster(raw)
    pools = {pool.name: pool.cluster_name for pool in job.spec.generators} if job else {}
    for name, view in views.items():
        for obj in members.objects(kind, name, key, failed=failed):
            pool, is_trainer = pods.label(obj, names.LABEL_POOL), _is_of_trainer(obj, kind, job_name=key[1])
            has_moved = job is not None and not is_trainer and pools.get(pool) != name
            stays = kind is POD and not view.unreachable
            is_whole = name == at if is_trainer else _is_of_generators(obj, kind, job_name=key[1], pool=pool)
            is_ours = is_whole and is_readable(obj, kind)
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


def is_readable(obj: Object, kind: Kind) -> bool:
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


async def code(members: Members | None, home: CachedCluster, observed: Observed) -> Object | None:
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
        return await home.client.get(CONFIG_MAP, namespace=observed.key[0], name=job.spec.task.code.config_map_name)
    return {}
