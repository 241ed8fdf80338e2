"""The cable between this machine and a node's network namespace, and the addresses of a cluster with a node.

Owns a veth pair and two routes on this machine: pods and Services of the node are reached through it, and the node reaches
the API server here. They are in the node's namespace or hang on a device that does: they go when the namespace goes.
Clusters on one machine differ by their number, which is theirs as long as their process holds its lock.
"""

import fcntl
import ipaddress
import json
import subprocess
from dataclasses import dataclass, field
from typing import Any, TextIO

from cluster.harness import tools
from cluster.harness.delay_line import MTU
from cluster.harness.processes import ClusterError
from cluster.harness.sandbox import Sandbox

MOST_CLUSTERS = 8
LINK_PREFIX = "srl"
CLUSTERS = "10.0.0.0/8"
"""Whatever is not a cluster's own in here belongs to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Who has which address in cluster `number`."""

    number: int
    lock: TextIO | None = field(default=None, compare=False)
    """Held as long as the addresses are ours; the kernel lets go of it when the process ends."""

    @property
    def device(self) -> str:
        """The end of the cable on this machine."""
        return f"{LINK_PREFIX}{self.number}"

    @property
    def outside(self) -> str:
        """This machine, as the node sees it."""
        return f"10.200.{self.number}.1"

    @property
    def node(self) -> str:
        return f"10.200.{self.number}.2"

    @property
    def wan(self) -> str:
        """The cluster, as another one sees it over a link; this machine does not."""
        return f"10.201.{self.number}.1"

    @property
    def pods(self) -> str:
        """All pods of the cluster."""
        return f"10.{244 - self.number}.0.0/16"

    @property
    def node_pods(self) -> str:
        """The part of `pods` that the controller manager gives to the first node."""
        return f"10.{244 - self.number}.0.0/24"

    @property
    def services(self) -> str:
        return f"10.{96 + self.number}.0.0/16"

    @property
    def dns(self) -> str:
        """The Service kube-dns."""
        return str(ipaddress.ip_network(self.services)[10])

    def release(self) -> None:
        """Let others have them."""
        if self.lock is not None:
            self.lock.close()


def claim_addresses() -> Addresses:
    """Take the first number that no other cluster of this machine has."""
    folder = tools.cache() / "numbers"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(MOST_CLUSTERS):
        lock = (folder / str(number)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        addresses = Addresses(number=number, lock=lock)
        if not any(ip_json("route", "show", "exact", cidr) for cidr in (addresses.pods, addresses.services)):
            return addresses
        lock.close()
    raise ClusterError(
        f"{MOST_CLUSTERS} clusters run on this machine, or their addresses are in use: take one down first"
    )


def ip_json(*argv: str) -> list[dict[str, Any]]:
    """What `ip -json` says on this machine."""
    done = subprocess.run(["ip", "-json", *argv], capture_output=True, text=True, check=True, timeout=20)
    answer: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    return answer


def connect(sandbox: Sandbox, addresses: Addresses) -> None:
    """Lay the cable, with routes to pods and Services through it."""
    peer = ["type", "veth", "peer", "name", "uplink", "mtu", str(MTU), "netns", str(sandbox.pid)]
    _ip("link", "add", addresses.device, "mtu", str(MTU), *peer)
    _ip("address", "add", f"{addresses.outside}/30", "dev", addresses.device)
    _ip("link", "set", addresses.device, "up")
    sandbox.run("ip", "address", "add", f"{addresses.node}/30", "dev", "uplink")
    sandbox.run("ip", "link", "set", "uplink", "up")
    sandbox.run("ip", "route", "add", "default", "via", addresses.outside)
    sandbox.run("ip", "route", "add", "unreachable", CLUSTERS)  # this machine may forward, for whatever reason
    for cidr in (addresses.pods, addresses.services):
        _ip("route", "add", cidr, "via", addresses.node, "dev", addresses.device)


def _ip(*argv: str) -> None:
    done = subprocess.run(["ip", *argv], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise ClusterError(f"ip {' '.join(argv)}: {done.stderr.strip()}")
