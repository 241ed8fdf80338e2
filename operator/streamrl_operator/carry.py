"""Carries a verdict out: compares, and writes what differs. What a pod needs is written before the pod.

Owns: the order of writes, whose fields are whose, what is pruned, what a refusal holds up. Decides nothing about a job's life.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl import names
from streamrl_operator.certificates.vault import secret_names
from streamrl_operator.kube.cluster import Cluster, NameTakenError
from streamrl_operator.kube.errors import RefusedError
from streamrl_operator.kube.kinds import APPLIED, CLAIM, GENERATOR_POOL, STATEFUL_SET, Kind, of
from streamrl_operator.kube.store import Key
from streamrl_operator.planning import pods
from streamrl_operator.planning.compare import differs
from streamrl_operator.planning.objects import pool_replicas
from streamrl_operator.planning.values import Observed
from streamrl_operator.refusals import Refusal

Object = Mapping[str, Any]

_WHOLE_JOB = ""
"""What an object of no pool is needed for: the trainer, without which no generator is of use, or all pods."""
_PRUNED: tuple[Kind, ...] = tuple(kind for kind in reversed(APPLIED) if kind is not CLAIM)
"""A volume is never pruned: what it holds cannot be made again."""


async def apply_objects(
    cluster: Cluster,
    desired: Sequence[Object],
    *,
    observed: Observed,
    requested: Mapping[str, int],
    refused: Sequence[Refusal] = (),
) -> list[Refusal]:
    """Bring every object about; all that was refused. `requested`: pool -> replicas that are written under their own manager, before all
    else of the pool. `refused`: of what all pods need, before this.

    No pod without all that it needs and all that guards it: where an object of a pool is refused, its StatefulSet gets neither more pods
    nor another template; where one of the trainer or of the whole job is, none does. All else goes on, and fewer pods can always be had.

    Raises:
        KubeError: a write failed; the next look goes on from there.
    """
    told, hindered = list(refused), {_WHOLE_JOB} if refused else set()
    ordered = sorted(desired, key=lambda each: APPLIED.index(of(each)))
    there = await cluster.find_all(ordered, owner_uid=observed.raw["metadata"]["uid"])
    for obj, found in zip(ordered, there, strict=True):
        part = str(obj["metadata"]["labels"].get(names.LABEL_POOL, _WHOLE_JOB))
        try:
            if isinstance(found, NameTakenError):
                raise found
            if of(obj) is STATEFUL_SET and obj["spec"]["replicas"] and hindered & {_WHOLE_JOB, part}:
                await _shrink(cluster, found, replicas=obj["spec"]["replicas"])
            else:
                await _apply(cluster, obj, found=found, observed=observed, requested=requested)
        except (NameTakenError, RefusedError) as error:
            told.append(error)
            hindered.add(part)
    return told


async def _apply(
    cluster: Cluster, obj: Object, *, found: Object | None, observed: Observed, requested: Mapping[str, int]
) -> None:
    if of(obj) is GENERATOR_POOL:
        await _apply_replicas(cluster, obj, found=found, observed=observed, requested=requested)
        found = await cluster.find(obj, owner_uid=observed.raw["metadata"]["uid"])
    if not differs(obj, found):
        return
    try:
        await cluster.apply(obj)
    except RefusedError:
        if of(obj) is STATEFUL_SET:  # pods that are not wanted must not stay, whatever is wrong with the rest
            await _shrink(cluster, found, replicas=obj["spec"]["replicas"])
        raise


async def _apply_replicas(
    cluster: Cluster, obj: Object, *, found: Object | None, observed: Observed, requested: Mapping[str, int]
) -> None:
    """Under their own manager. A pool comes into the world with its replicas: the default is nobody's wish."""
    pool = obj["spec"]["poolName"]
    if pool not in requested:
        return
    if found is None or _is_unfinished(found):
        metadata = {name: value for name, value in obj["metadata"].items() if name != "annotations"}
        born = {**obj, "metadata": metadata, "spec": obj["spec"] | {"replicas": requested[pool]}}
        await cluster.apply(born, manager=names.REPLICAS_MANAGER)
        return
    assert observed.job is not None, "objects are planned of a valid job"
    namespace = obj["metadata"]["namespace"]
    least = pool_replicas(observed.job, namespace=namespace, pool=pool, replicas=requested[pool])
    await cluster.apply(least, manager=names.REPLICAS_MANAGER)


def _is_unfinished(found: Object) -> bool:
    """Born, and never applied since: all of its fields are still held by the manager of the replicas, and would go with it."""
    return names.ANNOTATION_SPEC_HASH not in (found["metadata"].get("annotations") or {})


async def stop(cluster: Cluster, *, observed: Observed) -> list[Refusal]:
    """No pods, of a job whose objects cannot be planned since its spec is not valid: its StatefulSets are set to 0 as they are.

    What was refused is told, and the others are set all the same.
    """
    metadata = observed.raw["metadata"]
    refused: list[Refusal] = []
    for each in cluster.of_job(STATEFUL_SET, (metadata["namespace"], metadata["name"])):
        if is_owned(each, uid=metadata["uid"]):
            try:
                await _shrink(cluster, each, replicas=0)
            except RefusedError as error:
                refused.append(error)
    return refused


async def _shrink(cluster: Cluster, found: Object | None, *, replicas: int) -> None:
    """Fewer pods of a StatefulSet, and nothing else of it."""
    if found is not None and pods.asked(found) > replicas:
        await cluster.merge(found, {"spec": {"replicas": replicas}})


async def prune(cluster: Cluster, desired: Sequence[Object], *, observed: Observed) -> list[Refusal]:
    """Delete what the job owns and no longer wants; what was refused of that. Its certificates are no part of the plan and stay."""
    metadata = observed.raw["metadata"]
    key: Key = (metadata["namespace"], metadata["name"])
    wanted = {(obj["kind"], obj["metadata"]["name"]) for obj in desired}
    wanted |= {("Secret", name) for name in secret_names(key[1])}
    refused: list[Refusal] = []
    for kind in _PRUNED:
        for obj in cluster.of_job(kind, key):
            if (kind.kind, obj["metadata"]["name"]) not in wanted and is_owned(obj, uid=metadata["uid"]):
                try:
                    await delete_once(cluster, obj)
                except RefusedError as error:
                    refused.append(error)
    return refused


async def delete_pods(cluster: Cluster, pod_names: Sequence[str], *, observed: Observed) -> None:
    """Delete these pods, if they are still the ones that were looked at.

    Raises:
        KubeError: a pod could not be deleted.
    """
    for pod in observed.pods:
        if pod["metadata"]["name"] in pod_names:
            await delete_once(cluster, dict(pod))


async def write_status(cluster: Cluster, obj: Object | None, status: Object) -> bool:
    """The whole status of an object, if it differs from what is there; whether it was written."""
    if obj is None or not status_differs(status, obj.get("status") or {}):
        return False
    metadata = {
        key: obj["metadata"][key] for key in ("name", "namespace", "uid")
    }  # not of one that has come in its place
    body = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": metadata, "status": dict(status)}
    await cluster.apply(body, subresource="status")
    return True


def status_differs(ours: Object, stored: Object) -> bool:
    """Whether a status must be written. Unlike in a spec, what we no longer say must go; empty is as good as absent."""
    return bool(_bare(ours) != _bare(stored))


def _bare(value: Any) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, Mapping):
        return {key: _bare(part) for key, part in value.items() if part not in (None, [], (), {})}
    if isinstance(value, list | tuple):
        return [_bare(part) for part in value]
    return value


def is_owned(obj: Object, *, uid: str) -> bool:
    """Whether the job is the controller of the object."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid and owner.get("controller") for owner in owners)


async def delete_once(cluster: Cluster, obj: dict[str, Any]) -> None:
    """Delete an object that is not being deleted already."""
    if not obj["metadata"].get("deletionTimestamp"):
        await cluster.delete(obj)


async def delete_owned(cluster: Cluster, kinds: Sequence[Kind], *, key: Key, uid: str) -> int:
    """Delete what the job owns of these kinds; how much of it is still there."""
    left = 0
    for kind in kinds:
        for obj in cluster.of_job(kind, key):
            if is_owned(obj, uid=uid):
                await delete_once(cluster, obj)
                left += cluster.known(kind, key[0], obj["metadata"]["name"]) is not None
    return left
