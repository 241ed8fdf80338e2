"""A whole cluster on this machine: a control plane and one real node (level 2).

    with NodeCluster() as cluster:
        cluster.load("worker-test")
        cluster.kubectl("run", "one", "--image", WORKER_IMAGE, ...)

Is a `ControlPlane` with `.node`; leaves nothing, however it ends.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
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
APART_PORT = 6443
"""Of an API server that has a network namespace to itself: a cluster that is made anew is found where it was."""


class NodeCluster(ControlPlane):
    """A control plane that nodes can reach, and a node; `apart`: the control plane too is in the node's network namespace.

    `addresses` that are given stay the giver's.
    """

    def __init__(self, *, apart: bool = False, addresses: network.Addresses | None = None) -> None:
        if lacking := missing_packages():
            raise ClusterError(f"a node needs more of this machine: apt-get install {' '.join(lacking)}")
        leftovers.clean_stale()
        needed = [images.pause(), images.coredns()]
        for image in needed:
            images.archive(image)
        self.addresses = addresses or network.claim_addresses()
        self._claimed = addresses is None
        self.node: Node | None = Node(NODE_NAME, self.addresses)
        try:
            self.node.connect()
            super().__init__(_settings(self.addresses, self.node if apart else None))
        except BaseException:
            self._close_node()
            raise
        try:
            self._start_node(self.node, needed)
        except BaseException:
            self.close()
            raise

    def _start_node(self, node: Node, needed: list[images.Image]) -> None:
        for image in needed:
            node.containers.load(image)
        node.join(self.kubeconfig)
        for body in manifests.cluster_objects(node.addresses):
            node.objects.apply(body)
        serving = self.issue("kubelet-serving", f"system:node:{NODE_NAME}", hosts=(NODE_NAME, node.addresses.node))
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
        self._close_node()
        super().close()
        if self._claimed:
            self.addresses.release()

    def _close_node(self) -> None:
        if self.node is not None:
            node, self.node = self.node, None
            node.close()


def _settings(addresses: network.Addresses, inside: Node | None) -> Settings:
    common = Settings(
        scheduler=True,
        bind_address="0.0.0.0",
        advertise_address=addresses.outside,
        service_cidr=addresses.services,
        cluster_cidr=addresses.pods,
    )
    if inside is None:
        return common
    return replace(
        common,
        advertise_address=addresses.node,
        enter=inside.sandbox.enter_network,
        host=addresses.node,
        port=APART_PORT,
        hosts=(addresses.wan,),
    )


@contextlib.contextmanager
def open_node_cluster() -> Iterator[NodeCluster]:
    """A cluster with a node for the block, with the image for test pods."""
    with NodeCluster() as cluster:
        cluster.load("worker-test")
        yield cluster
