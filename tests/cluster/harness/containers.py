"""containerd of a node: started, asked, and given images."""

import json
import shutil
from pathlib import Path

from cluster.harness import host_python, images, node_config
from cluster.harness.network import Addresses
from cluster.harness.processes import ClusterError
from cluster.harness.sandbox import Sandbox

READY_S = 180.0
IMPORT_S = 1200.0
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    f"{node_config.CNI_PROGRAMS}/bridge": "containernetworking-plugins",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "nsenter": "util-linux",
    "gcc": "gcc libc6-dev",
}
"""Program → Debian's package."""


def missing_packages() -> list[str]:
    """What must be installed before a node can be started."""
    return sorted({package for program, package in PACKAGES.items() if shutil.which(program) is None})


class Containers:
    """The container runtime in a node's namespaces."""

    def __init__(self, sandbox: Sandbox, addresses: Addresses) -> None:
        self._sandbox = sandbox
        self._addresses = addresses
        self._imported: set[Path] = set()

    def start(self) -> None:
        """Write the configuration, start containerd, wait until it answers."""
        folder = self._sandbox.folder
        (folder / "containerd.toml").write_text(node_config.containerd(folder))
        default = json.loads(self._sandbox.run("ctr", "oci", "spec").stdout)
        node_config.write_json(folder / "host-python.json", node_config.host_python_spec(default, host_python.paths()))
        node_config.write_json(folder / "cni" / "10-pods.conflist", node_config.cni(self._addresses))
        self._sandbox.start("containerd", ["containerd", "--config", str(folder / "containerd.toml")])
        self._sandbox.wait_ready("containerd", self._answers, what="containerd answered", deadline_s=READY_S)

    def _answers(self) -> bool:
        return self.ctr("version", check=False) is not None

    def ctr(self, *arguments: str, check: bool = True, deadline_s: float = 60.0) -> str | None:
        """Run `ctr` for Kubernetes' images and containers; None where it failed and `check` is off."""
        socket = node_config.CONTAINERD_SOCKET
        done = self._sandbox.run(
            "ctr", "--address", socket, "--namespace", "k8s.io", *arguments, check=check, deadline_s=deadline_s
        )
        return done.stdout if done.returncode == 0 else None

    def load(self, image: images.Image) -> str:
        """Build the image if the cache has none, import it; returns its name."""
        archive = images.archive(image)
        if archive not in self._imported:
            self.ctr("images", "import", str(archive), deadline_s=IMPORT_S)
            self._imported.add(archive)
        if image.name not in (self.ctr("images", "list", "--quiet") or "").split():
            raise ClusterError(f"{archive} holds no image {image.name}")
        return image.name
