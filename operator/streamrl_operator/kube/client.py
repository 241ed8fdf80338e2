"""The client of one API server. Every request of the operator goes through one of these.

Owns: requests, translation of errors, the count of requests. Does not own: connections (`connections.py`), the bounds of answers (`streamrl_pages.http_client`),
the shape of answers (`answers.py`), retries (the caller looks again after a while), caches (`cluster.py`). Objects are plain data.
Deadlines: every request has one; a watch ends by itself and is begun again. Whatever is answered, callers see a `KubeError` or what
they asked for.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from streamrl.errors import UserError
from streamrl_operator.kube import answers
from streamrl_operator.kube.answers import split_lines
from streamrl_operator.kube.connections import ApiConnection
from streamrl_operator.kube.kinds import ACCESS_REVIEW, SERVICE, Kind
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_pages.http_client import BoundedResponse
from streamrl_pages.http_fetch import OversizeError, one_line, retry_after_s

log = logging.getLogger(__name__)

AGENT = "streamrl-operator"

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
_CHUNK_BYTES = 2**16
_MOST_PAGE_BYTES = 2**20
"""Of a page that a pod serves: it is the job's own word, and the job's author may have written the program."""
_REDIRECT, _UNAUTHORIZED = 300, 401
_PAGE, _NAMES, _METADATA = "page", "names", "metadata"
"""Verbs of ours beside the API server's."""
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"

_T = TypeVar("_T")
Count = Callable[[str, str, int, float], None]
"""(verb, resource, HTTP status or 0, seconds): called after every request."""


class Client:
    """Requests to one API server."""

    def __init__(
        self, access: RestConfig, *, count: Count = lambda *_: None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self.access = access
        self.count = count
        self._timeout_s = timeout_s
        self._limit = asyncio.Semaphore(_CONCURRENT)
        self._pages = asyncio.Semaphore(_CONCURRENT_PAGES)
        self._connection: ApiConnection | None = None
        self._skipped: set[str] = set()
        """Paths of objects that cannot be taken: each is told once."""

    async def __aenter__(self) -> Self:
        self._connection = ApiConnection(self.access, agent=AGENT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            await self._connection.aclose()

    async def get(self, kind: Kind, *, namespace: str, name: str) -> dict[str, Any]:
        """One object."""
        return await self._call("get", kind, kind.path(namespace, name), read=answers.read_object)

    async def list(
        self, kind: Kind, *, namespace: str = "", labels: str = ""
    ) -> AsyncIterator[tuple[list[dict[str, Any]], str]]:
        """All objects of a kind as of one moment, not older than the call: (objects, resourceVersion) of each page. A watch goes on from there.

        An object that is too large even alone is told and left out: the others of its kind are not to wait for it.
        """
        path = kind.path(namespace)
        query = {"labelSelector": labels} if labels else {}
        most = PAGE
        while True:
            try:
                items, version, more = await self._call(
                    "list", kind, path, read=answers.read_list, query={**query, "limit": str(most)}
                )
            except answers.TooLargeError as error:
                if most > 1:
                    most //= 2
                    continue
                items, (version, more), most = [], await self._skip(kind, path, query, error), PAGE
            yield items, version
            if not more:
                return
            query["continue"] = more

    async def _skip(
        self, kind: Kind, path: str, query: Mapping[str, str], error: answers.TooLargeError
    ) -> tuple[str, str]:
        """(resourceVersion, where to go on or empty) of a page of one object that cannot be taken."""
        names, version, more = await self._call(
            _NAMES, kind, path, read=answers.read_names, query={**query, "limit": "1"}
        )
        for namespace, name in names:
            where = kind.path(namespace, name)
            if where not in self._skipped:
                log.error("object is left out: it is too large", extra={"object": where, "error": str(error)})
            self._skipped.add(where)
        return version, more

    async def watch(
        self, kind: Kind, *, version: str, duration_s: float, namespace: str = "", labels: str = ""
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """(ADDED | MODIFIED | DELETED | BOOKMARK, object) since `version`; ends after `duration_s`.

        Raises:
            ExpiredError: `version` is too old.
            TooLargeError: an object is; what stands behind it is told by a list.
            UnavailableError: the connection or the API server failed.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(int(duration_s))} | ({"labelSelector": labels} if labels else {})
        limit = aiohttp.ClientTimeout(total=duration_s + _WATCH_SLACK_S, sock_connect=self._timeout_s)
        path = kind.path(namespace)
        async with self._answer("watch", kind, path, query=query, limit=limit) as response:
            async for line in split_lines(response.content.iter_chunked(_CHUNK_BYTES), unfinished=False):
                if not line:
                    continue
                event, obj = answers.read_event(line, kind)
                if event == "ERROR":
                    reported = answers.read_status(json.dumps(obj).encode())
                    raise answers.from_status(f"watch {path}", reported.code, reported)
                yield event, obj

    async def exists(self, kind: Kind, *, namespace: str, name: str) -> bool:
        """Check whether an object is there; what is in it does not travel."""
        try:
            await self._call(_METADATA, kind, kind.path(namespace, name), read=answers.read_metadata)
        except answers.NotFoundError:
            return False
        return True

    async def try_out(
        self, kind: Kind, obj: Mapping[str, Any], *, manager: str = "", warned: Callable[[str], None] = lambda _: None
    ) -> dict[str, Any]:
        """Ask whether an object would be taken, by all that admits objects: applied by `manager`, or created. It is answered as it would be.

        `warned`: called with each warning of the answer.
        """
        name = obj["metadata"]["name"] if manager else None
        path = kind.path(obj["metadata"]["namespace"], name)
        data = json.dumps(obj, separators=(",", ":")).encode()
        async with (
            self._limit,
            self._answer(
                "apply" if manager else "create",
                kind,
                path,
                query={"dryRun": "All"} | ({"fieldManager": manager, "force": "true"} if manager else {}),
                data=data,
                content_type=_APPLY if manager else _JSON,
                limit=aiohttp.ClientTimeout(total=self._timeout_s),
            ) as response,
        ):
            for text in answers.read_warnings(response.headers.getall("Warning", [])):
                warned(text)
            return answers.read_dry_run(await response.read(), kind)

    async def create(self, kind: Kind, obj: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object that must not be there yet."""
        return await self._call(
            "create", kind, kind.path(obj["metadata"]["namespace"]), body=obj, read=answers.read_object
        )

    async def may(self, kind: Kind, *, verb: str, namespace: str, subresource: str = "") -> bool:
        """Whether the API server would let us."""
        group = kind.api_version.rpartition("/")[0]
        asked = {"namespace": namespace, "verb": verb, "group": group, "resource": kind.plural}
        asked |= {"subresource": subresource} if subresource else {}
        body = {"apiVersion": ACCESS_REVIEW.api_version, "kind": ACCESS_REVIEW.kind}
        body |= {"spec": {"resourceAttributes": asked}}  # type: ignore[dict-item]
        return await self._call(
            "create", ACCESS_REVIEW, ACCESS_REVIEW.path(), body=body, read=answers.read_access_review
        )

    async def apply(self, kind: Kind, obj: Mapping[str, Any], *, manager: str, subresource: str = "") -> dict[str, Any]:
        """Server-side apply: the fields in `obj` are the manager's, by force; what it gave before and omits now goes."""
        metadata = obj["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true"}
        return await self._call(
            "apply", kind, path, read=answers.read_object, query=query, body=obj, content_type=_APPLY
        )

    async def replace(self, kind: Kind, obj: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object; a resourceVersion in it must be the present one."""
        path = kind.path(obj["metadata"]["namespace"], obj["metadata"]["name"])
        return await self._call("update", kind, path, body=obj, read=answers.read_object)

    async def merge(
        self, kind: Kind, *, namespace: str, name: str, change: Mapping[str, Any], subresource: str = ""
    ) -> dict[str, Any]:
        """JSON merge patch; a resourceVersion in it must be the present one."""
        path = kind.path(namespace, name, subresource)
        return await self._call("patch", kind, path, read=answers.read_object, body=change, content_type=_MERGE)

    async def delete(
        self, kind: Kind, *, namespace: str, name: str, uid: str, propagation: str = "Background"
    ) -> dict[str, Any]:
        """Delete this very object: one that has come in its place stays."""
        body = {"propagationPolicy": propagation, "preconditions": {"uid": uid}}
        return await self._call("delete", kind, kind.path(namespace, name), body=body, read=answers.read_deleted)

    async def read_page(
        self, *, namespace: str, service: str, port: str, page: str, timeout_s: float, address: str | None = None
    ) -> bytes:
        """A page of a service at `address` (host:port), else through the API server's proxy (`get services/proxy`): one that `answers.read_page` takes.

        As it came: parsed it takes up to forty times as much, and whoever keeps the pages of many jobs keeps their text.
        """
        door = SERVICE.path(namespace, f"http:{service}:{port}", "proxy") if address is None else f"http://{address}"
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._pages, self._answer(_PAGE, SERVICE, f"{door}/{page}", limit=limit) as response:
            data = await response.at_most(_MOST_PAGE_BYTES).read()
            answers.read_page(data)
            return data

    async def _call(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        read: Callable[[bytes, Kind], _T],
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = _JSON,
    ) -> _T:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        async with (
            self._limit,
            self._answer(verb, kind, path, query=query, data=data, content_type=content_type, limit=limit) as response,
        ):
            return read(await response.read(), kind)

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
    ) -> AsyncIterator[BoundedResponse]:
        """The answer to one request, if it is a good one; all else is one of our errors. `path`: as the connection takes it."""
        assert self._connection is not None, "Client is used outside of its `async with`"
        begun_s, status, what = time.monotonic(), 0, f"{verb} {path}"
        headers = {"Content-Type": content_type, "Accept": _FORMS.get(verb, _JSON)}
        try:
            async with self._connection.request(
                _METHOD[verb], path, params=query, data=data, headers=headers, timeout=limit
            ) as response:
                status = response.status
                if status >= _REDIRECT:
                    if status == _UNAUTHORIZED and verb != _PAGE:  # a pod's 401 says nothing of our token
                        self.access.forget()
                    # A pod's words are its author's: they are not to stand in a status as ours.
                    reported = answers.read_status(b"" if verb == _PAGE else await _refusal(response))
                    asked_s = retry_after_s(response.headers.get("Retry-After"))
                    raise answers.from_status(what, status, reported, retry_after_s=asked_s)
                yield response
        except TimeoutError:
            waited = f"no (whole) answer within {limit.total:g} s"
            raise answers.UnavailableError(what, status=status, reason="Timeout", message=waited) from None
        except UserError as error:  # of a credential plug-in
            raise answers.UnavailableError(what, status=status, reason="NoCredential", message=str(error)) from None
        except (OversizeError, answers.TooManyValuesError) as error:
            raise answers.TooLargeError(what, status=status, reason="TooLarge", message=str(error)) from None
        except answers.MalformedError as error:
            raise answers.UnusableError(what, status=status, reason="BadAnswer", message=str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise answers.UnavailableError(what, status=status, reason="Unreachable", message=one_line(error)) from None
        finally:
            self.count(verb, kind.plural, status, time.monotonic() - begun_s)


_FORMS = {_NAMES: answers.NAMES, _METADATA: answers.METADATA}
"""Verb -> form of the answer, where that is no whole object."""
_METHOD = {
    "get": "GET",
    "list": "GET",
    _NAMES: "GET",
    _METADATA: "GET",
    "watch": "GET",
    _PAGE: "GET",
    "create": "POST",
    "update": "PUT",
    "apply": "PATCH",
    "patch": "PATCH",
    "delete": "DELETE",
}


async def _refusal(response: BoundedResponse) -> bytes:
    """The body of a refusal. One that is too long says nothing; what is refused is known all the same."""
    try:
        return await response.read()
    except OversizeError as error:
        return f"its words are too many: {error}".encode()
