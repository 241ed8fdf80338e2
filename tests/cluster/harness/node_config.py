"""Configuration of a node's programs as text: containerd, CNI, kubelet, kube-proxy, kubeconfigs. Starts nothing.

Fits Debian 12's containerd 1.6 on cgroup v1 and v2, as root without CAP_SYS_RESOURCE.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.harness.delay_line import MTU
from cluster.harness.network import Addresses

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
"""In the node's own /run."""
PAUSE_IMAGE = "streamrl.test/pause:1"
CNI_PROGRAMS = "/usr/lib/cni"
HOST_PYTHON_RUNTIME = "host-python"
"""Runtime class whose containers all see this machine's virtual environment, read-only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a program of the node reaches the API server."""

    server: str
    server_name: str
    """The name that the API server's certificate is checked for."""
    ca_cert: Path
    cert: Path
    key: Path


def kubeconfig(access: Access) -> dict[str, Any]:
    """A kubeconfig with one context."""
    cluster = {
        "server": access.server,
        "certificate-authority": str(access.ca_cert),
        "tls-server-name": access.server_name,
    }
    user = {"client-certificate": str(access.cert), "client-key": str(access.key)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }


def containerd(folder: Path) -> str:
    """containerd's config.toml; all it writes lies in `folder` or in the node's own /run."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true # else every sandbox dies with "can't get final child's PID from pipe"
  max_container_log_line_size = 65536
  [{cri}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{cri}.containerd.runtimes.runc.options]
        SystemdCgroup = false
    [{cri}.containerd.runtimes.{HOST_PYTHON_RUNTIME}]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{folder}/host-python.json"
      [{cri}.containerd.runtimes.{HOST_PYTHON_RUNTIME}.options]
        SystemdCgroup = false
  [{cri}.cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{folder}/cni"
"""


def host_python_spec(default: dict[str, Any], paths: tuple[Path, ...]) -> dict[str, Any]:
    """containerd's default container with this machine's directories in it, each at its own path."""
    mounts = [
        {"destination": str(path), "type": "bind", "source": str(path), "options": ["rbind", "ro", "nosuid", "nodev"]}
        for path in paths
    ]
    return {**default, "mounts": [*default["mounts"], *mounts]}


def cni(addresses: Addresses) -> dict[str, Any]:
    """One bridge; a pod reaches itself through its own Service (hairpin), and nobody's address is changed."""
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "isDefaultGateway": True,
                "hairpinMode": True,
                "ipMasq": False,
                "mtu": MTU,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": addresses.node_pods}]],
                    "dataDir": "/run/cni-addresses",
                },
            },
        ],
    }


def kubelet(folder: Path, addresses: Addresses, *, cgroup: str, ca_cert: Path, cert: Path, key: Path) -> dict[str, Any]:
    """KubeletConfiguration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(ca_cert)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(cert),
        "tlsPrivateKeyFile": str(key),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "enforceNodeAllocatable": [],
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "clusterDNS": [addresses.dns],
        "clusterDomain": "cluster.local",
        "resolvConf": str(folder / "resolv.conf"),
        "volumePluginDir": str(folder / "volume-plugins"),
        # A test machine may be nearly full: neither images nor pods go because of it.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        # What a test waits for is seen soon.
        "nodeStatusUpdateFrequency": "4s",
        "configMapAndSecretChangeDetectionStrategy": "Watch",
        "syncFrequency": "10s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "5s"},
        "featureGates": {"KubeletCrashLoopBackOffMax": True},
        "maxPods": 60,
    }


def write_json(path: Path, document: dict[str, Any]) -> Path:
    """JSON is YAML: all of these programs read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))
    return path
