"""Credentials that this machine has: the file of a token, and programs that print one (`exec` of a kubeconfig's user)."""

import asyncio
import json
import os
import signal
import ssl
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamrl.errors import UserError

_TIMEOUT_S = 30.0
_MOST_BYTES = 2**20
"""Of what a program prints."""


class TokenFile:
    """A file that holds the token; its owner renews it."""

    pause_s: ClassVar[float] = 0.0
    certificate: ClassVar[None] = None

    def __init__(self, path: Path) -> None:
        self.path = path

    async def token(self, *, tls: ssl.SSLContext | None) -> str:
        """What stands there."""
        del tls
        return read_text(self.path).strip()


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
    """A credential plug-in (client.authentication.k8s.io)."""

    model_config = ConfigDict(frozen=True)

    api_version: str = Field(alias="apiVersion")
    command: str
    args: tuple[str, ...] = ()
    env: tuple[_Variable, ...] = ()
    pause_s: ClassVar[float] = 5.0
    _certificate: str | None = None

    @property
    def certificate(self) -> str | None:
        """That was put into `tls` last."""
        return self._certificate

    async def token(self, *, tls: ssl.SSLContext | None) -> str | None:
        """Ask it. A client certificate is put into `tls`.

        Raises:
            UserError: it gave neither, in any way.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = _Printed.model_validate_json(await self._output()).status
            if tls is not None and found.certificate and found.key:
                load_pair(tls, found.certificate.encode(), found.key.encode())
                self._certificate = found.certificate
        except TimeoutError:
            raise self._failed(f"it took more than {_TIMEOUT_S:g} s") from None
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
                if len(output) > _MOST_BYTES:
                    raise ValueError(f"it printed more than {_MOST_BYTES} bytes")
            if code := await process.wait():
                raise ValueError(f"exit code {code}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process._transport.close()  # type: ignore[attr-defined]  # the wait is for the pipe too, which may hold more than is read
            await process.wait()
        return bytes(output)


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """`ssl` takes a client certificate from a file alone; it is gone again when this returns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pair.pem"
        path.touch(mode=0o600)
        path.write_bytes(certificate.rstrip() + b"\n" + key)
        context.load_cert_chain(str(path))


def read_text(path: Path) -> str:
    """A file of the user's, or of kubelet's.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be readable ({getattr(error, 'strerror', None) or 'it is no UTF-8'})"
        raise UserError(field=str(path), rule=rule) from None
