"""How an API server is reached: address, trust, and who we are. From the pod's service account or from a kubeconfig.

Owns: reading of credentials, again when they are renewed. Does not own: requests (`client.py`).
A kubeconfig of another cluster (a Secret's value) goes the same way as a file: `from_kubeconfig(text)`.
"""

import asyncio
import base64
import json
import logging
import os
import signal
import ssl
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from streamrl.errors import UserError

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_AGE_S = 60.0
"""A token's file or plug-in is read again after so long; kubelet renews tokens long before they end."""
_PLUGIN_TIMEOUT_S = 30.0
_PLUGIN_PAUSE_S = 5.0
"""Between two starts of a plug-in that has failed, or whose token is not believed: every request of ours would start it."""
_MOST_PLUGIN_BYTES = 2**20

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RestConfig:
    """One API server, and how to show it who we are."""

    server: str
    """https://host:port, without a slash at the end."""
    tls: ssl.SSLContext | None
    """None: plain HTTP (a proxy on the same machine)."""
    namespace: str = "default"
    """Of the context: what is meant where nobody names one."""
    token_file: Path | None = None
    token: str | None = field(default=None, repr=False)
    plugin: "Plugin | None" = None
    """`exec` of a kubeconfig's user: a program that prints a token."""
    _read_s: float = float("-inf")
    """When the token was last read, and when it is due next, by a monotonic clock."""
    _due_s: float = float("-inf")
    _problem: UserError | None = None
    """Of the latest reading, if there is no token that may be used without it."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def headers(self, *, now_s: float) -> dict[str, str]:
        """Headers that say who we are. `now_s`: a monotonic clock.

        Raises:
            UserError: there is no credential. Where there was one it is used until the API server does not believe it.
        """
        if self.token_file or self.plugin:
            async with self._lock:
                if now_s >= self._due_s:
                    await self._renew(now_s=now_s)
            if self._problem is not None:
                raise self._problem
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def forget(self) -> None:
        """The API server did not believe the token: read it again before the next request."""
        self._due_s = min(self._due_s, self._read_s + (_PLUGIN_PAUSE_S if self.plugin else 0.0))

    async def _renew(self, *, now_s: float) -> None:
        self._read_s = now_s
        try:
            self.token = await self._renewed()
        except UserError as error:
            log.warning("credential is not renewed", extra={"error": str(error)})
            self._problem = None if self.token else error
            self._due_s = now_s + _PLUGIN_PAUSE_S
        else:
            self._problem, self._due_s = None, now_s + _TOKEN_AGE_S

    async def _renewed(self) -> str | None:
        if self.token_file is not None:
            return _text(self.token_file).strip()
        assert self.plugin is not None
        return await self.plugin.token(tls=self.tls)


class _Variable(BaseModel):
    name: str
    value: str


class _Credential(BaseModel):
    token: str | None = None
    certificate: str | None = Field(default=None, alias="clientCertificateData")
    key: str | None = Field(default=None, alias="clientKeyData")


class _Printed(BaseModel):
    """ExecCredential, as a plug-in prints it."""

    status: _Credential


class Plugin(BaseModel):
    """A credential plug-in (client.authentication.k8s.io): `exec` of a kubeconfig's user."""

    model_config = ConfigDict(frozen=True)

    api_version: str = Field(alias="apiVersion")
    command: str
    args: tuple[str, ...] = ()
    env: tuple[_Variable, ...] = ()

    async def token(self, *, tls: ssl.SSLContext | None) -> str | None:
        """Ask it. A client certificate is put into `tls`.

        Raises:
            UserError: it gave neither, in any way.
        """
        try:
            async with asyncio.timeout(_PLUGIN_TIMEOUT_S):
                found = _Printed.model_validate_json(await self._output()).status
            if tls is not None and found.certificate and found.key:
                _load_pair(tls, found.certificate.encode(), found.key.encode())
        except TimeoutError:
            raise self._failed(f"it took more than {_PLUGIN_TIMEOUT_S:g} s") from None
        except (OSError, ValueError) as error:  # of the program, of what it printed, of its certificate
            why = "it printed no ExecCredential" if isinstance(error, ValidationError) else str(error)
            raise self._failed(f"{type(error).__name__}: {why}") from None
        if not found.token and not found.certificate:
            raise self._failed("it printed neither a token nor a certificate")
        return found.token

    def _failed(self, why: str) -> UserError:
        rule = f"credential plug-in {self.command} gave no credential ({why})"
        return UserError(field="KUBECONFIG", rule=rule, fix="run kubectl once with this kubeconfig")

    async def _output(self) -> bytes:
        """What it prints. It is ended with all that it has started, however this ends."""
        asked = {"apiVersion": self.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
        environ = {**os.environ, **{entry.name: entry.value for entry in self.env}}
        process = await asyncio.create_subprocess_exec(
            self.command,
            *self.args,
            stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
            env=environ | {"KUBERNETES_EXEC_INFO": json.dumps(asked)},
            start_new_session=True,
        )
        assert process.stdout is not None, "it is a pipe"
        try:
            output = bytearray()
            while part := await process.stdout.read(2**16):
                output += part
                if len(output) > _MOST_PLUGIN_BYTES:
                    raise ValueError(f"it printed more than {_MOST_PLUGIN_BYTES} bytes")
            if code := await process.wait():
                raise ValueError(f"exit code {code}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process._transport.close()  # type: ignore[attr-defined]  # the wait is for the pipe too, which may hold more than is read
            await process.wait()
        return bytes(output)


def find(kubeconfig: Path | None) -> RestConfig:
    """The cluster that this process belongs to: the kubeconfig if there is one, else the pod's service account."""
    if kubeconfig is not None:
        return from_kubeconfig(_text(kubeconfig), base=kubeconfig.parent, source=str(kubeconfig))
    return from_service_account(SERVICE_ACCOUNT_DIR, os.environ)


_MEMBER_FIELDS = {
    "cluster": {"server", "certificate-authority-data"},
    "user": {"token", "client-certificate-data", "client-key-data"},
}
"""All that a kubeconfig of a member may say. What else there is starts programs, reads our files, or trusts anybody."""


def of_member(text: str, *, source: str) -> RestConfig:
    """As a kubeconfig in a Secret says, whoever wrote it: it runs nothing here, and reads none of our files.

    Raises:
        UserError: it would, or is none.
    """
    try:
        config = YAML(typ="safe", pure=True).load(text)
        chosen = _named(config["contexts"], config["current-context"], "context")
        given = {
            "cluster": _named(config["clusters"], chosen["cluster"], "cluster"),
            "user": _named(config["users"], chosen["user"], "user"),
        }
    except (YAMLError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        rule = f"must be a kubeconfig with a current context, cluster and user ({type(error).__name__})"  # its text may quote a token
        raise UserError(field=source, rule=rule) from None
    for part, fields in given.items():
        if others := sorted(key for key, value in fields.items() if key not in _MEMBER_FIELDS[part] and value):
            allowed = ", ".join(sorted(_MEMBER_FIELDS[part]))
            raise UserError(field=source, rule=f"{part} may have only {allowed}", got=", ".join(map(str, others)))
    if not str(given["cluster"].get("server", "")).startswith("https://"):
        raise UserError(
            field=source, rule="cluster.server must begin with https://", got=given["cluster"].get("server")
        )
    found = from_kubeconfig(text, source=source)
    if given["cluster"].get("certificate-authority-data") and not _pem(
        given["cluster"], "certificate-authority", base=Path()
    ):
        raise UserError(field=source, rule="cluster.certificate-authority-data must be a certificate in base64")
    return found


def from_service_account(folder: Path, environ: Mapping[str, str]) -> RestConfig:
    """As a pod with a mounted token reaches its own cluster."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        fix = "set KUBECONFIG outside of a cluster"
        raise UserError(field="KUBECONFIG", rule="must be set where no service account is mounted", fix=fix)
    host = f"[{host}]" if ":" in host else host
    return RestConfig(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(folder / "ca.crt")),
        token_file=folder / "token",
        namespace=_text(folder / "namespace").strip() if (folder / "namespace").exists() else "default",
    )


def from_kubeconfig(
    text: str, *, base: Path | None = None, source: str = "kubeconfig", context: str = ""
) -> RestConfig:
    """As the current (or the named) context of a kubeconfig says; files in it are relative to `base`."""
    try:
        config = YAML(typ="safe", pure=True).load(text)
        named = context or config["current-context"]
        chosen = _named(config["contexts"], named, "context")
        cluster = _named(config["clusters"], chosen["cluster"], "cluster")
        user = _named(config.get("users") or [], chosen["user"], "user") if chosen.get("user") else {}
        server = str(cluster["server"]).rstrip("/")
        tls = _tls(cluster, user, base=base or Path()) if server.startswith("https:") else None
        given = {name: value for name, value in dict(user.get("exec") or {}).items() if value is not None}
        plugin = Plugin.model_validate(given) if user.get("exec") else None
    except (YAMLError, LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        fix = "give one that kubectl can use"
        raise UserError(field=source, rule=f"must be a kubeconfig with a current context ({error})", fix=fix) from None
    token_file = user.get("tokenFile")
    return RestConfig(
        server=server,
        tls=tls,
        namespace=chosen.get("namespace") or "default",
        token=user.get("token"),
        token_file=(base or Path()) / token_file if token_file else None,
        plugin=plugin,
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be readable ({getattr(error, 'strerror', None) or 'it is no UTF-8'})"
        raise UserError(field=str(path), rule=rule) from None
