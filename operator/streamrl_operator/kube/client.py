"""The client of one API server. Every request of the operator goes through one of these.

Owns: connections, encodings, translation of errors, the count of requests. Does not own: retries (the caller looks again after a
while), caches (`cluster.py`). Objects are plain data. Deadlines: every request has one; a watch ends by itself and is begun again.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from streamrl_operator.kube import errors
from streamrl_operator.kube.access import Access
from streamrl_operator.kube.kinds import SERVICE, Kind
from streamrl_operator.kube.lines import split_lines

REQUEST_TIMEOUT_S = 20.0
_CONCURRENT = 32
"""Requests under way at once, watches aside: more only wait in the API server's own queue."""
_CONCURRENT_PAGES = 128
"""Pages of pods under way at once, counted apart: pods that keep silent must not hold up a write. A silent one takes 3 s of it, so a
thousand of them take 24 s."""
PAGE = 200
"""Objects of one page of a list. All kinds are listed at once at the start, and a StatefulSet that is being read takes 30 KB."""
_WATCH_SLACK_S = 20.0
"""A watch that has not ended so long after its time is dead."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A peer that vanished without a word is noticed within half a minute."""
_MOST_PAGE_BYTES = 2**20
"""Of a page that a pod serves: it is the job's own word, and the job's author may have written the program."""
_REDIRECT = 300
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"

Count = Callable[[str, str, int, float], None]
"""(verb, resource, HTTP status or 0, seconds): called after every request."""


def _uncounted(verb: str, resource: str, status: int, seconds: float) -> None:
    del verb, resource, status, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Part of a list."""

    items: list[dict[str, Any]]
    version: str
    """resourceVersion of the list: a watch goes on from here."""


class Client:
    """Requests to one API server."""

    def __init__(self, access: Access, *, count: Count = _uncounted, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.access = access
        self._count = count
        self._timeout_s = timeout_s
        self._limit = asyncio.Semaphore(_CONCURRENT)
        self._pages = asyncio.Semaphore(_CONCURRENT_PAGES)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = session(self.access)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, kind: Kind, *, namespace: str, name: str) -> dict[str, Any]:
        """One object."""
        return await self._call("get", kind, kind.path(namespace, name))

    async def list(self, kind: Kind, *, namespace: str = "", labels: str = "") -> AsyncIterator[Page]:
        """All objects of a kind, page by page, as of one moment: not older than the call."""
        query = {"limit": str(PAGE)} | ({"labelSelector": labels} if labels else {})
        while True:
            body = await self._call("list", kind, kind.path(namespace), query=query)
            what = {"apiVersion": kind.api_version, "kind": kind.kind}
            items = [item | what for item in body.get("items") or []]
            yield Page(items=items, version=body["metadata"]["resourceVersion"])
            if not body["metadata"].get("continue"):
                return
            query["continue"] = body["metadata"]["continue"]

    async def watch(
        self, kind: Kind, *, version: str, duration_s: float, namespace: str = "", labels: str = ""
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """(ADDED | MODIFIED | DELETED | BOOKMARK, object) since `version`; ends after `duration_s`.

        Raises:
            ExpiredError: `version` is too old.
            UnavailableError: the connection or the API server failed.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(int(duration_s))} | ({"labelSelector": labels} if labels else {})
        limit = aiohttp.ClientTimeout(total=duration_s + _WATCH_SLACK_S, sock_connect=self._timeout_s)
        path = kind.path(namespace)
        async with self._answer("watch", kind, path, query=query, limit=limit) as response:
            async for line in split_lines(response.content.iter_any(), unfinished=False):
                if not line:
                    continue
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise errors.from_status(f"watch {path}", int(event["object"].get("code") or 0), event["object"])
                yield event["type"], event["object"]

    async def create(self, kind: Kind, obj: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object that must not be there yet."""
        return await self._call("create", kind, kind.path(obj["metadata"]["namespace"]), body=obj)

    async def apply(self, kind: Kind, obj: Mapping[str, Any], *, manager: str, subresource: str = "") -> dict[str, Any]:
        """Server-side apply: the fields in `obj` are the manager's, by force; what it gave before and omits now goes."""
        metadata = obj["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true"}
        return await self._call("apply", kind, path, query=query, body=obj, content_type=_APPLY)

    async def replace(self, kind: Kind, obj: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object; a resourceVersion in it must be the present one."""
        path = kind.path(obj["metadata"]["namespace"], obj["metadata"]["name"])
        return await self._call("update", kind, path, body=obj)

    async def merge(self, kind: Kind, *, namespace: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """JSON merge patch; a resourceVersion in it must be the present one."""
        return await self._call("patch", kind, kind.path(namespace, name), body=change, content_type=_MERGE)

    async def delete(
        self, kind: Kind, *, namespace: str, name: str, uid: str, propagation: str = "Background"
    ) -> dict[str, Any]:
        """Delete this very object: one that has come in its place stays."""
        body = {"propagationPolicy": propagation, "preconditions": {"uid": uid}}
        return await self._call("delete", kind, kind.path(namespace, name), body=body)

    async def read_page(self, *, namespace: str, service: str, port: str, page: str, timeout_s: float) -> Any:  # noqa: ANN401
        """A JSON page of a service, through the API server's proxy (`get services/proxy`)."""
        path = f"{SERVICE.path(namespace, f'http:{service}:{port}', 'proxy')}/{page}"
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._pages, self._answer("proxy", SERVICE, path, limit=limit) as response:
            data = bytearray()
            async for part in response.content.iter_any():
                data += part
                if len(data) > _MOST_PAGE_BYTES:
                    raise _bad_page(path, f"it has more than {_MOST_PAGE_BYTES} bytes")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _bad_page(path, f"it is no JSON ({type(error).__name__})") from None

    async def _call(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = _JSON,
        limit: aiohttp.ClientTimeout | None = None,
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        limit = limit or aiohttp.ClientTimeout(total=self._timeout_s)
        async with (
            self._limit,
            self._answer(verb, kind, path, query=query, data=data, content_type=content_type, limit=limit) as response,
        ):
            answer: dict[str, Any] = json.loads(await response.read())
            return answer

    @asynccontextmanager
    async def _answer(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        limit: aiohttp.ClientTimeout,
        query: Mapping[str, str] | None = None,
        data: bytes | None = None,
        content_type: str = _JSON,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to one request, if it is a good one; all else is one of our errors.

        No redirect is followed: an API server sends none, but a pod behind its proxy may, and our token would go wherever it says.
        """
        assert self._session is not None, "Client is used outside of its `async with`"
        begun_s, status, what = time.monotonic(), 0, f"{verb} {path}"
        try:
            headers = await self.access.headers(now_s=begun_s) | {"Content-Type": content_type, "Accept": _JSON}
            async with self._session.request(
                _METHOD[verb],
                self.access.server + path,
                params=query,
                data=data,
                headers=headers,
                timeout=limit,
                allow_redirects=False,
            ) as response:
                status = response.status
                if status >= _REDIRECT:
                    if status == 401:  # noqa: PLR2004 - Unauthorized
                        self.access.forget()
                    raise errors.from_status(
                        what, status, _parsed(await response.text()), response.headers.get("Retry-After")
                    )
                yield response
        except TimeoutError:
            waited = f"no (whole) answer within {limit.total:g} s"
            raise errors.UnavailableError(what, status=status, reason="Timeout", message=waited) from None
        except (aiohttp.ClientError, OSError, json.JSONDecodeError) as error:
            message = f"{type(error).__name__}: {error}"
            raise errors.UnavailableError(what, status=status, reason="Unreachable", message=message) from None
        finally:
            self._count(verb, kind.plural, status, time.monotonic() - begun_s)


def session(access: Access, *middlewares: aiohttp.ClientMiddlewareType) -> aiohttp.ClientSession:
    """Connections to an API server. Who we are is said by each request, or by a middleware."""
    connector = aiohttp.TCPConnector(ssl=access.tls or False, limit=0, socket_factory=_socket)
    headers = {"User-Agent": "streamrl-operator"}
    return aiohttp.ClientSession(connector=connector, headers=headers, middlewares=middlewares)


_METHOD = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "proxy": "GET",
    "create": "POST",
    "update": "PUT",
    "apply": "PATCH",
    "patch": "PATCH",
    "delete": "DELETE",
}


def _bad_page(path: str, message: str) -> errors.UnavailableError:
    return errors.UnavailableError(f"proxy {path}", status=200, reason="BadPage", message=message)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _socket(address: Any) -> socket.socket:  # noqa: ANN401 - aiohttp's own AddrInfoType
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
