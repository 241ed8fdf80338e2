"""Two clusters with a link between them: each is one by itself, the link is the only way, and what passes it is counted."""

import json
import subprocess
from collections.abc import Iterator

import pytest

from cluster.harness import pods, tools
from cluster.harness.api import Api
from cluster.harness.cluster import NodeCluster
from cluster.harness.images import WORKER_IMAGE
from cluster.harness.pods import execute, python_pod, wait_ready
from cluster.harness.processes import wait_until
from cluster.harness.two_clusters import TwoClusters
from cluster.operators import Operator

pytestmark = [pytest.mark.node, pytest.mark.soak, pytest.mark.timeout(900)]

COMMAND_S = 120
PORT, NODE_PORT = 8080, 30080
MEGABYTE = 1_000_000
SLEEP = "import time; time.sleep(3600)"
SERVE = f"""
import http.server
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "{MEGABYTE}")
        self.end_headers()
        self.wfile.write(bytes({MEGABYTE}))
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", {PORT}), Answer).serve_forever()
"""
READY = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}
FETCH = """
import sys, urllib.request
try:
    print(len(urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read()))
except OSError as error:
    print(error)
"""

VERSION = """
import ssl, sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=60, context=ssl._create_unverified_context()).read().decode())
"""


@pytest.fixture(scope="module")
def talkers(linked_clusters: TwoClusters) -> Iterator[str]:
    """A pod in the hub that serves a megabyte at a NodePort, and one in the member; the namespace of both."""
    namespace = "talk"
    for cluster in (linked_clusters.hub, linked_clusters.member):
        pods.make_namespace(cluster.the_node.objects, namespace, {})
    linked_clusters.hub.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "namespace": namespace},
            "spec": {
                "type": "NodePort",
                "selector": {"app": "web"},
                "ports": [{"port": PORT, "nodePort": NODE_PORT}],
            },
        },
        python_pod("web", namespace, SERVE, WORKER_IMAGE, container=READY),
    )
    linked_clusters.member.apply(python_pod("one", namespace, SLEEP, WORKER_IMAGE))
    wait_ready(linked_clusters.hub.the_node.objects, namespace, "web")
    wait_ready(linked_clusters.member.the_node.objects, namespace, "one")
    yield namespace
    for cluster in (linked_clusters.hub, linked_clusters.member):
        cluster.the_node.objects.delete(f"/api/v1/namespaces/{namespace}")


def fetched(two: TwoClusters, namespace: str, host: str, port: int = NODE_PORT, *, patience_s: float = 1) -> str:
    """What the member's pod gets."""
    words = ("python3", "-c", FETCH, f"http://{host}:{port}/", str(patience_s))
    return execute(two.member, namespace, "one", *words).stdout.strip()


def from_hub(two: TwoClusters, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run kubectl as a process of the hub, for the member."""
    command = [str(tools.tool("kubectl")), "--kubeconfig", str(two.seen_from_hub()), *arguments]
    return subprocess.run(
        [*two.hub.settings.enter, *command], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )


def uid(cluster: NodeCluster) -> str:
    """Of the namespace kube-system: by it clusters are told apart."""
    with Api(cluster.kubeconfig) as api:
        return str(api.get("/api/v1/namespaces/kube-system").expect()["metadata"]["uid"])


def test_each_answers_to_its_own_kubeconfig_and_to_no_other(two_clusters: TwoClusters) -> None:
    assert uid(two_clusters.hub) != uid(two_clusters.member)
    with Api(two_clusters.hub.kubeconfig_for("jane")) as jane:
        assert jane.get("/api/v1/namespaces").code == 403
    foreign = two_clusters.member.kubectl(
        "get", "nodes", "--server", two_clusters.member.server, kubeconfig=two_clusters.hub.kubeconfig, check=False
    )
    assert foreign.returncode
    assert "certificate signed by unknown authority" in foreign.stderr


def test_the_hub_reaches_the_member_over_the_link_alone(two_clusters: TwoClusters) -> None:
    before = two_clusters.link.shape()
    told = from_hub(two_clusters, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}")
    assert (told.stdout, told.stderr) == (uid(two_clusters.member), "")
    after = two_clusters.link.shape()
    assert after.there.bytes > before.there.bytes
    assert after.back.bytes > before.back.bytes
    around = from_hub(two_clusters, "get", "nodes", "--server", two_clusters.member.server)
    assert "no route to host" in around.stderr
    two_clusters.link.cut()
    assert from_hub(two_clusters, "get", "nodes", "--request-timeout=2s").returncode
    assert uid(two_clusters.member)  # this machine's tests have their own way


def test_a_pod_of_the_member_reaches_what_the_hub_exposes_and_bytes_are_counted(
    two_clusters: TwoClusters, talkers: str
) -> None:
    exposed = two_clusters.hub.addresses.wan
    wait_until(
        lambda: fetched(two_clusters, talkers, exposed, patience_s=30) == str(MEGABYTE),
        what="the NodePort to be served",
        deadline_s=pods.READY_S,
    )
    before = two_clusters.link.shape().there.bytes
    assert fetched(two_clusters, talkers, exposed, patience_s=60) == str(MEGABYTE)
    assert MEGABYTE < two_clusters.link.shape().there.bytes - before < 1.1 * MEGABYTE
    (web,) = two_clusters.hub.get("pods", "-n", talkers)["items"]
    assert "No route to host" in fetched(two_clusters, talkers, web["status"]["podIP"], PORT)
    assert "No route to host" in fetched(two_clusters, talkers, two_clusters.hub.addresses.node)


def test_a_pod_of_the_hub_reaches_the_members_api_server(two_clusters: TwoClusters, talkers: str) -> None:
    url = f"https://{two_clusters.member.addresses.wan}:{two_clusters.member.port}/version"
    told = execute(two_clusters.hub, talkers, "web", "python3", "-c", VERSION, url).stdout
    assert json.loads(told)["major"] == "1"


def test_nothing_passes_a_cut_and_all_passes_again(two_clusters: TwoClusters, talkers: str) -> None:
    exposed = two_clusters.hub.addresses.wan
    before = two_clusters.link.cut()
    assert "timed out" in fetched(two_clusters, talkers, exposed)
    after = two_clusters.link.heal()
    assert (after.there.bytes, after.back.bytes) == (before.there.bytes, before.back.bytes)
    assert after.back.lost > before.back.lost
    assert fetched(two_clusters, talkers, exposed, patience_s=60) == str(MEGABYTE)


def test_an_operator_of_the_hub_runs_in_its_network(two_clusters: TwoClusters, talkers: str) -> None:
    operator = Operator(two_clusters.hub, talkers).start().wait_until_leading()
    assert operator.stop() == 0, operator.tail()


def test_a_member_made_anew_is_another_cluster_at_the_same_address(two_clusters: TwoClusters) -> None:
    old, seen = uid(two_clusters.member), two_clusters.seen_from_hub()
    address = two_clusters.member.server
    kept = seen.read_text()
    two_clusters.remake_member()
    assert two_clusters.member.server == address
    assert uid(two_clusters.member) != old
    told = from_hub(two_clusters, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}")
    assert (told.stdout, told.stderr) == (uid(two_clusters.member), "")
    seen = two_clusters.hub.folder / "kept.json"
    seen.write_text(kept)
    command = [*two_clusters.hub.settings.enter, str(tools.tool("kubectl")), "--kubeconfig", str(seen), "get", "nodes"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert "certificate signed by unknown authority" in refused.stderr
