"""Plain HTTP to an API server by a kubeconfig: paths and JSON in, status and JSON out.

For tests that look at verdicts; whoever watches or runs a client library takes the kubeconfig itself.
"""

import base64
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from ruamel.yaml import YAML

from cluster.harness import kubeconfigs
from cluster.harness.processes import ClusterError

_TIMEOUT_S = 30.0
_PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}
GROUP = "/apis/streamrl.io/v1alpha1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the API server answered."""

    code: int
    body: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether it was done."""
        return self.code < 300

    @property
    def message(self) -> str:
        """Why not, in the API server's words."""
        return str(self.body.get("message", ""))

    def expect(self) -> dict[str, Any]:
        """Return the body; raise where it was refused."""
        if not self.ok:
            raise ClusterError(f"the API server answered {self.code}: {self.message}")
        return self.body


class Api:
    """One client of one API server."""

    def __init__(self, kubeconfig: Path) -> None:
        config = YAML(typ="safe", pure=True).load(kubeconfig.read_text())
        cluster, user = kubeconfigs.current(config)
        headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        self._http = httpx.Client(
            base_url=cluster["server"],
            verify=_context(cluster, user, kubeconfig),
            headers=headers | {"Accept": "application/json"},
            timeout=_TIMEOUT_S,
            trust_env=False,  # no proxy between a test and its cluster
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def get(self, path: str, **query: str) -> Answer:
        """Read `path`: `/api/v1/namespaces/x/pods`."""
        return self._send("GET", path, query)

    def create(self, path: str, body: Mapping[str, Any], **query: str) -> Answer:
        """POST to a collection; `dryRun="All"` only asks."""
        return self._send("POST", path, {"fieldValidation": "Strict"} | query, body)

    def create_yaml(self, path: str, text: bytes, **query: str) -> Answer:
        """POST a YAML document, which the API server reads."""
        query = {"fieldValidation": "Strict"} | query
        return _answer(self._http.post(path, params=query, content=text, headers={"Content-Type": "application/yaml"}))

    def replace(self, path: str, body: Mapping[str, Any], **query: str) -> Answer:
        """PUT an object."""
        return self._send("PUT", path, {"fieldValidation": "Strict"} | query, body)

    def patch(self, path: str, body: Any, *, kind: str = "merge", **query: str) -> Answer:
        """PATCH an object: `merge`, `json` or `apply` (server-side; `fieldManager="x"`)."""
        return self._send("PATCH", path, {"fieldValidation": "Strict"} | query, body, _PATCHES[kind])

    def delete(self, path: str, **query: str) -> Answer:
        """DELETE an object."""
        return self._send("DELETE", path, query)

    def watch(self, path: str, *, timeout_s: int) -> Iterator[str]:
        """Yield a line for each event at a collection, beginning with all that is there, for so long."""
        query = {"watch": "true", "timeoutSeconds": str(timeout_s)}
        patience = httpx.Timeout(_TIMEOUT_S, read=timeout_s + _TIMEOUT_S)
        with self._http.stream("GET", path, params=query, timeout=patience) as reply:
            if reply.is_error:
                raise ClusterError(f"the API server answered {reply.status_code} to a watch of {path}")
            yield from reply.iter_lines()

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Any = None, content: str = "application/json"
    ) -> Answer:
        headers = {"Content-Type": content} if body is not None else {}
        return _answer(self._http.request(method, path, params=dict(query), json=body, headers=headers))


def _answer(reply: httpx.Response) -> Answer:
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    return Answer(code=reply.status_code, body=reply.json() if is_json else {"message": reply.text})


def _context(cluster: Mapping[str, Any], user: Mapping[str, Any], kubeconfig: Path) -> ssl.SSLContext:
    authority = _bytes(cluster, "certificate-authority", kubeconfig)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    cert, key = _bytes(user, "client-certificate", kubeconfig), _bytes(user, "client-key", kubeconfig)
    if cert and key:
        with tempfile.NamedTemporaryFile() as file:  # ssl reads a chain from files only
            file.write(cert + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    elif "token" not in user:
        raise ClusterError(f"{kubeconfig}: the user must have a client certificate or a token, got {', '.join(user)}")
    return context


def _bytes(entry: Mapping[str, Any], name: str, kubeconfig: Path) -> bytes | None:
    if data := entry.get(f"{name}-data"):
        return base64.b64decode(data)
    return (kubeconfig.parent / entry[name]).read_bytes() if name in entry else None
