"""A real node: containerd, kubelet and kube-proxy in namespaces of their own, beside a control plane of this machine.

Owns the order of the start and the end of it all. What runs where:

    this machine: etcd, kube-apiserver, controller manager, scheduler (control_plane.py), which may also stand in the node's
      network namespace; the loops of provisioner and enforcer
      | veth
    node's namespaces: first process (node_init.py) -> containerd -> pods; kubelet; kube-proxy; CoreDNS as a pod
"""

import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx

from cluster.harness import enforcer, leftovers, network, node_config, tools, volumes
from cluster.harness.containers import Containers
from cluster.harness.enforcer import Enforcer
from cluster.harness.loops import Loop
from cluster.harness.node_config import Access
from cluster.harness.objects import Objects
from cluster.harness.processes import wait_until
from cluster.harness.sandbox import Sandbox
from cluster.harness.volumes import Provisioner

NODE_READY_S = 120.0
STOP_S = 120.0


class Node:
    """One node; made by `NodeCluster`."""

    objects: Objects

    def __init__(self, name: str, addresses: network.Addresses) -> None:
        leftovers.clean_stale()
        self.name = name
        self.addresses = addresses
        self.mark = leftovers.own_name()
        """Name of its folder and of its cgroups."""
        self.folder = Path(tempfile.gettempdir()) / self.mark
        self.folder.mkdir()
        self._closers: list[Callable[[], None]] = []
        leftovers.make_cgroup(self.mark)
        self.sandbox = Sandbox(self.folder, name=name)
        self.containers = Containers(self.sandbox, addresses)
        self.enforcer = Enforcer(self.sandbox)
        self.provisioner = Provisioner(self.folder / "volumes")

    @property
    def place(self) -> tuple[str, str, str]:
        """What `leftovers.traces` asks for."""
        return self.mark, self.addresses.device, str(Path(f"/proc/{self.sandbox.pid}/ns/pid").readlink())

    def connect(self) -> None:
        """Lay the cable and start the container runtime: nothing here needs an API server."""
        network.connect(self.sandbox, self.addresses)
        self.containers.start()

    def join(self, kubeconfig: Path) -> None:
        """Know the API server, which may have needed the namespaces; volumes for claims, rules for policies, from now on."""
        self.objects = Objects(kubeconfig)
        loops = [
            Loop("provisioner", kubeconfig, volumes.WATCHED, self.provisioner.step),
            Loop("enforcer", kubeconfig, enforcer.WATCHED, self.enforcer.step),
        ]
        self._closers = [*(loop.close for loop in loops), self.objects.close]

    def start_kubelet(self, access: Access, *, serving: tuple[Path, Path]) -> None:
        """Start the kubelet; it registers the node."""
        (self.folder / "resolv.conf").write_text("")
        kubeconfig = node_config.write_json(self.folder / "kubelet.kubeconfig", node_config.kubeconfig(access))
        settings = node_config.kubelet(
            self.folder, self.addresses, cgroup=self.mark, ca_cert=access.ca_cert, cert=serving[0], key=serving[1]
        )
        config = node_config.write_json(self.folder / "kubelet.json", settings)
        self._kubelet = [
            str(tools.tool("kubelet")),
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.addresses.node}",
            f"--root-dir={self.folder / 'kubelet'}",
            "--v=2",
        ]
        self.sandbox.start("kubelet", self._kubelet)

    def start_proxy(self, access: Access) -> None:
        """Start kube-proxy: Services by iptables."""
        kubeconfig = node_config.write_json(self.folder / "proxy.kubeconfig", node_config.kubeconfig(access))
        argv = [
            str(tools.tool("kube-proxy")),
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={self.addresses.pods}",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
            "--iptables-min-sync-period=100ms",
            "--oom-score-adj=0",
        ]
        self.sandbox.start("kube-proxy", argv)

    def restart_kubelet(self, *, kill: bool = False) -> None:
        """End the kubelet and start it again; pods go on meanwhile."""
        self.stop_kubelet(kill=kill)
        self.start_kubelet_again()

    def start_kubelet_again(self) -> None:
        """Start the kubelet after `stop_kubelet`, wait until it has said that it is there."""
        renewed = self._renewed()
        self.sandbox.start("kubelet", self._kubelet)
        self.sandbox.wait_ready(
            "kubelet", lambda: self._renewed() != renewed, what="the node's lease was renewed", deadline_s=NODE_READY_S
        )
        self.wait_ready()
        self.sandbox.wait_ready(
            "kubelet", self._knows_its_pods, what="the kubelet knew its pods again", deadline_s=NODE_READY_S
        )

    def _knows_its_pods(self) -> bool:
        """Until then it answers to exec and logs that a pod does not exist."""
        answer = self.objects.api.get(f"/api/v1/nodes/{self.name}/proxy/pods")
        known = {pod["metadata"]["uid"] for pod in answer.body.get("items") or ()} if answer.ok else set()
        bound = {
            pod["metadata"]["uid"]
            for pod in self.objects.list("/api/v1/pods")
            if pod["spec"].get("nodeName") == self.name and "deletionTimestamp" not in pod["metadata"]
        }
        return bound <= known

    def _renewed(self) -> str | None:
        """When the kubelet last said that it is there."""
        lease = self.objects.get(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self.name}")
        return None if lease is None else str(lease["spec"].get("renewTime"))

    def stop_kubelet(self, *, kill: bool = False) -> None:
        """End the kubelet alone."""
        self.sandbox.stop("kubelet", signal_number=signal.SIGKILL if kill else signal.SIGTERM, deadline_s=STOP_S)

    def fetch(self, url: str) -> str:
        """What a pod or Service answers to this machine."""
        return httpx.get(url, timeout=30, trust_env=False).raise_for_status().text

    def wait_ready(self) -> None:
        """Wait until the kubelet says that the node is ready."""
        self.sandbox.wait_ready("kubelet", self._is_ready, what=f"node {self.name} is Ready", deadline_s=NODE_READY_S)

    def _is_ready(self) -> bool:
        node = self.objects.get(f"/api/v1/nodes/{self.name}")
        conditions = (node or {}).get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def wait_policies(self) -> None:
        """Wait until the NetworkPolicies are enforced as they stand."""
        self.enforcer.wait_current(self.objects)

    def volume_path(self, namespace: str, claim: str) -> Path:
        """Where the data of a claim lie on this machine."""
        return volumes.path_of_claim(self.objects, namespace, claim)

    def wait_volume(self, namespace: str, claim: str) -> Path:
        """Wait until a claim is bound."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}"
        wait_until(
            lambda: (self.objects.get(path) or {}).get("status", {}).get("phase") == "Bound",
            what=f"claim {namespace}/{claim} to be bound",
            deadline_s=STOP_S,
        )
        return self.volume_path(namespace, claim)

    def close(self) -> None:
        """End everything at once; nothing of the node is left on this machine."""
        for close in self._closers:
            close()
        self.sandbox.close()
        leftovers.remove_cgroup(self.mark)
        shutil.rmtree(self.folder)
