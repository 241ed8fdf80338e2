"""A whole cluster on this machine: a control plane and one real node (level 2).

    with NodeCluster() as cluster:
        cluster.load("worker-test")
        cluster.kubectl("run", "one", "--image", WORKER_IMAGE, ...)

Is a `ControlPlane` with `.node`; leaves nothing, however it ends.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cluster.harness import images, leftovers, manifests, network, pods
from cluster.harness.containers import missing_packages
from cluster.harness.control_plane import ControlPlane
from cluster.harness.flags import Settings
from cluster.harness.node import Node
from cluster.harness.node_config import Access
from cluster.harness.objects import Object
from cluster.harness.processes import ClusterError

NODE_NAME = "node-1"
SYSTEM_READY_S = 120.0


class NodeCluster(ControlPlane):
    """A control plane that nodes can reach, and a node."""

    def __init__(self) -> None:
        if lacking := missing_packages():
            raise ClusterError(f"a node needs more of this machine: apt-get install {' '.join(lacking)}")
        leftovers.clean_stale()
        needed = [images.pause(), images.coredns()]
        for image in needed:
            images.archive(image)
        self.addresses = addresses = network.claim_addresses()
        self.node: Node | None = None
        super().__init__(
            Settings(
                scheduler=True,
                bind_address="0.0.0.0",
                advertise_address=addresses.outside,
                service_cidr=addresses.services,
                cluster_cidr=addresses.pods,
            )
        )
        try:
            self._start_node(addresses, needed)
        except BaseException:
            self.close()
            raise

    def _start_node(self, addresses: network.Addresses, needed: list[images.Image]) -> None:
        self.node = node = Node(NODE_NAME, addresses, self.kubeconfig)
        node.connect()
        for image in needed:
            node.containers.load(image)
        for body in manifests.cluster_objects(addresses):
            node.objects.apply(body)
        node.start_loops()
        serving = self.issue("kubelet-serving", f"system:node:{NODE_NAME}", hosts=(NODE_NAME, addresses.node))
        node.start_kubelet(self._access(f"system:node:{NODE_NAME}", ("system:nodes",)), serving=serving)
        node.start_proxy(self._access("system:kube-proxy"))
        node.wait_ready()
        pods.wait_deployment(node.objects, "kube-system", "coredns", deadline_s=SYSTEM_READY_S)

    def _access(self, user: str, groups: tuple[str, ...] = ()) -> Access:
        cert, key = self.issue(f"node-{user.replace(':', '-')}", user, groups)
        assert self.settings.advertise_address is not None
        return Access(
            server=f"https://{self.settings.advertise_address}:{self.port}",
            server_name="kubernetes",
            ca_cert=self.files.authority.cert,
            cert=cert,
            key=key,
        )

    @property
    def the_node(self) -> Node:
        """The node, which is there from the start to the end."""
        assert self.node is not None
        return self.node

    def load(self, image: str | images.Image) -> str:
        """Have an image on the node, by name (`images.NAMED`) or as given; returns the name for pods."""
        return self.the_node.containers.load(images.NAMED[image]() if isinstance(image, str) else image)

    def apply(self, *bodies: Object) -> None:
        """Apply objects."""
        for body in bodies:
            self.the_node.objects.apply(body)

    def collect_logs(self, folder: Path) -> Path:
        """Write what explains a failure into a folder: logs of all parts and pods, objects, events."""
        return pods.collect_logs(self, self.the_node, folder)

    def close(self) -> None:
        """End the node, then the control plane."""
        if self.node is not None:
            node, self.node = self.node, None
            node.close()
        super().close()
        self.addresses.release()


@contextlib.contextmanager
def open_node_cluster() -> Iterator[NodeCluster]:
    """A cluster with a node for the block, with the image for test pods."""
    with NodeCluster() as cluster:
        cluster.load("worker-test")
        yield cluster
