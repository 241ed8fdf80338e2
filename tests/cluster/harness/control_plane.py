"""A real control plane on this machine: etcd, kube-apiserver, kube-controller-manager, on wish kube-scheduler.

    with ControlPlane() as plane:
        plane.apply_crds()
        plane.kubectl("get", "rljobs", "-A")

Owns its processes, a temporary folder, loopback ports (`Settings.enter`: or those of another network namespace). Leaves nothing, however it ends (reaper.py). `open_cluster` takes the
cluster that STREAMRL_TEST_KUBECONFIG names instead, where there is one.
"""

import contextlib
import json
import os
import secrets
import shutil
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.harness import audit, flags, kubeconfigs, reaper, tools
from cluster.harness.base import GIVEN, Cluster
from cluster.harness.certificates import Authority, service_account_key
from cluster.harness.flags import Files, Settings
from cluster.harness.processes import Server, wait_until
from support.ports import free_port

READY_S = 120.0
"""6 s on an idle machine; one that builds something else at the same time takes many times longer."""
APISERVER_GRACE_S = 3.0
"""It would wait a minute for open watches to end."""
MASTERS = "system:masters"


class ControlPlane(Cluster):
    """etcd, API server, controller manager, maybe a scheduler; started by the constructor."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        programs = {name: tools.tool(name) for name in self._names()}
        folder = Path(tempfile.mkdtemp(prefix="streamrl-cluster-"))
        self.mark = secrets.token_hex(8)
        """In the environment of each of its processes (reaper.MARK_VARIABLE)."""
        self._reaper = reaper.start(self.mark, folder)
        self.port = self.settings.port or free_port()
        super().__init__(folder / "admin.kubeconfig", folder)
        self._pki = folder / "pki"
        self._authority = Authority(self._pki)
        self.files = self._write_files()
        self.servers = self._servers(programs)
        """By name: etcd, kube-apiserver, kube-controller-manager, kube-scheduler."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _names(self) -> list[str]:
        names = ["etcd", "kube-apiserver", "kube-controller-manager"]
        return [*names, "kube-scheduler"] if self.settings.scheduler else names

    @property
    def server(self) -> str:
        """Address of the API server."""
        return f"https://{self.settings.host}:{self.port}"

    def _write_files(self) -> Files:
        issue, front = self._authority.issue, Authority(self._pki, "front-proxy-ca")
        policy = self.folder / "audit-policy.json"
        policy.write_text(json.dumps(audit.POLICY))
        self.kubeconfig_for("streamrl-test-admin", (MASTERS,), path=self.kubeconfig)
        return Files(
            authority=self._authority.leaf,
            front_authority=front.leaf,
            serving=issue("apiserver", "kube-apiserver", hosts=self.settings.server_hosts),
            kubelet_client=issue("kubelet-client", "kube-apiserver-kubelet-client", groups=(MASTERS,)),
            front_proxy=front.issue("front-proxy-client", "front-proxy-client"),
            accounts=service_account_key(self._pki),
            audit_policy=policy,
            audit_log=self.folder / "audit.log",
            controller_manager=self.kubeconfig_for("system:kube-controller-manager"),
            scheduler=self.kubeconfig_for("system:kube-scheduler"),
        )

    def _servers(self, programs: dict[str, Path]) -> dict[str, Server]:
        etcd_port, settings, files = free_port(), self.settings, self.files
        commands = {
            "etcd": lambda program: flags.etcd(
                program, settings, data=self.folder / "etcd", client_port=etcd_port, peer_port=free_port()
            ),
            "kube-apiserver": lambda program: flags.apiserver(
                program, settings, files, port=self.port, etcd_port=etcd_port
            ),
            "kube-controller-manager": lambda program: flags.controller_manager(
                program, settings, files, port=free_port()
            ),
            "kube-scheduler": lambda program: flags.scheduler(program, settings, files, port=free_port()),
        }
        self._etcd_health = f"http://{settings.host}:{etcd_port}/health"
        return {
            name: Server(
                name, [*settings.enter, *commands[name](program)], log=self.folder / f"{name}.log", mark=self.mark
            )
            for name, program in programs.items()
        }

    def _start(self) -> None:
        etcd = self.servers["etcd"]
        etcd.start()
        etcd.wait(lambda: _answers(self._etcd_health), deadline_s=READY_S)
        self.start_apiserver()
        for name in self._names()[2:]:
            self.servers[name].start()
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.servers["kube-controller-manager"].wait(lambda: self.api.get(account).ok, deadline_s=READY_S)

    def start_apiserver(self, *, deadline_s: float = READY_S) -> None:
        """Start the API server, and wait until it is ready."""
        server = self.servers["kube-apiserver"]
        server.start()
        context = ssl.create_default_context(cafile=str(self.files.authority.cert))
        server.wait(lambda: _answers(f"{self.server}/readyz", context), deadline_s=deadline_s)

    def stop_apiserver(self, *, kill: bool = False) -> None:
        """End the API server; etcd and the rest stay."""
        self.servers["kube-apiserver"].stop(kill=kill, grace_s=APISERVER_GRACE_S)

    def restart_apiserver(self, *, kill: bool = False) -> None:
        """End and start the API server, at the same address."""
        self.stop_apiserver(kill=kill)
        self.start_apiserver()

    @contextlib.contextmanager
    def without_apiserver(self) -> Iterator[None]:
        """No API server within the block."""
        self.stop_apiserver()
        try:
            yield
        finally:
            self.start_apiserver()

    def kubeconfig_for(
        self,
        user: str,
        groups: tuple[str, ...] = (),
        *,
        path: Path | None = None,
        server: str | None = None,
    ) -> Path:
        """Write a kubeconfig for a user by certificate; `server` where it is not reached over loopback."""
        name = user.replace(":", "-")
        leaf = self._authority.issue(f"user-{name}", user, groups=groups)
        return kubeconfigs.write(
            path or self.folder / "kubeconfigs" / f"{name}.json",
            server=server or self.server,
            authority=self._authority.cert,
            user=kubeconfigs.by_certificate(leaf),
        )

    def issue(
        self, file: str, user: str, groups: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
    ) -> tuple[Path, Path]:
        """Sign (certificate, key) by the cluster's authority: for kubelets and extension API servers."""
        leaf = self._authority.issue(file, user, groups=groups, hosts=hosts)
        return leaf.cert, leaf.key

    def uses(self, user: str | None = None) -> list[audit.Use]:
        """Return the requests of the audit log, of `user` alone where given."""
        return list(audit.uses(self.files.audit_log, user=user))

    def close(self) -> None:
        """End every process and remove the folder; STREAMRL_CLUSTER_LOGS names a folder that keeps the logs."""
        super().close()
        for name in reversed(self._names()):
            self.servers[name].stop(kill=True)
        if kept := os.environ.get("STREAMRL_CLUSTER_LOGS"):
            target = Path(kept, f"{time.strftime('%H%M%S')}-{self.mark}")
            target.mkdir(parents=True)
            for log in self.folder.glob("*.log"):
                shutil.copy(log, target)
        reaper.finish(self._reaper)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def open_cluster(settings: Settings | None = None) -> Iterator[Cluster]:
    """The cluster that STREAMRL_TEST_KUBECONFIG names, or a control plane of our own, for the block."""
    if given := os.environ.get(GIVEN):
        with tempfile.TemporaryDirectory(prefix="streamrl-cluster-") as folder:
            cluster = Cluster(Path(given).expanduser(), Path(folder))
            wait_until(lambda: cluster.api.get("/readyz").ok, what=f"the cluster of {given}", deadline_s=30)
            try:
                yield cluster
            finally:
                cluster.close()
    else:
        with ControlPlane(settings) as plane:
            yield plane


def _answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
