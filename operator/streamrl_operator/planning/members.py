"""Member clusters in a job's life: what is not allowed there, what its status says of them, what its deletion waits for. Pure.

    stored status.clusters ──────┐
    trainer, pools that name one ┴─▶ status.clusters ── entry gone: nothing of the job is there, or it is another cluster now
                                            └─▶ condition ClusterUnreachable, while nothing newer is known of one

An entry is written before anything is written there, and is the only memory of where the job has been.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamrl import names
from streamrl.clusters import Exposure, RLClusterSpec
from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl.spec.base import minimal
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.references import references
from streamrl.spec.training import Trainer
from streamrl.status import ClusterStatus, RLJobStatus
from streamrl_operator.planning import conditions, job_status, pods
from streamrl_operator.planning.conditions import CLUSTER_UNREACHABLE, SUSPENDED, Aspect
from streamrl_operator.planning.values import MemberView, Object, Observed, trainer_cluster

NOT_ALLOWED = "ClusterNotAllowed"
TRAINER_ROLES = ("scheduler", "trainer")
"""Roles of the leaves in the trainer's pods."""


def clusters_of(job: RLJob) -> list[str]:
    """Members that the job is in: its trainer, or pools."""
    trainer = job.spec.trainer.cluster_name
    return sorted({*pool_clusters(job), *([trainer] if trainer else [])})


def pool_clusters(job: RLJob) -> list[str]:
    """Members that pools of the job are in."""
    return sorted({pool.cluster_name for pool in job.spec.generators if pool.cluster_name})


def names_member(raw: Object) -> bool:
    """Whether the job is, or was, in a member, by the document as it is."""
    return bool(clusters_by_pool(raw) or trainer_cluster(raw) or (raw.get("status") or {}).get("clusters"))


def leaves_in(job: RLJob, cluster: str) -> dict[str, str]:
    """Leaves that a member has a copy of: role -> what its pods there call it. The CA's key stays at home."""
    found = {names.generator_role(cluster): "generator"} if cluster in pool_clusters(job) else {}
    return found | ({role: role for role in TRAINER_ROLES} if job.spec.trainer.cluster_name == cluster else {})


def exposures(job: RLJob, members: Mapping[str, MemberView] | Mapping[str, RLClusterSpec]) -> dict[str, Exposure]:
    """Cluster with generators apart from the trainer (empty: home) -> how they reach the scheduler, where that is known."""
    at = job.spec.trainer.cluster_name
    apart = {pool.cluster_name or "" for pool in job.spec.generators if pool.cluster_name != at}
    if at is None:
        found = {name: members[name].exposure for name in apart if name in members}
    else:
        trainers = members[at].trainers if at in members else None
        found = dict.fromkeys(apart, None if trainers is None else trainers.exposure)
    return {name: exposure for name, exposure in sorted(found.items()) if exposure is not None}


def clusters_by_pool(raw: Object) -> dict[str, str]:
    """Pool -> the member that its pods are to be in, by the document as it is; of pools at home nothing."""
    pools = (raw.get("spec") or {}).get("generators") or ()
    return {str(pool.get("name")): str(pool["clusterName"]) for pool in pools if pool.get("clusterName")}


def refused(job: RLJob, *, namespace: str, queue: str, members: Mapping[str, MemberView]) -> list[UserError]:
    """Why trainer or pools of the job may not be where they say; nothing: they may."""
    trainer, generators = job.spec.trainer, job.spec.generators
    problems = _refused_part("spec.trainer", trainer, namespace=namespace, queue=queue, members=members)
    if trainer.cluster_name is not None and not problems:
        problems += _refused_trainer(job, members[trainer.cluster_name])
    for number, pool in enumerate(generators):
        problems += _refused_part(f"spec.generators[{number}]", pool, namespace=namespace, queue=queue, members=members)
    return problems


def replaced(raw: Object, members: Mapping[str, MemberView]) -> list[UserError]:
    """Why the trainer may not go where its member's name leads: it is in another cluster, with its journal. Nothing: it may."""
    at, entries = trainer_cluster(raw), job_status.read_job_status(raw).clusters
    began = [one.cluster_uid for one in entries if one.name == at and at in members and is_another(one, members[at])]
    rule = f"must name the cluster that the job began in ({''.join(began)}), and names another one now"
    fix = f"lead RLCluster {at} to the former cluster again, or make a new job"
    return [UserError(field="spec.trainer.clusterName", rule=rule, got=at, fix=fix)] if began else []


def _refused_part(
    field: str, part: Trainer | GeneratorPool, *, namespace: str, queue: str, members: Mapping[str, MemberView]
) -> list[UserError]:
    if part.cluster_name is None:
        return []
    member, fix = members.get(part.cluster_name), ""
    if member is None or member.exposure is None:
        is_told = member is not None and member.unreachable
        rule = member.unreachable if member is not None and is_told else "must name an RLCluster that is there"
    elif not member.namespace:
        rule = f"must be a cluster that jobs of namespace {namespace} may use"
        fix = "ask its administrator to map the namespace (RLCluster, spec.namespaces)"
    elif queue:
        rule = f"must be absent in a job with a queue ({queue}): its quota is of the home cluster"
    else:
        return list(_named_objects(f"{field}.pod", minimal(part.pod), member=member))
    return [UserError(field=f"{field}.clusterName", rule=rule, got=part.cluster_name, fix=fix)]


def _refused_trainer(job: RLJob, member: MemberView) -> Iterator[UserError]:
    """What a trainer needs of a member, beside what pools need."""
    ask, others = "ask its administrator for it (RLCluster, spec.trainers", job.spec.other_clusters
    rule = fix = ""
    if member.trainers is None:
        rule, fix = "must be a cluster that takes trainers", f"{ask})"
    elif others and member.trainers.exposure is None:
        rule = f"must be a cluster whose schedulers generators in {', '.join(others)} can reach"
        fix = f"{ask}.exposure), or have all pools in {member.cluster}"
    elif names.HOME in pool_clusters(job):
        rule = f"must be absent with a pool in an RLCluster called {names.HOME}, as the job's own cluster is"
    if rule:
        yield UserError(field="spec.trainer.clusterName", rule=rule, got=member.cluster, fix=fix)
    checkpoints = job.spec.storage.checkpoints
    part = "resumeFrom" if checkpoints.resume_from else "weightsFrom" if checkpoints.weights_from else "claimName"
    if checkpoints.given_claim:  # it is one of the member's
        volume = {"claimName": checkpoints.given_claim}
        yield from _named_objects(f"spec.storage.checkpoints.{part}", volume, member=member)


def _named_objects(field: str, pod: object, *, member: MemberView) -> Iterator[UserError]:
    """Secrets and claims of the member that a pod names and that no administrator has allowed."""
    allowed = {"Secret": member.allowed_secrets, "claim": member.allowed_claims}
    fields = {"Secret": "allowedSecrets", "claim": "allowedClaims"}
    for kind, name in dict.fromkeys(references(pod)):
        if name not in allowed[kind]:
            rule = f"names a {kind} of cluster {member.cluster} that pods there may not use"
            fix = f"ask its administrator to list it (RLCluster, spec.{fields[kind]})"
            yield UserError(field=field, rule=rule, got=name, fix=fix)


def needed(observed: Observed) -> dict[str, MemberView]:
    """Members that the job is to be in, by name; of a job that is not valid or is being deleted none."""
    if observed.job is None or pods.is_leaving(observed.raw):
        return {}
    return {name: observed.members[name] for name in clusters_of(observed.job)}


def clusters(observed: Observed, before: RLJobStatus) -> tuple[ClusterStatus, ...]:
    """The entries of the status. That of the trainer's cluster stays for the job's life: a trainer begins in no second one."""
    wanted, found = needed(observed), {}
    at = "" if pods.is_leaving(observed.raw) else trainer_cluster(observed.raw)
    for entry in before.clusters:
        if entry.name in wanted or entry.name == at or not is_done(entry, observed):
            found[entry.name] = entry
    for name, member in wanted.items():
        kept = found.get(name)
        if kept is None or (name != at and is_another(kept, member)):
            found[name] = ClusterStatus(name=name, cluster_uid=member.cluster_uid, namespace=member.namespace)
    return tuple(_known(entry, observed.members.get(entry.name)) for entry in found.values())


def _known(entry: ClusterStatus, member: MemberView | None) -> ClusterStatus:
    """With the cluster's UID, where the entry was written before it was known."""
    if entry.cluster_uid or member is None or not member.cluster_uid:
        return entry
    return entry.model_copy(update={"cluster_uid": member.cluster_uid})


def is_done(entry: ClusterStatus, observed: Observed) -> bool:
    """Whether nothing of the job is left there that anybody could delete, or it is given up."""
    member = observed.members.get(entry.name)
    if entry.name in _abandoned(observed) or not entry.cluster_uid:  # nothing is written before its UID is known
        return True
    return member is not None and not member.unreachable and (member.is_clean or is_another(entry, member))


def is_another(entry: ClusterStatus, member: MemberView) -> bool:
    """Whether its name leads to another cluster than that of the entry."""
    return bool(entry.cluster_uid and member.cluster_uid and entry.cluster_uid != member.cluster_uid)


def _abandoned(observed: Observed) -> set[str]:
    given = (observed.metadata.get("annotations") or {}).get(names.ANNOTATION_ABANDON, "")
    return {name.strip() for name in str(given).split(",")} - {""}


def unreachable(observed: Observed, entries: Sequence[ClusterStatus]) -> Aspect | None:
    """Whether something newer cannot be known of a member of the job; None: it has none."""
    if not entries:
        return None
    lost = [(entry.name, _why(observed.members.get(entry.name))) for entry in entries]
    lost = [(name, why) for name, why in lost if why]
    if not lost:
        return Aspect(type=CLUSTER_UNREACHABLE, holds=False, reason="ClustersReachable")
    told = "; ".join(f"cluster {name}: {why}" for name, why in lost)
    if pods.is_leaving(observed.raw):
        lists = ",".join(name for name, _ in lost)
        told += f"; the deletion waits. The annotation {names.ANNOTATION_ABANDON}={lists} leaves what is there"
    return Aspect(type=CLUSTER_UNREACHABLE, holds=True, reason=CLUSTER_UNREACHABLE, message=told)


def unknown_pods(observed: Observed) -> str:
    """Why nobody knows whether pods of the job are left in members that it is to be in; empty: it is known, or given up.

    A job that has left a member waits for nothing there: it may have left since the member is lost for good.
    """
    before = job_status.read_job_status(observed.raw)
    suspended = conditions.kept(before.conditions, SUSPENDED)
    if suspended is not None and suspended.holds:  # all had gone, and none is made since
        return ""
    names_there = needed(observed).keys() - _abandoned(observed)
    told = unreachable(observed, [one for one in before.clusters if one.cluster_uid and one.name in names_there])
    return told.message if told is not None and told.holds else ""


def awaited(observed: Observed) -> dict[str, str]:
    """Return the members that do not have all of their part of the job as it is now, with why nothing newer is known of them."""
    generation, abandoned = observed.metadata.get("generation"), _abandoned(observed)
    return {
        name: member.unreachable
        for name, member in needed(observed).items()
        if name not in abandoned and (member.unreachable or member.refused or member.made_generation != generation)
    }


def _why(member: MemberView | None) -> str:
    return "its RLCluster is not there" if member is None else member.unreachable


def connected(observed: Observed, pool: str) -> int | None:
    """Generators of a pool that the scheduler hears; None: it is not known."""
    page: Any = observed.numbers
    for key in ("scaling", "pools", pool):
        page = page.get(key) if isinstance(page, Mapping) else None
    return job_status.whole_number(page.get("generators")) if isinstance(page, Mapping) else None
