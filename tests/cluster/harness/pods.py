"""What tests ask of pods: wait, run a command, read logs, keep everything when a test failed."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.harness.objects import Object, Objects
from cluster.harness.processes import ClusterError, wait_until

if TYPE_CHECKING:
    from cluster.harness.base import Cluster
    from cluster.harness.node import Node

READY_S = 180.0
"""Seconds on an idle machine."""
LOOK_S = 0.1
ENDED = ("Succeeded", "Failed")
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""The security context that the project's pods have."""


def wait_for(
    objects: Objects, path: str, check: Callable[[Object], bool], *, what: str, deadline_s: float = READY_S
) -> Object:
    """Wait until an object meets a condition; at the deadline its status is shown."""
    end = time.monotonic() + deadline_s
    while True:
        found = objects.get(path)
        if found is not None and check(found):
            return found
        if time.monotonic() > end:
            status = "it does not exist" if found is None else json.dumps(found.get("status", {}))[:3000]
            raise ClusterError(f"waited {deadline_s:.0f} s for {path} {what}; {status}")
        time.sleep(LOOK_S)


def make_namespace(objects: Objects, name: str, labels: dict[str, str]) -> None:
    """Make a namespace, and wait until pods may be made in it."""
    objects.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_for(objects, account, lambda _: True, what="to be made")


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def wait_ready(objects: Objects, namespace: str, name: str, *, deadline_s: float = READY_S) -> Object:
    """Wait until a pod is Ready."""
    return wait_for(objects, _path(namespace, name), is_ready, what="to be Ready", deadline_s=deadline_s)


def wait_ended(objects: Objects, namespace: str, name: str, *, deadline_s: float = READY_S) -> Object:
    """Wait until a pod has ended, well or not."""
    return wait_for(
        objects,
        _path(namespace, name),
        lambda pod: pod.get("status", {}).get("phase") in ENDED,
        what="to end",
        deadline_s=deadline_s,
    )


def wait_gone(objects: Objects, path: str, *, deadline_s: float = READY_S) -> None:
    """Wait until an object is no more."""
    wait_until(lambda: objects.get(path) is None, what=f"{path} to be gone", deadline_s=deadline_s)


def wait_deployment(objects: Objects, namespace: str, name: str, *, deadline_s: float = READY_S) -> Object:
    """Wait until all replicas of a Deployment are available."""
    return wait_for(
        objects,
        f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}",
        lambda one: one.get("status", {}).get("availableReplicas", 0) == one["spec"]["replicas"],
        what="to be available",
        deadline_s=deadline_s,
    )


def wait_statefulset(objects: Objects, namespace: str, name: str, *, deadline_s: float = READY_S) -> Object:
    """Wait until all replicas of a StatefulSet are ready."""
    return wait_for(
        objects,
        f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}",
        lambda one: one.get("status", {}).get("readyReplicas", 0) == one["spec"]["replicas"],
        what="to be ready",
        deadline_s=deadline_s,
    )


def _path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def execute(
    cluster: "Cluster", namespace: str, pod: str, *command: str, container: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command in a pod."""
    chosen = ["--container", container] if container else []
    return cluster.kubectl("exec", "--namespace", namespace, pod, *chosen, "--", *command, check=check)


def logs(cluster: "Cluster", namespace: str, pod: str, *, container: str | None = None, previous: bool = False) -> str:
    """What a pod wrote."""
    chosen = [*(["--container", container] if container else []), *(["--previous"] if previous else [])]
    return cluster.kubectl("logs", "--namespace", namespace, pod, *chosen).stdout


def python_pod(name: str, namespace: str, code: str, image: str, **spec: Any) -> Object:
    """A pod that runs Python code as the project's pods run: restricted, with /tmp as the one place to write."""
    labels = spec.pop("labels", {"app": name})
    own = spec.pop("container", {})
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python3", "-u", "-c", code],
        "securityContext": RESTRICTED,
        **own,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *own.get("volumeMounts", ())],
    }
    volumes = [{"name": "tmp", "emptyDir": {}}, *spec.pop("volumes", ())]
    body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {**body, "containers": [container], "volumes": volumes, **spec},
    }


def collect_logs(cluster: "Cluster", node: "Node", folder: Path) -> Path:
    """Write logs of all parts and pods, objects and events into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for log in [*cluster.folder.glob("*.log"), *node.sandbox.log_folder.glob("*.log")]:
        shutil.copy(log, folder)
    pod_logs = node.sandbox.log_folder / "pods"
    if pod_logs.exists():
        shutil.copytree(pod_logs, folder / "pods", dirs_exist_ok=True)
    kinds = "pods,services,statefulsets,deployments,persistentvolumeclaims,persistentvolumes,networkpolicies,configmaps"
    for file, arguments in {
        "objects.yaml": ("get", kinds, "--all-namespaces", "-o", "yaml"),
        "objects.txt": ("get", kinds, "--all-namespaces", "-o", "wide"),
        "events.txt": ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
        "streamrl.yaml": ("get", "rljobs,generatorpools", "--all-namespaces", "-o", "yaml"),
    }.items():
        done = cluster.kubectl(*arguments, check=False)
        (folder / file).write_text(done.stdout + done.stderr)
    rules = node.sandbox.run("nft", "list", "ruleset", check=False)
    (folder / "nft.txt").write_text(rules.stdout + rules.stderr)
    return folder
