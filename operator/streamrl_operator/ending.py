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
from streamrl_operator.kube.kinds import APPLIED, GENERATOR_POOL, POD, STATEFUL_SET
from streamrl_operator.kube.store import Key

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
    left = await carry.delete_owned(cluster, _FIRST, key=key, uid=metadata["uid"])
    pods = list(cluster.of_job(POD, key))
    for pod in pods:
        if not pod["metadata"].get("ownerReferences"):  # somebody orphaned it: nobody else would delete it
            await carry.delete_once(cluster, pod)
    if left or pods:
        return False
    if await carry.delete_owned(cluster, _REST, key=key, uid=metadata["uid"]):
        return False
    finalizers = [name for name in metadata["finalizers"] if name != names.FINALIZER]
    await cluster.merge(raw, {"metadata": {"finalizers": finalizers}})
    return True
