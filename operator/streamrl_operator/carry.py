"""Carries a verdict out: compares, and writes what differs. What a pod needs is written before the pod.

Owns: the order of writes, whose fields are whose, what is pruned. Decides nothing about a job's life.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl import names
from streamrl_operator.certificates.vault import secret_names
from streamrl_operator.kube.cluster import Cluster, NameTakenError
from streamrl_operator.kube.errors import RefusedError
from streamrl_operator.kube.kinds import APPLIED, CLAIM, GENERATOR_POOL, STATEFUL_SET, Kind, of
from streamrl_operator.kube.store import Key
from streamrl_operator.planning.compare import differs
from streamrl_operator.planning.objects import pool_replicas
from streamrl_operator.planning.values import Observed

Object = Mapping[str, Any]

_PRUNED: tuple[Kind, ...] = tuple(kind for kind in reversed(APPLIED) if kind is not CLAIM)
"""A volume is never pruned: what it holds cannot be made again."""


async def apply_objects(
    cluster: Cluster, desired: Sequence[Object], *, observed: Observed, requested: Mapping[str, int], wants_pods: bool
) -> None:
    """Bring every object about; `requested`: pool -> replicas that are written under their own manager, before all else of the pool.

    Where pods are wanted the first refusal ends it: no pod without all that it needs and all that guards it. Where none are wanted the
    rest goes on, since pods must not stay because of it.

    Raises:
        NameTakenError: something else is there by that name.
        KubeError: a write failed; the next look goes on from there.
    """
    refused: Exception | None = None
    ordered = sorted(desired, key=lambda each: APPLIED.index(of(each)))
    there = await cluster.find_all(ordered, owner_uid=observed.raw["metadata"]["uid"])
    for obj, found in zip(ordered, there, strict=True):
        try:
            if isinstance(found, NameTakenError):
                raise found
            await _apply(cluster, obj, found=found, observed=observed, requested=requested)
        except (NameTakenError, RefusedError) as error:
            if wants_pods:
                raise
            refused = refused or error
    if refused is not None:
        raise refused


async def _apply(
    cluster: Cluster, obj: Object, *, found: Object | None, observed: Observed, requested: Mapping[str, int]
) -> None:
    if of(obj) is GENERATOR_POOL:
        await _apply_replicas(cluster, obj, found=found, observed=observed, requested=requested)
        found = await cluster.find(obj, owner_uid=observed.raw["metadata"]["uid"])
    if differs(obj, found):
        await cluster.apply(obj)


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


async def stop(cluster: Cluster, *, observed: Observed) -> None:
    """No pods, of a job whose objects cannot be planned since its spec is not valid: its StatefulSets are set to 0 as they are."""
    metadata = observed.raw["metadata"]
    for each in cluster.of_job(STATEFUL_SET, (metadata["namespace"], metadata["name"])):
        if each["spec"].get("replicas") and is_owned(each, uid=metadata["uid"]):
            await cluster.merge(each, {"spec": {"replicas": 0}})


async def prune(cluster: Cluster, desired: Sequence[Object], *, observed: Observed) -> None:
    """Delete what the job owns and no longer wants. Its certificates are no part of the plan and stay."""
    metadata = observed.raw["metadata"]
    key: Key = (metadata["namespace"], metadata["name"])
    wanted = {(obj["kind"], obj["metadata"]["name"]) for obj in desired}
    wanted |= {("Secret", name) for name in secret_names(key[1])}
    for kind in _PRUNED:
        for obj in cluster.of_job(kind, key):
            if (kind.kind, obj["metadata"]["name"]) not in wanted and is_owned(obj, uid=metadata["uid"]):
                await delete_once(cluster, obj)


async def delete_pods(cluster: Cluster, pod_names: Sequence[str], *, observed: Observed) -> None:
    """Delete these pods, if they are still the ones that were looked at."""
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
