"""The chart as a release on the cluster: installed by helm, its operator a pod of the image that `Dockerfile.operator` makes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from cluster.harness import pods
from cluster.harness.cluster import NodeCluster
from cluster.harness.images import OPERATOR_IMAGE
from cluster.harness.processes import wait_until
from e2e.stage import container_id, restarts_of
from support.chart import CHART, runner

NAMESPACE, NAME = "streamrl-system", "streamrl"
READY_S = 180.0
RESYNC_S = 2
"""Looks that a user's cluster makes each 30 s: a test waits for several."""


class Release:
    """One installation."""

    def __init__(self, cluster: NodeCluster, *, home: Path) -> None:
        self.cluster = cluster
        self.helm = runner(home, cluster.kubeconfig)

    def install(self, *more: str) -> None:
        """`helm upgrade --install`, and wait until the operator is ready. The namespace takes "restricted" pods alone."""
        self.cluster.load("operator")
        node = self.cluster.the_node
        pods.make_namespace(node.objects, NAMESPACE, {"pod-security.kubernetes.io/enforce": "restricted"})
        self.helm(
            *("upgrade", "--install", NAME, str(CHART), "--namespace", NAMESPACE, "--take-ownership"),
            *("--values", "-"),
            *more,
            stdin=json.dumps(self.values()),
        )
        self.wait_ready()

    def values(self) -> dict[str, Any]:
        """What a cluster without a registry needs; the rest is the chart's own."""
        repository, _, tag = OPERATOR_IMAGE.rpartition(":")
        return {
            "images": {"operator": {"repository": repository, "tag": tag, "pullPolicy": "Never"}},
            "resyncSeconds": RESYNC_S,
            "networkPolicy": {"apiServer": {"ports": [443, self.cluster.port]}},
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "768Mi"}},
        }

    @staticmethod
    @contextlib.contextmanager
    def absent(cluster: NodeCluster) -> Iterator[None]:
        """For the block no operator of the release runs, if there is one: it looks after all namespaces, and two that look after one job fight."""
        objects = cluster.the_node.objects
        if objects.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}") is None:
            yield
            return
        scale = ("scale", f"deployment/{NAME}", "--namespace", NAMESPACE)
        cluster.kubectl(*scale, "--replicas=0")
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        wait_until(lambda: not objects.list(path), what="the release's operator to end", deadline_s=READY_S)
        try:
            yield
        finally:
            cluster.kubectl(*scale, "--replicas=1")
        pods.wait_deployment(objects, NAMESPACE, NAME, deadline_s=READY_S)

    def wait_ready(self, *, deadline_s: float = READY_S) -> None:
        """Until the operator leads and knows what there is."""
        pods.wait_deployment(self.cluster.the_node.objects, NAMESPACE, NAME, deadline_s=deadline_s)
        wait_until(self._leads, what="the operator to lead", deadline_s=deadline_s)

    def _leads(self) -> bool:
        return "streamrl_operator_leader 1.0" in self._metrics()

    def _metrics(self) -> list[str]:
        address = self.pod()["status"].get("podIP", "")
        try:
            return self.cluster.the_node.fetch(f"http://{address}:8080/metrics").splitlines()
        except httpx.HTTPError:
            return []

    def pod(self) -> dict[str, Any]:
        """The operator's pod."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        every = self.cluster.the_node.objects.list(path)
        (found,) = (
            one
            for one in every
            if one["metadata"]["labels"].get("app.kubernetes.io/component") == "operator"
            and "deletionTimestamp" not in one["metadata"]
        )
        return found

    def kill(self) -> None:
        """End the operator's process as the kernel does when memory is short: no word, no time. Until it is back."""
        before = restarts_of(self.pod())["operator"]
        kill_container(self.cluster, self.pod(), "operator")
        wait_until(
            lambda: restarts_of(self.pod())["operator"] > before, what="the operator to be back", deadline_s=READY_S
        )
        self.wait_ready()

    @property
    def account(self) -> str:
        """The operator's user as the API server knows it."""
        return f"system:serviceaccount:{NAMESPACE}:{self.pod()['spec']['serviceAccountName']}"

    def figures(self) -> str:
        """What the operator says of itself."""
        lines = self._metrics()
        wanted = ("process_resident_memory_bytes", "streamrl_operator_reconciles_total")
        return "; ".join(line for line in lines if line.startswith(wanted))

    def explain(self) -> str:
        """The end of the operator's log."""
        return self.cluster.kubectl("logs", f"deployment/{NAME}", "--namespace", NAMESPACE, "--tail=40").stdout


def kill_container(cluster: NodeCluster, pod: dict[str, Any], container: str) -> None:
    """SIGKILL to the first process of a container."""
    cluster.the_node.containers.ctr("tasks", "kill", "--signal", "SIGKILL", container_id(pod, container))


def stop_container(cluster: NodeCluster, pod: dict[str, Any], container: str) -> None:
    """SIGSTOP to the first process of a container: it is frozen, and what runs beside it is not."""
    cluster.the_node.containers.ctr("tasks", "kill", "--signal", "SIGSTOP", container_id(pod, container))
