"""Writes what was decided about a job: compares, and applies what differs. What a pod needs is written before the pod.

Owns: the order of writes, whose fields are whose, what is pruned, what a refusal holds up, and the finalizer. Decides nothing about a job's life.

A job that is deleted goes in steps, so that somebody can tell when all of it is gone:

    1  StatefulSets and GeneratorPools      the pods end in order, with everything that they need still there
    2  all else that the job owns           when no pod is left; claims that are to be kept have no owner
    3  the finalizer                        when none of it is left
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl import API_GROUP, names
from streamrl_operator.events import Refusal
from streamrl_operator.kube.answers import NotFoundError, RequestRefusedError
from streamrl_operator.kube.cache import Key
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import APPLIED, CLAIM, GENERATOR_POOL, POD, STATEFUL_SET, Kind, of
from streamrl_operator.planning import pods
from streamrl_operator.planning.compare import differs, with_claim_kept
from streamrl_operator.planning.objects import pool_replicas
from streamrl_operator.start_check import StartCheck

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Whose the objects of a job in one cluster are."""

    namespace: str
    """Of the objects."""
    job: str
    uid: str
    """Of the object that owns them: at home the job, in a member its anchor."""

    @property
    def key(self) -> Key:
        """As the caches know the job's objects."""
        return self.namespace, self.job


def ownership_of(job: Object) -> Ownership:
    """At home."""
    metadata = job["metadata"]
    return Ownership(namespace=metadata["namespace"], job=metadata["name"], uid=metadata["uid"])


_WHOLE_JOB = ""
"""What an object of no pool is needed for: the trainer, without which no generator is of use, or all pods."""
_PRUNED: tuple[Kind, ...] = tuple(kind for kind in reversed(APPLIED) if kind is not CLAIM)
"""A volume is never pruned: what it holds cannot be made again."""


async def apply_objects(
    cluster: CachedCluster,
    desired: Sequence[Object],
    *,
    owner: Ownership,
    requested: Mapping[str, int] | None = None,
    refused: Sequence[Refusal] = (),
    check: StartCheck | None = None,
) -> list[Refusal]:
    """Bring every object about; all that was refused. `requested`: pool -> replicas that are written under their own manager, before all
    else of the pool. `refused`: of what all pods need, before this. `check`: asked while the job has no pods and is to have some.

    No pod without all that it needs and all that guards it: where an object of a pool is refused, its StatefulSet gets neither more pods
    nor another template; where one of the trainer or of the whole job is, none does. All else goes on, and fewer pods can always be had.
    Of a job that starts nothing goes on: one refusal holds up every pod.

    Raises:
        KubeError: a write failed; the next reconcile goes on from there.
    """
    reported = list(refused)
    ordered = sorted(desired, key=lambda each: APPLIED.index(of(each)))
    sets = [obj for obj in ordered if of(obj) is STATEFUL_SET]
    check = check if _starts(cluster, sets, owner=owner, check=check) else None
    if check is not None and not reported and (lacking := await check.check_objects(ordered)):
        return lacking
    hindered = {_WHOLE_JOB} if reported else set()

    async def apply_each(objects: Sequence[Object]) -> None:
        for obj in objects:
            pool = obj["metadata"]["labels"].get(names.LABEL_POOL)
            part = _WHOLE_JOB if check is not None or pool is None else str(pool)
            try:
                if of(obj) is STATEFUL_SET and obj["spec"]["replicas"] and hindered & {_WHOLE_JOB, part}:
                    await _shrink(cluster, cluster.find(obj, owner_uid=owner.uid), replicas=obj["spec"]["replicas"])
                else:
                    await _apply(cluster, obj, owner=owner, requested=requested or {})
            except (NameTakenError, RequestRefusedError) as error:
                reported.append(error)
                hindered.add(part)

    await apply_each([obj for obj in ordered if of(obj) is not STATEFUL_SET])
    if check is not None and (lacking := reported or await check.check_pods(sets)):
        return lacking
    await apply_each(sets)
    return reported


def _starts(cluster: CachedCluster, sets: Sequence[Object], *, owner: Ownership, check: StartCheck | None) -> bool:
    """Whether no pod is asked for yet, and some are to be."""
    has_pods = any(pods.asked(each) for each in _owned(cluster, (STATEFUL_SET,), owner=owner))
    is_start = check is not None and check.is_start
    return not has_pods and (is_start or any(pods.asked(each) for each in sets))


async def _apply(cluster: CachedCluster, obj: Object, *, owner: Ownership, requested: Mapping[str, int]) -> None:
    if of(obj) is GENERATOR_POOL:
        await _apply_replicas(cluster, obj, owner=owner, requested=requested)
    found = await cluster.find_or_make(obj, owner_uid=owner.uid)
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
    cluster: CachedCluster, obj: Object, *, owner: Ownership, requested: Mapping[str, int]
) -> None:
    """Under their own manager. A pool comes into the world with its replicas: the default is nobody's wish."""
    pool, manager = obj["spec"]["poolName"], names.REPLICAS_MANAGER
    if pool not in requested:
        return
    labels = {name: value for name, value in obj["metadata"]["labels"].items() if name.startswith(f"{API_GROUP}/")}
    metadata = {name: value for name, value in obj["metadata"].items() if name != "annotations"}
    # Without the job's labels: of two managers that set one, the other keeps it when it is no longer listed.
    born = {**obj, "metadata": metadata | {"labels": labels}, "spec": obj["spec"] | {"replicas": requested[pool]}}
    found = await cluster.find_or_make(born, owner_uid=owner.uid, manager=manager)
    if _is_unfinished(found):
        if differs(born, found):
            await cluster.apply(born, manager=manager)
        return
    await cluster.apply(pool_replicas(obj, replicas=requested[pool]), manager=manager)


def _is_unfinished(found: Object) -> bool:
    """Born, and never applied since: all of its fields are still held by the manager of the replicas, and would go with it."""
    return names.ANNOTATION_SPEC_HASH not in (found["metadata"].get("annotations") or {})


async def stop(cluster: CachedCluster, *, owner: Ownership) -> list[Refusal]:
    """No pods, of a job whose objects are not planned (its spec is not valid, or its pods go first): its StatefulSets are set to 0 as they are.

    What was refused is told, and the others are set all the same.
    """
    sets = _owned(cluster, (STATEFUL_SET,), owner=owner)
    return await _try_each(sets, lambda each: _shrink(cluster, each, replicas=0))


def _owned(cluster: CachedCluster, kinds: Sequence[Kind], *, owner: Ownership) -> list[dict[str, Any]]:
    """What the owner is the controller of."""
    found = (obj for kind in kinds for obj in cluster.of_job(kind, owner.key))
    return [obj for obj in found if is_owned(obj, uid=owner.uid)]


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


async def prune(
    cluster: CachedCluster,
    desired: Sequence[Object],
    *,
    owner: Ownership,
    secrets: Sequence[str] = (),
    waiting: Mapping[str, int] | None = None,
) -> list[Refusal]:
    """Delete what the job owns and no longer wants; what was refused of that.

    `secrets`: those that are no part of the plan and stay. `waiting`: as `JobPlan.waiting`; what such a pool has stays, with fewer
    pods where it may have fewer.
    """
    wanted = {(obj["kind"], obj["metadata"]["name"]) for obj in desired}
    wanted |= {("Secret", name) for name in secrets}
    owned = _owned(cluster, _PRUNED, owner=owner)
    gone = (obj for obj in owned if (obj["kind"], obj["metadata"]["name"]) not in wanted)

    async def delete_or_shrink(obj: dict[str, Any]) -> None:
        most = (waiting or {}).get(pods.label(obj, names.LABEL_POOL))
        if most is None:
            await delete_once(cluster, obj)
        elif of(obj) is STATEFUL_SET:
            await _shrink(cluster, obj, replicas=most)

    return await _try_each(gone, delete_or_shrink)


async def delete_pods(cluster: CachedCluster, pod_names: Sequence[str], *, among: Sequence[Object]) -> None:
    """Delete these pods, if they are still the ones that were looked at.

    Raises:
        KubeError: a pod could not be deleted.
    """
    for pod in among:
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


async def _delete_owned(cluster: CachedCluster, kinds: Sequence[Kind], *, owner: Ownership) -> list[dict[str, Any]]:
    """Delete what is owned of these kinds; what of it is still there."""
    for obj in _owned(cluster, kinds, owner=owner):
        await delete_once(cluster, obj)
    return _owned(cluster, kinds, owner=owner)


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
    """Take the next step at home; what it waits for, which tells us when it is gone. Nothing: `let_go`, if nothing is left elsewhere."""
    await keep(cluster, kept_by_wish(raw), owner=ownership_of(raw))
    return await remove(cluster, owner=ownership_of(raw))


async def let_go(cluster: CachedCluster, raw: dict[str, Any]) -> None:
    """Step 3."""
    finalizers = [name for name in raw["metadata"]["finalizers"] if name != names.FINALIZER]
    await cluster.merge(raw, {"metadata": {"finalizers": finalizers}})


async def remove(cluster: CachedCluster, *, owner: Ownership) -> list[dict[str, Any]]:
    """The next of the steps 1 and 2; what of it is still there."""
    left = await _delete_owned(cluster, _FIRST, owner=owner)
    found = [pod for pod in cluster.of_job(POD, owner.key) if not pods.is_foreign(pod)]
    for pod in found:
        if not pod["metadata"].get("ownerReferences"):  # somebody orphaned it: nobody else would delete it
            await delete_once(cluster, pod)
    return left + found or await _delete_owned(cluster, _REST, owner=owner)


def kept_by_wish(raw: Object) -> frozenset[str]:
    """Names of claims that are kept since somebody has said so: it may have come too late for a reconcile to do so before the deletion."""
    metadata = raw["metadata"]
    is_wished = (metadata.get("annotations") or {}).get(names.ANNOTATION_KEEP_CHECKPOINTS) == "true"
    return frozenset([names.checkpoints_claim(metadata["name"])] if is_wished else [])


async def keep(cluster: CachedCluster, claims: Iterable[str], *, owner: Ownership) -> None:
    """Take the owner from claims that outlive the job. Where the caches follow no claims (any more), the API server is asked.

    Raises:
        KubeError: a request failed, so what owns the claims must not go.
    """
    for name in claims:
        claim = cluster.known(CLAIM, owner.namespace, name)
        if not cluster.has(CLAIM):
            with contextlib.suppress(NotFoundError):
                claim = await cluster.client.get(CLAIM, namespace=owner.namespace, name=name)
        if claim is not None and is_owned(claim, uid=owner.uid):
            await cluster.merge(claim, {"metadata": {"ownerReferences": None}})
