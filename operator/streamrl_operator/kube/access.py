"""How an API server is reached: address, trust, and who we are. From the pod's service account or from a kubeconfig.

Owns: reading of credentials, again when they are renewed. Does not own: requests (`client.py`).
A kubeconfig of another cluster (a Secret's value) goes the same way as a file: `from_kubeconfig(text)`.
"""

import asyncio
import base64
import json
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from streamrl.errors import UserError

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_AGE_S = 60.0
"""A token's file or plug-in is read again after so long; kubelet renews tokens long before they end."""
_PLUGIN_TIMEOUT_S = 30.0


@dataclass(slots=True, kw_only=True)
class Access:
    """One API server, and how to show it who we are."""

    server: str
    """https://host:port, without a slash at the end."""
    tls: ssl.SSLContext | None
    """None: plain HTTP (a proxy on the same machine)."""
    namespace: str = "default"
    """Of the context: what is meant where nobody names one."""
    token_file: Path | None = None
    token: str | None = field(default=None, repr=False)
    plugin: Mapping[str, Any] | None = None
    """`exec` of a kubeconfig's user: a program that prints a token."""
    _read_s: float | None = field(default=None)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def headers(self, *, now_s: float) -> dict[str, str]:
        """Headers that say who we are. `now_s`: a monotonic clock."""
        if (self.token_file or self.plugin) and (self._read_s is None or now_s - self._read_s > _TOKEN_AGE_S):
            async with self._lock:
                self.token = await self._renewed()
                self._read_s = now_s
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def forget(self) -> None:
        """The API server did not believe the token: read it again before the next request."""
        self._read_s = None

    async def _renewed(self) -> str | None:
        if self.token_file is not None:
            return self.token_file.read_text().strip()
        assert self.plugin is not None
        return await _run_plugin(self.plugin, tls=self.tls)


def find(kubeconfig: Path | None) -> Access:
    """The cluster that this process belongs to: the kubeconfig if there is one, else the pod's service account."""
    if kubeconfig is not None:
        return from_kubeconfig(_text(kubeconfig), base=kubeconfig.parent, source=str(kubeconfig))
    return from_service_account(SERVICE_ACCOUNT_DIR, os.environ)


def from_service_account(folder: Path, environ: Mapping[str, str]) -> Access:
    """As a pod with a mounted token reaches its own cluster."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        fix = "set KUBECONFIG outside of a cluster"
        raise UserError(field="KUBECONFIG", rule="must be set where no service account is mounted", fix=fix)
    host = f"[{host}]" if ":" in host else host
    return Access(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(folder / "ca.crt")),
        token_file=folder / "token",
        namespace=_text(folder / "namespace").strip() if (folder / "namespace").exists() else "default",
    )


def from_kubeconfig(text: str, *, base: Path | None = None, source: str = "kubeconfig", context: str = "") -> Access:
    """As the current (or the named) context of a kubeconfig says; files in it are relative to `base`."""
    try:
        config = YAML(typ="safe", pure=True).load(text)
        named = context or config["current-context"]
        chosen = _named(config["contexts"], named, "context")
        cluster = _named(config["clusters"], chosen["cluster"], "cluster")
        user = _named(config.get("users") or [], chosen["user"], "user") if chosen.get("user") else {}
        server = str(cluster["server"]).rstrip("/")
        tls = _tls(cluster, user, base=base or Path()) if server.startswith("https:") else None
    except (YAMLError, KeyError, TypeError, ValueError, OSError, ssl.SSLError) as error:
        fix = "give one that kubectl can use"
        raise UserError(field=source, rule=f"must be a kubeconfig with a current context ({error})", fix=fix) from None
    token_file = user.get("tokenFile")
    return Access(
        server=server,
        tls=tls,
        namespace=chosen.get("namespace") or "default",
        token=user.get("token"),
        token_file=(base or Path()) / token_file if token_file else None,
        plugin=user.get("exec"),
    )


def _named(entries: list[dict[str, Any]], name: str, key: str) -> dict[str, Any]:
    for entry in entries:
        if entry["name"] == name:
            return dict(entry.get(key) or {})
    raise KeyError(f"no {key} {name}")


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], *, base: Path) -> ssl.SSLContext:
    ca = _pem(cluster, "certificate-authority", base=base)
    context = ssl.create_default_context(cadata=ca.decode() if ca else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate, key = _pem(user, "client-certificate", base=base), _pem(user, "client-key", base=base)
    if certificate and key:
        _load_pair(context, certificate, key)
    return context


def _pem(entry: Mapping[str, Any], name: str, *, base: Path) -> bytes | None:
    if entry.get(f"{name}-data"):
        return base64.b64decode(entry[f"{name}-data"])
    return (base / entry[name]).read_bytes() if entry.get(name) else None


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """`ssl` takes a client certificate from a file alone; it is gone again when this returns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pair.pem"
        path.touch(mode=0o600)
        path.write_bytes(certificate.rstrip() + b"\n" + key)
        context.load_cert_chain(str(path))


async def _run_plugin(plugin: Mapping[str, Any], *, tls: ssl.SSLContext | None) -> str | None:
    """Ask a credential plug-in (client.authentication.k8s.io) for a token or a client certificate."""
    environ = dict(os.environ) | {entry["name"]: entry["value"] for entry in plugin.get("env") or []}
    asked = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    command = [plugin["command"], *(plugin.get("args") or [])]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
            env=environ | {"KUBERNETES_EXEC_INFO": json.dumps(asked)},
        )
        output, _ = await asyncio.wait_for(process.communicate(), _PLUGIN_TIMEOUT_S)
        status = json.loads(output)["status"]
    except (OSError, TimeoutError, ValueError, KeyError) as error:
        rule = f"credential plug-in {command[0]} gave no credential ({type(error).__name__})"
        raise UserError(field="KUBECONFIG", rule=rule, fix="run kubectl once with this kubeconfig") from None
    if tls is not None and status.get("clientCertificateData"):
        _load_pair(tls, status["clientCertificateData"].encode(), status["clientKeyData"].encode())
    token = status.get("token")
    return str(token) if token else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(field=str(path), rule=f"must be readable ({error.strerror})") from None
