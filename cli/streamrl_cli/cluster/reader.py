"""A pod of the user's own that holds the run's volume of a job that has ended, for as long as one command reads there.

    StatefulSet of the trainer ──▶ its scheduler's container, which only sleeps ──ready──▶ the command runs in it ──▶ the pod is deleted

It has the image, user and nodes of the scheduler's container, of its volumes that of the run and scratch space, and no label of the job: the
operator does not see it.
Its node ends it after `_LIFE_S` where the command could not delete it, and it goes with the job.
"""

import asyncio
import secrets
from time import monotonic

from streamrl import names
from streamrl.errors import UserError
from streamrl_cli.cluster.api import ApiClient, Object
from streamrl_operator.kube.kinds import POD, RLJOB, STATEFUL_SET
from streamrl_operator.planning import pods

_LIFE_S = 900
START_S = 180.0
"""Maximum time until the container runs: the node may have to pull the image and attach the volume."""
_POLL_S = 1.0
_KEPT = (
    "runtimeClassName",
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "imagePullSecrets",
    "nodeSelector",
    "tolerations",
    "affinity",
)
"""Fields of the trainer's pod without which its volume or its image may be out of reach."""
_KEPT_OF_CONTAINER = ("image", "imagePullPolicy", "securityContext", "resources")


def reader_pod(job: Object, trainer: Object) -> Object:
    """Return the pod. `trainer`: the StatefulSet, which stays after the job's end."""
    metadata, spec = job["metadata"], trainer["spec"]["template"]["spec"]
    scheduler = next(one for one in spec["initContainers"] if one["name"] == names.CONTAINER_SCHEDULER)
    mounted = {one["name"] for one in scheduler["volumeMounts"] if one["mountPath"] == names.DIR_RUN}
    volumes = [one for one in spec["volumes"] if one["name"] in mounted or "emptyDir" in one]
    container = {key: scheduler[key] for key in _KEPT_OF_CONTAINER if key in scheduler} | {
        "name": names.CONTAINER_SCHEDULER,
        "command": ["python", "-I", "-S", "-c", f"import time; time.sleep({_LIFE_S})"],
        "env": [one for one in scheduler.get("env") or () if "value" in one],
        "volumeMounts": [one for one in scheduler["volumeMounts"] if one["name"] in {each["name"] for each in volumes}],
    }
    owner = {"apiVersion": RLJOB.api_version, "kind": RLJOB.kind, "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": POD.api_version,
        "kind": POD.kind,
        "metadata": {
            "name": f"{metadata['name']}-samples-{secrets.token_hex(3)}",
            "namespace": metadata["namespace"],
            "labels": {"app.kubernetes.io/name": "streamrl-samples"},
            "ownerReferences": [owner],
        },
        "spec": {key: spec[key] for key in _KEPT if key in spec}
        | {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIFE_S,
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "volumes": volumes,
        },
    }


async def start(cluster: ApiClient, job: Object) -> Object:
    """Make the pod and return it.

    Raises:
        UserError: the job has left nothing that could be read, or the user may not make pods.
    """
    trainer = await cluster.get(STATEFUL_SET, names.trainer(job["metadata"]["name"]))
    return await cluster.apply(POD, reader_pod(job, trainer))


async def wait_running(cluster: ApiClient, pod: Object) -> None:
    """Wait until its container runs.

    Raises:
        UserError: it does not within `START_S`, or it cannot.
    """
    name, until_s = pod["metadata"]["name"], monotonic() + START_S
    while not any("running" in (one.get("state") or {}) for one in pods.containers(pod)):
        reason = pods.waiting_reason(pod)
        if monotonic() >= until_s or pods.status(pod).get("phase") == "Failed":
            why = "no reason is given" if reason is None else reason.message
            raise UserError(field=f"pod {name}", rule=f"does not start to read the job's volume: {why}")
        await asyncio.sleep(_POLL_S)
        pod = await cluster.get(POD, name)
