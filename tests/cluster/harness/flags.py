"""Command lines of etcd and the control plane. Owns the flags and why they are there; starts nothing."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.harness.certificates import Leaf

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a test may ask of a control plane. Level 1 takes it as it is."""

    scheduler: bool = False
    """Also start kube-scheduler: for nodes, real or made by KWOK."""
    bind_address: str = LOOPBACK
    """`0.0.0.0` where nodes in other network namespaces must reach it."""
    enter: tuple[str, ...] = ()
    """Command that starts a program in the network namespace where the servers run; () = here."""
    host: str = LOOPBACK
    """Where the harness reaches etcd and the API server."""
    port: int = 0
    """Of the API server; 0 = one that is free here."""
    advertise_address: str | None = None
    """Address behind the Service `kubernetes`, for pods; None = that Service has no endpoints."""
    hosts: tuple[str, ...] = ()
    """More names and addresses in the API server's certificate."""
    service_cidr: str = "10.96.0.0/16"
    cluster_cidr: str = "10.244.0.0/16"
    apiserver_flags: tuple[str, ...] = ()
    controller_manager_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()

    @property
    def server_hosts(self) -> tuple[str, ...]:
        """Every name and address of the API server."""
        inside = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
        first = str(ipaddress.ip_network(self.service_cidr)[1])
        advertised = (self.advertise_address,) if self.advertise_address else ()
        return tuple(dict.fromkeys((LOOPBACK, "localhost", *inside, first, *advertised, *self.hosts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Certificates, keys and other files that the servers are given."""

    authority: Leaf
    front_authority: Leaf
    serving: Leaf
    kubelet_client: Leaf
    front_proxy: Leaf
    accounts: Leaf
    audit_policy: Path
    audit_log: Path
    controller_manager: Path
    """Its kubeconfig."""
    scheduler: Path
    """Its kubeconfig."""


def etcd(program: Path, settings: Settings, *, data: Path, client_port: int, peer_port: int) -> Sequence[str | Path]:
    """etcd without fsync: the data ends with the test."""
    client, peer = f"http://{settings.host}:{client_port}", f"http://{LOOPBACK}:{peer_port}"
    return (
        program,
        f"--data-dir={data}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--quota-backend-bytes=4294967296",
        "--log-level=warn",
    )


def apiserver(program: Path, settings: Settings, files: Files, *, port: int, etcd_port: int) -> Sequence[str | Path]:
    """The API server as kubeadm runs it, with an audit log."""
    return (
        program,
        f"--etcd-servers=http://{settings.host}:{etcd_port}",
        f"--secure-port={port}",
        f"--bind-address={settings.bind_address}",
        f"--tls-cert-file={files.serving.cert}",
        f"--tls-private-key-file={files.serving.key}",
        f"--client-ca-file={files.authority.cert}",
        f"--kubelet-client-certificate={files.kubelet_client.cert}",
        f"--kubelet-client-key={files.kubelet_client.key}",
        "--kubelet-preferred-address-types=InternalIP,Hostname",  # node names resolve nowhere
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={files.accounts.cert}",
        f"--service-account-signing-key-file={files.accounts.key}",
        f"--service-cluster-ip-range={settings.service_cidr}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",  # PodSecurity is on by itself
        "--allow-privileged=true",
        f"--requestheader-client-ca-file={files.front_authority.cert}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={files.front_proxy.cert}",
        f"--proxy-client-key-file={files.front_proxy.key}",
        "--enable-aggregator-routing=true",  # this process knows no service addresses: straight to the endpoints
        f"--audit-policy-file={files.audit_policy}",
        f"--audit-log-path={files.audit_log}",
        "--audit-log-maxsize=4000",  # megabytes: one file, no rotation
        *_advertised(settings),
        *settings.apiserver_flags,
    )


def _advertised(settings: Settings) -> tuple[str, ...]:
    if settings.advertise_address is None:
        return (f"--advertise-address={LOOPBACK}", "--endpoint-reconciler-type=none")
    return (f"--advertise-address={settings.advertise_address}",)


def controller_manager(program: Path, settings: Settings, files: Files, *, port: int) -> Sequence[str | Path]:
    """The controller manager; horizontal pod autoscalers look often, so that tests need not wait."""
    return (
        program,
        f"--kubeconfig={files.controller_manager}",
        f"--bind-address={LOOPBACK}",
        f"--secure-port={port}",
        f"--service-account-private-key-file={files.accounts.key}",
        f"--root-ca-file={files.authority.cert}",
        f"--cluster-signing-cert-file={files.authority.cert}",
        f"--cluster-signing-key-file={files.authority.key}",
        "--use-service-account-credentials",
        "--allocate-node-cidrs",
        f"--cluster-cidr={settings.cluster_cidr}",
        f"--service-cluster-ip-range={settings.service_cidr}",
        "--leader-elect=false",
        "--kube-api-qps=500",  # the defaults of 20 and 30 make scale tests wait for the client's own brake
        "--kube-api-burst=1000",
        f"--flex-volume-plugin-dir={files.audit_policy.parent / 'volume-plugins'}",  # it makes the folder, else in /usr
        "--horizontal-pod-autoscaler-sync-period=2s",
        "--horizontal-pod-autoscaler-downscale-stabilization=5s",
        *settings.controller_manager_flags,
    )


def scheduler(program: Path, settings: Settings, files: Files, *, port: int) -> Sequence[str | Path]:
    """The scheduler."""
    return (
        program,
        f"--kubeconfig={files.scheduler}",
        f"--authentication-kubeconfig={files.scheduler}",
        f"--authorization-kubeconfig={files.scheduler}",
        f"--bind-address={LOOPBACK}",
        f"--secure-port={port}",
        "--leader-elect=false",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        *settings.scheduler_flags,
    )
