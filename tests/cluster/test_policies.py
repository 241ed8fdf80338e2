"""NetworkPolicies are held on the node: who reaches whom, as a matrix of real connections under each kind of policy."""

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.harness import policies
from cluster.harness.cluster import NodeCluster
from cluster.harness.images import WORKER_IMAGE
from cluster.harness.node import Node
from cluster.harness.pods import READY_S, execute, make_namespace, python_pod, wait_ready
from cluster.harness.processes import wait_until

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

PORTS = (8080, 9090)
SERVE = f"""
import socketserver, threading
for port in {PORTS}:
    server = socketserver.ThreadingTCPServer(("0.0.0.0", port), socketserver.BaseRequestHandler)
    threading.Thread(target=server.serve_forever).start()
print("serving", flush=True)
"""
PROBE = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reach(target):
    try:
        socket.create_connection((target[1], target[2]), timeout=1).close()
        return True
    except OSError:
        return False
targets = json.loads(sys.argv[1])
with ThreadPoolExecutor(16) as pool:
    print(json.dumps([target for target, there in zip(targets, pool.map(reach, targets)) if there]))
"""
PODS = ("a", "b", "c", "far")
"""`far` is in a namespace of its own."""
Flow = tuple[str, str, int]
EVERY = {(source, target, port) for source in PODS for target in PODS for port in PORTS}


class Field:
    """Four serving pods in two namespaces."""

    def __init__(self, cluster: NodeCluster, node: Node) -> None:
        self.cluster, self.node = cluster, node
        self.tag = secrets.token_hex(3)
        self.near, self.away = f"near-{self.tag}", f"away-{self.tag}"
        for name in (self.near, self.away):
            make_namespace(node.objects, name, {"place": name.split("-")[0]})
        ports = [{"containerPort": 8080, "name": "web"}, {"containerPort": 9090, "name": "other"}]
        probe = {"tcpSocket": {"port": 9090}, "periodSeconds": 1}
        for name in PODS:
            main = {"ports": ports, "readinessProbe": probe}
            cluster.apply(python_pod(name, self.home(name), SERVE, WORKER_IMAGE, container=main))
        ready = {name: wait_ready(node.objects, self.home(name), name) for name in PODS}
        self.address = {name: pod["status"]["podIP"] for name, pod in ready.items()}

    def home(self, name: str) -> str:
        return self.away if name == "far" else self.near

    def flows(self, *, wanted: set[Flow]) -> set[Flow]:
        """Every connection that is made, tried from within the pods; again where one of `wanted` took longer than a probe waits."""
        self.node.wait_policies()
        found: set[Flow] = set()

        def tried() -> bool:
            with ThreadPoolExecutor(len(PODS)) as pool:
                found.update(*pool.map(self._from, PODS))
            return wanted <= found

        wait_until(tried, what=f"the connections {sorted(wanted)}", deadline_s=READY_S)
        return found

    def _from(self, source: str) -> set[Flow]:
        targets = [(target, self.address[target], port) for target in PODS for port in PORTS]
        done = execute(self.cluster, self.home(source), source, "python3", "-c", PROBE, json.dumps(targets))
        return {(source, target, port) for target, _, port in json.loads(done.stdout)}

    def set_policies(self, *specs: dict[str, Any]) -> None:
        """Replace all policies of the near namespace."""
        path = f"/apis/networking.k8s.io/v1/namespaces/{self.near}/networkpolicies"
        for old in self.node.objects.list(path):
            self.node.objects.delete(f"{path}/{old['metadata']['name']}")
        for number, spec in enumerate(specs):
            metadata = {"name": f"policy-{number}", "namespace": self.near}
            self.cluster.apply(
                {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
            )


@pytest.fixture(scope="module")
def field(node_cluster: NodeCluster) -> Iterator[Field]:
    made = Field(node_cluster, node_cluster.the_node)
    yield made
    for name in (made.near, made.away):
        node_cluster.the_node.objects.delete(f"/api/v1/namespaces/{name}")


def app(name: str) -> dict[str, Any]:
    return {"matchLabels": {"app": name}}


def to(target: str, *, but_from: tuple[str, ...] = (), ports: tuple[int, ...] = PORTS) -> set[Flow]:
    """Connections to a pod that are refused; from itself it is always reached."""
    return {(source, target, port) for source in PODS for port in ports if source not in (*but_from, target)}


def out_of(source: str, *, but_to: tuple[str, ...] = (), ports: tuple[int, ...] = PORTS) -> set[Flow]:
    return {(source, target, port) for target in PODS for port in ports if target not in (*but_to, source)}


CLOSED: dict[str, tuple[list[dict[str, Any]], set[Flow]]] = {
    "nothing": ([], set()),
    "all closed to a": ([{"podSelector": app("a"), "policyTypes": ["Ingress"]}], to("a")),
    "b alone to a, on one port": (
        [{"podSelector": app("a"), "ingress": [{"from": [{"podSelector": app("b")}], "ports": [{"port": 8080}]}]}],
        to("a", but_from=("b",)) | {("b", "a", 9090)},
    ),
    "a port by name, from everybody": (
        [{"podSelector": app("a"), "ingress": [{"ports": [{"port": "web"}]}]}],
        to("a", ports=(9090,)),
    ),
    "a range of ports": (
        [{"podSelector": app("a"), "ingress": [{"ports": [{"port": 9000, "endPort": 9100}]}]}],
        to("a", ports=(8080,)),
    ),
    "the other namespace alone": (
        [
            {
                "podSelector": app("a"),
                "ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"place": "away"}}}]}],
            }
        ],
        to("a", but_from=("far",)),
    ),
    "a block of addresses but some": (
        [{"podSelector": app("a"), "ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["{c}/32"]}}]}]}],
        {("c", "a", port) for port in PORTS},
    ),
    "a goes out to b alone": (
        [{"podSelector": app("a"), "policyTypes": ["Egress"], "egress": [{"to": [{"podSelector": app("b")}]}]}],
        out_of("a", but_to=("b",)),
    ),
    "a goes out to a named port": (
        [{"podSelector": app("a"), "policyTypes": ["Egress"], "egress": [{"ports": [{"port": "other"}]}]}],
        out_of("a", ports=(8080,)),
    ),
    "two policies add up": (
        [
            {"podSelector": app("a"), "ingress": [{"from": [{"podSelector": app("b")}]}]},
            {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": app("c")}]}]},
        ],
        to("a", but_from=("b", "c")) | to("b", but_from=("c",)) | to("c"),
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_who_reaches_whom(field: Field, name: str) -> None:
    specs, closed = CLOSED[name]
    field.set_policies(*json.loads(json.dumps(specs).replace("{c}", field.address["c"])))
    assert EVERY - field.flows(wanted=EVERY - closed) == closed


def test_probes_pass_and_this_machine_does_not(field: Field) -> None:
    field.set_policies({"podSelector": app("a"), "policyTypes": ["Ingress"]})
    field.node.wait_policies()
    wait_ready(field.node.objects, field.near, "a")
    proxy = f"/api/v1/namespaces/{field.near}/pods/a:8080/proxy/"
    assert field.cluster.kubectl("get", "--raw", proxy, "--request-timeout=2s", check=False).returncode != 0


@pytest.mark.parametrize(
    ("operator", "values", "taken"),
    [("In", ["x"], True), ("NotIn", ["x"], False), ("Exists", None, True), ("DoesNotExist", None, False)],
)
def test_selectors_by_expression(operator: str, values: list[str] | None, taken: bool) -> None:
    selector = {"matchExpressions": [{"key": "k", "operator": operator, "values": values}]}
    assert policies.matches(selector, {"k": "x"}) is taken
    assert policies.matches(selector, {}) is not taken
