"""A real node does what Kubernetes promises: pods, logs, exec, DNS, Services, volumes, and a kubelet that comes back."""

from pathlib import Path

import pytest

from cluster.harness import host_python, pods
from cluster.harness.cluster import NodeCluster
from cluster.harness.images import WORKER_IMAGE
from cluster.harness.node import Node
from cluster.harness.node_config import HOST_PYTHON_RUNTIME
from cluster.harness.pods import execute, logs, python_pod, wait_ended, wait_ready, wait_statefulset
from cluster.harness.processes import wait_until

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

SERVE = """
import http.server, os
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = os.environ["HOSTNAME"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
print("serving", flush=True)
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Answer).serve_forever()
"""
FETCH = (
    "python3",
    "-c",
    "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())",
)
READY = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}}


def serving_pod(name: str, namespace: str) -> dict[str, object]:
    return python_pod(name, namespace, SERVE, WORKER_IMAGE, container=READY)


def service(name: str, namespace: str) -> dict[str, object]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def fetch(cluster: NodeCluster, namespace: str, pod: str, url: str) -> str:
    return execute(cluster, namespace, pod, *FETCH, url).stdout.strip()


def test_a_pod_runs_and_its_log_is_read(node_cluster: NodeCluster, node: Node, node_namespace: str) -> None:
    code = "import os; print('user', os.getuid()); raise SystemExit(3)"
    node_cluster.apply(python_pod("one", node_namespace, code, WORKER_IMAGE))
    ended = wait_ended(node.objects, node_namespace, "one")
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert logs(node_cluster, node_namespace, "one") == "user 10001\n"


def test_names_resolve_and_a_service_reaches_its_pod_also_from_itself(
    node_cluster: NodeCluster, node: Node, node_namespace: str
) -> None:
    node_cluster.apply(
        service("web", node_namespace), serving_pod("web", node_namespace), serving_pod("other", node_namespace)
    )
    for name in ("web", "other"):
        wait_ready(node.objects, node_namespace, name)
    # The node's rules for a Service follow the pod's readiness, they do not come before it; until then it refuses.
    wait_until(
        lambda: "web" in execute(node_cluster, node_namespace, "other", *FETCH, "http://web/", check=False).stdout,
        what="the Service to reach its pod",
        deadline_s=pods.READY_S,
    )
    names = ("web", f"web.{node_namespace}", f"web.{node_namespace}.svc", f"web.{node_namespace}.svc.cluster.local")
    assert [fetch(node_cluster, node_namespace, "other", f"http://{name}/") for name in names] == ["web"] * 4
    # Not by the short name: that is the pod's own host name, which leads past the Service.
    assert fetch(node_cluster, node_namespace, "web", f"http://web.{node_namespace}/") == "web"
    proxied = f"/api/v1/namespaces/{node_namespace}/services/http:web:80/proxy/"
    assert node_cluster.kubectl("get", "--raw", proxied).stdout == "web"


def test_a_stateful_set_with_a_sidecar_writes_its_claim(
    node_cluster: NodeCluster, node: Node, node_namespace: str
) -> None:
    node_cluster.apply(journal_set("journal", node_namespace))
    wait_statefulset(node.objects, node_namespace, "journal")
    assert execute(node_cluster, node_namespace, "journal-0", "cat", "/data/note", container="main").stdout == "sidecar"
    path = node.volume_path(node_namespace, "data-journal-0")
    assert (path / "note").read_text() == "sidecar"
    assert (path / "note").stat().st_uid == 10001
    node.objects.delete(f"/apis/apps/v1/namespaces/{node_namespace}/statefulsets/journal")
    pods.wait_gone(node.objects, f"/api/v1/namespaces/{node_namespace}/pods/journal-0")
    claim = f"/api/v1/namespaces/{node_namespace}/persistentvolumeclaims/data-journal-0"
    node.objects.delete(claim)
    pods.wait_gone(node.objects, claim)
    wait_until(lambda: not path.exists(), what="the claim's directory to be removed", deadline_s=pods.READY_S)


def journal_set(name: str, namespace: str) -> dict[str, object]:
    """As the trainer's: a native sidecar writes a volume, the main container starts after it is ready."""
    write = "import pathlib, time; pathlib.Path('/data/note').write_text('sidecar'); time.sleep(3600)"
    mounts = [{"name": "data", "mountPath": "/data"}]
    probe = {"exec": {"command": ["cat", "/data/note"]}, "periodSeconds": 1}
    body = python_pod(name, namespace, "import time; time.sleep(3600)", WORKER_IMAGE, restartPolicy="Always")
    main = body["spec"]["containers"][0]
    main = {**main, "volumeMounts": [*main["volumeMounts"], *mounts]}
    sidecar = {**main, "name": "sidecar", "command": ["python3", "-c", write], "restartPolicy": "Always"}
    template = {**body["spec"], "initContainers": [{**sidecar, "startupProbe": probe}], "containers": [main]}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": 1,
            "serviceName": name,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": template},
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
        },
    }


def test_the_machines_python_runs_in_every_container(
    node_cluster: NodeCluster, node: Node, node_namespace: str
) -> None:
    code = "import sys, torch, streamrl_workers; print(sys.prefix, torch.ones(2).sum().item())"
    pod = python_pod("torch", node_namespace, code, WORKER_IMAGE, runtimeClassName=HOST_PYTHON_RUNTIME)
    pod["spec"]["containers"][0]["command"][0] = "python"
    check = {**pod["spec"]["containers"][0], "name": "first", "command": ["python", "-c", "import streamrl"]}
    pod["spec"]["initContainers"] = [check]
    node_cluster.apply(pod)
    ended = wait_ended(node.objects, node_namespace, "torch")
    said = logs(node_cluster, node_namespace, "torch")
    assert ended["status"]["phase"] == "Succeeded", said
    assert said.split()[1] == "2.0"


def test_the_machines_python_comes_by_claims_too(node_cluster: NodeCluster, node: Node, node_namespace: str) -> None:
    volumes, mounts, env = host_python.worker_volume(node.objects, node_namespace)
    code = "import pathlib, streamrl; pathlib.Path(streamrl.__file__).with_name('new').touch()"
    extra = {"volumeMounts": mounts, "env": env, "command": ["python", "-c", code]}
    node_cluster.apply(python_pod("claims", node_namespace, "", WORKER_IMAGE, volumes=volumes, container=extra))
    wait_ended(node.objects, node_namespace, "claims")
    assert "Read-only file system" in logs(node_cluster, node_namespace, "claims")


def test_pods_go_on_while_the_kubelet_is_away(node_cluster: NodeCluster, node: Node, node_namespace: str) -> None:
    node_cluster.apply(service("web", node_namespace), serving_pod("web", node_namespace))
    before = wait_ready(node.objects, node_namespace, "web")
    node.stop_kubelet(kill=True)
    address = before["status"]["podIP"]
    assert node.fetch(f"http://{address}:8080/") == "web"
    node.start_kubelet_again()
    after = wait_ready(node.objects, node_namespace, "web")
    assert before["metadata"]["uid"] == after["metadata"]["uid"]
    assert [one["restartCount"] for one in after["status"]["containerStatuses"]] == [0]
    assert execute(node_cluster, node_namespace, "web", "echo", "here").stdout == "here\n"
    node_cluster.apply(serving_pod("new", node_namespace))
    wait_ready(node.objects, node_namespace, "new")


def test_what_a_failure_needs_is_kept(
    node_cluster: NodeCluster, node: Node, node_namespace: str, tmp_path: Path
) -> None:
    node_cluster.apply(python_pod("said", node_namespace, "print('last words')", WORKER_IMAGE))
    wait_ended(node.objects, node_namespace, "said")
    folder = node_cluster.collect_logs(tmp_path / "logs")
    kept = {path.name for path in folder.iterdir()}
    assert {"kubelet.log", "containerd.log", "kube-apiserver.log", "objects.yaml", "events.txt", "nft.txt"} <= kept
    assert any("last words" in log.read_text() for log in folder.glob("pods/*said*/main/*.log"))
