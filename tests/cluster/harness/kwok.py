"""Nodes and pods that only say that they run, by KWOK: for scale tests. Needs a control plane with a scheduler.

    with ControlPlane(Settings(scheduler=True)) as plane:
        kwok.start(plane, nodes=20)

Pods on its nodes become Running and Ready within a second or two and stay so; nothing runs in them.
"""

from cluster.harness import tools
from cluster.harness.control_plane import ControlPlane
from cluster.harness.flags import LOOPBACK
from cluster.harness.processes import Server, wait_until
from support.ports import free_port

READY_S = 60.0
LEASE_S = 40
"""Of a node, as a kubelet's. Without a Lease KWOK tells of a node once, and after 50 s its pods are not ready any more."""
MARK = "kwok.x-k8s.io/node"
"""Annotation of the nodes that KWOK plays."""
_ROOM = {"cpu": "256", "memory": "1Ti", "pods": "10000", "nvidia.com/gpu": "64"}


def start(plane: ControlPlane, *, nodes: int) -> Server:
    """Start KWOK beside the control plane, with so many nodes; ends with it."""
    port = free_port()
    command = (
        tools.tool("kwok"),
        f"--kubeconfig={plane.kubeconfig}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={MARK}=fake",
        f"--node-lease-duration-seconds={LEASE_S}",
        f"--server-address={LOOPBACK}:{port}",
    )
    server = Server("kwok", command, log=plane.folder / "kwok.log", mark=plane.mark)
    server.start()
    for number in range(nodes):
        plane.api.create("/api/v1/nodes", _node(f"kwok-{number}")).expect()
    server.wait(lambda: _ready(plane) == nodes, deadline_s=READY_S)
    return server


def _node(name: str) -> dict[str, object]:
    return {
        "metadata": {"name": name, "annotations": {MARK: "fake"}, "labels": {"kubernetes.io/hostname": name}},
        "status": {"capacity": _ROOM, "allocatable": _ROOM},
    }


def _ready(plane: ControlPlane) -> int:
    items = plane.api.get("/api/v1/nodes").expect()["items"]
    states = [{one["type"]: one["status"] for one in node["status"].get("conditions", [])} for node in items]
    return sum(state.get("Ready") == "True" for state in states)


def wait_running(plane: ControlPlane, namespace: str, count: int, *, deadline_s: float = READY_S) -> None:
    """Wait until so many pods of a namespace say that they run."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    query = {"fieldSelector": "status.phase=Running"}
    wait_until(
        lambda: len(plane.api.get(path, **query).expect()["items"]) >= count,
        what=f"{count} running pods in {namespace}",
        deadline_s=deadline_s,
    )
