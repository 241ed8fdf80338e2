"""The end of a job's objects: what is deleted in which order before the finalizer lets the job go.

    1  StatefulSets and GeneratorPools      the pods end in order, with everything that they need still there
    2  all else that the job owns           when no pod is left; claims that are to be kept have no owner
    3  the finalizer                        when none of it is left

The garbage collector would do the same for us after the job is gone; then nobody could tell whether it did.
"""

from typing import Any

from streamrl import names
from streamrl_operator import carry
from streamrl_operator.kube.cluster import Cluster
from streamrl_operator.kube.kinds import APPLIED, CLAIM, GENERATOR_POOL, POD, STATEFUL_SET
from streamrl_operator.kube.store import Key
from streamrl_operator.planning import pods

_FIRST = (GENERATOR_POOL, STATEFUL_SET)
_REST = tuple(kind for kind in APPLIED if kind not in _FIRST)


def holds_finalizer(raw: dict[str, Any]) -> bool:
    """Whether the job waits for us before it goes."""
    return names.FINALIZER in (raw["metadata"].get("finalizers") or ())


async def add_finalizer(cluster: Cluster, raw: dict[str, Any]) -> dict[str, Any]:
    """The job with our finalizer."""
    finalizers = [*(raw["metadata"].get("finalizers") or ()), names.FINALIZER]
    return await cluster.merge(raw, {"metadata": {"finalizers": finalizers}})


async def finish(cluster: Cluster, raw: dict[str, Any]) -> bool:
    """Take the next step; True when the job is let go. What is not yet gone tells us when it is."""
    metadata = raw["metadata"]
    key: Key = (metadata["namespace"], metadata["name"])
    await _keep(cluster, raw)
    left = await carry.delete_owned(cluster, _FIRST, key=key, uid=metadata["uid"])
    found = [pod for pod in cluster.of_job(POD, key) if not pods.is_foreign(pod)]
    for pod in found:
        if not pod["metadata"].get("ownerReferences"):  # somebody orphaned it: nobody else would delete it
            await carry.delete_once(cluster, pod)
    if left or found:
        return False
    if await carry.delete_owned(cluster, _REST, key=key, uid=metadata["uid"]):
        return False
    finalizers = [name for name in metadata["finalizers"] if name != names.FINALIZER]
    await cluster.merge(raw, {"metadata": {"finalizers": finalizers}})
    return True


async def _keep(cluster: Cluster, raw: dict[str, Any]) -> None:
    """Take the owner from a claim that was to be kept: the wish may have come too late for a look to do so before the deletion."""
    metadata = raw["metadata"]
    if (metadata.get("annotations") or {}).get(names.ANNOTATION_KEEP_CHECKPOINTS) != "true":
        return
    claim = cluster.known(CLAIM, metadata["namespace"], names.checkpoints_claim(metadata["name"]))
    if claim is not None and carry.is_owned(claim, uid=metadata["uid"]):
        await cluster.merge(claim, {"metadata": {"ownerReferences": None}})
