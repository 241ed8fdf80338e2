"""An API server of one namespace, in memory and over HTTP: it keeps what is applied, merged and deleted, and refuses what it is told to.

Without schema, admission and controllers: what those do is tested on a real one (tests/cluster).
"""

import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl_operator.kube.client import REQUEST_TIMEOUT_S, Client
from streamrl_operator.kube.rest_config import RestConfig

Doc = dict[str, Any]
Refuse = Callable[[str, str, Doc], tuple[int, str] | None]
"""(method, path, body) -> (status, message); None: taken."""
_APPLY = "application/apply-patch+yaml"


@asynccontextmanager
async def client_of(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    *,
    token: str | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> AsyncIterator[Client]:
    """A client of a server that answers every request so, as long as the block lasts."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    server = TestServer(application)
    await server.start_server(shutdown_timeout=0.1)
    access = RestConfig(server=str(server.make_url("")).rstrip("/"), tls=None, token=token)
    try:
        async with Client(access, timeout_s=timeout_s) as made:
            yield made
    finally:
        await server.close()


class ApiServer:
    """`objects`: by path."""

    def __init__(self) -> None:
        self.objects: dict[str, Doc] = {}
        self.refuse: Refuse = lambda *_: None
        self.page: Doc = {}
        """What the scheduler serves."""
        self.writes: list[str] = []
        self.dry_runs: list[str] = []
        self.refuse_dry_runs: tuple[int, str] | None = None
        self.warnings: list[str] = []
        """That it gives to a dry run."""
        self.reads: list[str] = []
        """Paths."""
        self.pages: list[str] = []
        """Paths of pages that were read by the proxy."""
        self._version = 1
        """As in etcd: the first object has 2."""

    def client(self) -> AbstractAsyncContextManager[Client]:
        """A client of it, as long as the block lasts."""
        return client_of(self._answer)

    def put(self, path: str, obj: Doc) -> Doc:
        """Keep an object; as it is kept."""
        known, self._version = self.objects.get(path), self._version + 1
        if known is not None and known.get("spec") == obj.get("spec"):
            generation = known["metadata"]["generation"]
        else:
            generation = 1 if known is None else known["metadata"]["generation"] + 1
        own = {"uid": f"u-{path}", **obj["metadata"], "generation": generation, "resourceVersion": str(self._version)}
        self.objects[path] = {**obj, "metadata": own}
        return copy.deepcopy(self.objects[path])

    def under(self, path: str) -> list[Doc]:
        """The objects of a collection."""
        return [copy.deepcopy(obj) for each, obj in self.objects.items() if each.startswith(f"{path}/")]

    async def _answer(self, request: web.Request) -> web.Response:
        path, body = request.path, await request.text()
        if "/proxy/" in path:
            self.pages.append(path)
            return web.json_response(self.page)
        document: Doc = json.loads(body) if body else {}
        if request.method != "GET":
            is_asked_only = request.query.get("dryRun") == "All"
            refused = self.refuse(request.method, path, document) or (self.refuse_dry_runs if is_asked_only else None)
            written = self.dry_runs if is_asked_only else self.writes
            written.append(f"{request.method} {path}" + (f" {refused[0]}" if refused else ""))
            if refused is not None:
                return _status(*refused)
            if is_asked_only:
                return web.json_response(
                    _as_made(document), headers=[("Warning", f'299 - "{text}"') for text in self.warnings]
                )
        return self._done(request, path, document)

    def _done(self, request: web.Request, path: str, document: Doc) -> web.Response:
        known = self.objects.get(path.removesuffix("/status"))
        self.reads += [path] if request.method == "GET" else []
        if request.method == "POST":
            return web.json_response(self.put(f"{path}/{document['metadata']['name']}", document))
        if request.method == "PATCH" and request.content_type == _APPLY:
            version = document["metadata"].pop("resourceVersion", None)
            if known is not None and version not in (None, known["metadata"]["resourceVersion"]):
                return _status(409, "it has changed")
            return web.json_response(self._applied(path, document))
        if known is None and path.endswith("/resourcequotas"):
            items = self.under(path)
            return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})
        if known is None:
            return _status(404, "not found")
        if request.method == "DELETE":
            return web.json_response({"kind": "Status", "code": 200, "object": self.objects.pop(path)["kind"]})
        if request.method == "PATCH":
            version = document.get("metadata", {}).get("resourceVersion")
            if version not in (None, known["metadata"]["resourceVersion"]):
                return _status(409, "it has changed")
            return web.json_response(self.put(path, _merged(known, document)))
        return web.json_response(known)

    def _applied(self, path: str, document: Doc) -> Doc:
        """What was given before and is omitted now stays, unlike in a real one; but a status is replaced."""
        if not path.endswith("/status"):
            known = self.objects.get(path)
            made = document if known is None else _merged(known, document)
            return copy.deepcopy(known) if known is not None and made == known else self.put(path, made)
        path = path.removesuffix("/status")
        return self.put(path, {**self.objects[path], "status": document["status"]})


def _as_made(document: Doc) -> Doc:
    """As a real one answers a dry run."""
    about = document["metadata"]
    return {**document, "metadata": {**about, "uid": "u-of-a-dry-run", "resourceVersion": "1"}}


def _merged(known: Any, change: Any) -> Any:
    if not isinstance(known, dict) or not isinstance(change, dict):
        return change
    whole = {**known, **{key: _merged(known.get(key), value) for key, value in change.items()}}
    return {key: value for key, value in whole.items() if value is not None}


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "reason": "Error", "message": message}, status=code)
