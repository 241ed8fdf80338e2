"""Writes what was decided about a job: compares, and applies what differs. What a pod needs is written before the pod.

Owns: the order of writes, whose fields are whose, what is pruned, what a refusal holds up, and the finalizer. Decides nothing about a job's life.

A job that is deleted goes in steps, so that somebody can tell when all of it is gone:

    1  StatefulSets and GeneratorPools      the pods end in order, with everything that they need still there
    2  all else that the job owns           when no pod is left; claims that are to be kept have no owner
    3  the finalizer                        when none of it is left
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from streamrl import names
from streamrl_operator.events import Refusal
from streamrl_operator.kube.answers import RequestRefusedError
from streamrl_operator.kube.cache import Key
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import APPLIED, CLAIM, GENERATOR_POOL, POD, STATEFUL_SET, Kind, of
from streamrl_operator.planning import pods
from streamrl_operator.planning.compare import differs, with_claim_kept
from streamrl_operator.planning.objects import pool_replicas
from streamrl_operator.planning.values import Observed
from streamrl_operator.tls_secrets import secret_names

Object = Mapping[str, Any]

_WHOLE_JOB = ""
"""What an object of no pool is needed for: the trainer, without which no generator is of use, or all pods."""
_PRUNED: tuple[Kind, ...] = tuple(kind for kind in reversed(APPLIED) if kind is not CLAIM)
"""A volume is never pruned: what it holds cannot be made again."""


async def apply_objects(
    cluster: CachedCluster,
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
        KubeError: a write failed; the next reconcile goes on from there.
    """
    reported, hindered = list(refused), {_WHOLE_JOB} if refused else set()
    uid = observed.metadata["uid"]
    for obj in sorted(desired, key=lambda each: APPLIED.index(of(each))):
        part = str(obj["metadata"]["labels"].get(names.LABEL_POOL, _WHOLE_JOB))
        try:
            if of(obj) is STATEFUL_SET and obj["spec"]["replicas"] and hindered & {_WHOLE_JOB, part}:
                await _shrink(cluster, cluster.find(obj, owner_uid=uid), replicas=obj["spec"]["replicas"])
            else:
                await _apply(cluster, obj, observed=observed, requested=requested)
        except (NameTakenError, RequestRefusedError) as error:
            reported.append(error)
            hindered.add(part)
    return reported


async def _apply(cluster: CachedCluster, obj: Object, *, observed: Observed, requested: Mapping[str, int]) -> None:
    if of(obj) is GENERATOR_POOL:
        await _apply_replicas(cluster, obj, observed=observed, requested=requested)
    found = await cluster.find_or_make(obj, owner_uid=observed.metadata["uid"])
    obj = with_claim_kept(obj, found)
    if not differs(obj, found):
        return
    try:
        await cluster.apply(obj)
    except RequestRefusedError:
        if of(obj) is STATEFUL_SET:  # pods that are not wanted must not stay, whatever is wrong with the rest
            await _shrink(cluster, found, replicas=obj["spec"]["replicas"])
        raise


async def _apply_replicas(
    cluster: CachedCluster, obj: Object, *, observed: Observed, requested: Mapping[str, int]
) -> None:
    """Under their own manager. A pool comes into the world with its replicas: the default is nobody's wish."""
    pool, manager = obj["spec"]["poolName"], names.REPLICAS_MANAGER
    if pool not in requested:
        return
    metadata = {name: value for name, value in obj["metadata"].items() if name != "annotations"}
    born = {**obj, "metadata": metadata, "spec": obj["spec"] | {"replicas": requested[pool]}}
    found = await cluster.find_or_make(born, owner_uid=observed.metadata["uid"], manager=manager)
    if _is_unfinished(found):
        if differs(born, found):
            await cluster.apply(born, manager=manager)
        return
    assert observed.job is not None, "objects are planned of a valid job"
    namespace = obj["metadata"]["namespace"]
    least = pool_replicas(observed.job, namespace=namespace, pool=pool, replicas=requested[pool])
    await cluster.apply(least, manager=manager)


def _is_unfinished(found: Object) -> bool:
    """Born, and never applied since: all of its fields are still held by the manager of the replicas, and would go with it."""
    return names.ANNOTATION_SPEC_HASH not in (found["metadata"].get("annotations") or {})


async def stop(cluster: CachedCluster, *, observed: Observed) -> list[Refusal]:
    """No pods, of a job whose objects are not planned (its spec is not valid, or its pods go first): its StatefulSets are set to 0 as they are.

    What was refused is told, and the others are set all the same.
    """
    sets = _owned(cluster, (STATEFUL_SET,), raw=observed.raw)
    return await _try_each(sets, lambda each: _shrink(cluster, each, replicas=0))


def _owned(cluster: CachedCluster, kinds: Sequence[Kind], *, raw: Object) -> list[dict[str, Any]]:
    """What the job is the controller of."""
    metadata = raw["metadata"]
    found = (obj for kind in kinds for obj in cluster.of_job(kind, (metadata["namespace"], metadata["name"])))
    return [obj for obj in found if is_owned(obj, uid=metadata["uid"])]


async def _try_each(
    objs: Iterable[dict[str, Any]], write: Callable[[dict[str, Any]], Awaitable[None]]
) -> list[Refusal]:
    """Write all of them; what was refused."""
    refused: list[Refusal] = []
    for obj in objs:
        try:
            await write(obj)
        except RequestRefusedError as error:
            refused.append(error)
    return refused


async def _shrink(cluster: CachedCluster, found: Object | None, *, replicas: int) -> None:
    """Fewer pods of a StatefulSet, and nothing else of it."""
    if found is not None and pods.asked(found) > replicas:
        await cluster.merge(found, {"spec": {"replicas": replicas}})


async def prune(cluster: CachedCluster, desired: Sequence[Object], *, observed: Observed) -> list[Refusal]:
    """Delete what the job owns and no longer wants; what was refused of that. Its certificates are no part of the plan and stay."""
    wanted = {(obj["kind"], obj["metadata"]["name"]) for obj in desired}
    wanted |= {("Secret", name) for name in secret_names(observed.name)}
    owned = _owned(cluster, _PRUNED, raw=observed.raw)
    gone = (obj for obj in owned if (obj["kind"], obj["metadata"]["name"]) not in wanted)
    return await _try_each(gone, lambda obj: delete_once(cluster, obj))


async def delete_pods(cluster: CachedCluster, pod_names: Sequence[str], *, observed: Observed) -> None:
    """Delete these pods, if they are still the ones that were looked at.

    Raises:
        KubeError: a pod could not be deleted.
    """
    for pod in observed.pods:
        if pod["metadata"]["name"] in pod_names:
            await delete_once(cluster, dict(pod))


async def write_status(cluster: CachedCluster, obj: Object | None, status: Object) -> bool:
    """The whole status of an object, if it differs from what is there; whether it was written."""
    if obj is None or not status_differs(status, obj.get("status") or {}):
        return False
    # With the uid: not of one that has come in its place.
    metadata = {key: obj["metadata"][key] for key in ("name", "namespace", "uid")}
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


async def delete_once(cluster: CachedCluster, obj: dict[str, Any]) -> None:
    """Delete an object that is not being deleted already."""
    if not obj["metadata"].get("deletionTimestamp"):
        await cluster.delete(obj)


async def _delete_owned(cluster: CachedCluster, kinds: Sequence[Kind], *, raw: Object) -> list[dict[str, Any]]:
    """Delete what the job owns of these kinds; what of it is still there."""
    for obj in _owned(cluster, kinds, raw=raw):
        await delete_once(cluster, obj)
    return _owned(cluster, kinds, raw=raw)


_FIRST = (GENERATOR_POOL, STATEFUL_SET)
_REST = tuple(kind for kind in APPLIED if kind not in _FIRST)


def holds_finalizer(raw: dict[str, Any]) -> bool:
    """Whether the job waits for us before it goes."""
    return names.FINALIZER in (raw["metadata"].get("finalizers") or ())


async def add_finalizer(cluster: CachedCluster, raw: dict[str, Any]) -> dict[str, Any]:
    """The job with our finalizer."""
    finalizers = [*(raw["metadata"].get("finalizers") or ()), names.FINALIZER]
    return await cluster.merge(raw, {"metadata": {"finalizers": finalizers}})


async def finish(cluster: CachedCluster, raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the next step; what it waits for, which tells us when it is gone. Nothing: the job is let go."""
    metadata = raw["metadata"]
    key: Key = (metadata["namespace"], metadata["name"])
    await _keep(cluster, raw)
    left = await _delete_owned(cluster, _FIRST, raw=raw)
    found = [pod for pod in cluster.of_job(POD, key) if not pods.is_foreign(pod)]
    for pod in found:
        if not pod["metadata"].get("ownerReferences"):  # somebody orphaned it: nobody else would delete it
            await delete_once(cluster, pod)
    left = left + found or await _delete_owned(cluster, _REST, raw=raw)
    if left:
        return left
    finalizers = [name for name in metadata["finalizers"] if name != names.FINALIZER]
    await cluster.merge(raw, {"metadata": {"finalizers": finalizers}})
    return []


async def _keep(cluster: CachedCluster, raw: dict[str, Any]) -> None:
    """Take the owner from a claim that was to be kept: the wish may have come too late for a reconcile to do so before the deletion."""
    metadata = raw["metadata"]
    if (metadata.get("annotations") or {}).get(names.ANNOTATION_KEEP_CHECKPOINTS) != "true":
        return
    claim = cluster.known(CLAIM, metadata["namespace"], names.checkpoints_claim(metadata["name"]))
    if claim is not None and is_owned(claim, uid=metadata["uid"]):
        await cluster.merge(claim, {"metadata": {"ownerReferences": None}})
