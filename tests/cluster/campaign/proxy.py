"""A reverse proxy between one operator and the API server: numbers the operator's writes, and lets faults do harm.

    operator ── plain HTTP ──▶ Proxy ── faults before ──▶ API server ── faults after, on each event ──▶ operator

Owns: the numbering since `mark`, forwarding, cut connections. Does not own: what is done when (`faults.py`). A write is a POST, PUT, PATCH
or DELETE of anything but Leases and Events; Events are counted apart, since at rest there must be none of them either.
Waits for: the API server, as long as the operator does; unblocked by `close`.
"""

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from streamrl_operator.kube.rest_config import RestConfig

WRITES = ("POST", "PUT", "PATCH", "DELETE")
_UNNUMBERED = ("leases", "events")
_PASSED = ("Content-Type", "Retry-After")
"""Headers of an answer that the operator reads."""


class Cut(Exception):  # noqa: N818 - what is done, not what went wrong
    """The connection breaks here, without another byte."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One request of the operator."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes
    number: int = 0
    """Of a write since the mark, from 1; 0: no write."""

    @property
    def resource(self) -> str:
        """Plural of the kind, and the part of the object if it is not all of it."""
        parts = self.path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        if parts[0] == "namespaces" and len(parts) > 2:
            parts = parts[2:]
        return "/".join((parts[0], *parts[2:3]))

    @property
    def is_watch(self) -> bool:
        """Whether it goes on for as long as both sides like."""
        return self.query.get("watch") in ("1", "true")

    @property
    def is_list(self) -> bool:
        """Whether it reads a collection at once."""
        return self.method == "GET" and not self.is_watch and "limit" in self.query

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.method} {self.resource} {self.path.rpartition('/')[2]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def refusal(status: int, *, reason: str, retry_after_s: int | None = None) -> Reply:
    """An error as an API server words it."""
    body: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    body |= {"reason": reason, "message": f"{reason}: made by the campaign"}
    headers = {"Content-Type": "application/json"}
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return Reply(status=status, body=json.dumps(body).encode(), headers=headers)


class Fault:
    """Harm of one kind. Each hook sees every request; the least harm is none."""

    async def before(self, call: Call) -> Reply | None:
        """Before the API server sees it: an answer in its stead, or None. May raise Cut."""
        del call
        return None

    async def after(self, call: Call, reply: Reply) -> Reply:
        """The answer that goes on to the operator. May raise Cut."""
        del call
        return reply

    async def event(self, call: Call, line: bytes) -> bytes | None:
        """One event of a watch; None: it is never told. May raise Cut."""
        del call
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """The API server, and connections to it as the operator's user; shared by all proxies."""

    server: str
    session: aiohttp.ClientSession


@asynccontextmanager
async def upstream(access: RestConfig) -> AsyncIterator[Upstream]:
    """Connections for the block."""
    connector = aiohttp.TCPConnector(ssl=access.tls or True, limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=20)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        yield Upstream(server=access.server, session=session)


class Proxy:
    """The API server as one operator sees it."""

    def __init__(self, behind: Upstream) -> None:
        self._behind = behind
        self._runner = web.ServerRunner(
            web.Server(self._handle, access_log=None, handler_cancellation=True),  # a dead operator's watches end
            shutdown_timeout=0.1,
        )
        self._open: dict[int, web.BaseRequest] = {}
        self.faults: Sequence[Fault] = ()
        self.writes: list[Call] = []
        """Since the mark, as they arrived."""
        self.events = 0
        """Events that were made since the mark."""
        self.last_write_s = time.monotonic()

    async def start(self) -> str:
        """Serve; the address."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Serve no more."""
        self.cut_all()
        await self._runner.cleanup()

    def mark(self) -> None:
        """Count from here."""
        self.writes, self.events = [], 0

    def cut_all(self) -> None:
        """Break every connection that waits for something."""
        for request in list(self._open.values()):
            _abort(request)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = Call(method=request.method, path=request.path, query=dict(request.query), body=await request.read())
        self._count(call)
        self._open[id(request)] = request
        try:
            return await self._answer(request, call)
        except (Cut, aiohttp.ClientError, ConnectionError):
            _abort(request)
            return web.Response(status=502)  # nobody reads it
        finally:
            del self._open[id(request)]

    def _count(self, call: Call) -> None:
        if call.method not in WRITES:
            return
        if call.resource not in _UNNUMBERED:
            self.writes.append(call)
            call.number = len(self.writes)
        if call.resource == "events":
            self.events += 1
        if call.resource != "leases":
            self.last_write_s = time.monotonic()

    async def _answer(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        for fault in self.faults:
            if (instead := await fault.before(call)) is not None:
                return _response(instead)
        async with self._behind.session.request(
            call.method,
            URL(self._behind.server + request.raw_path, encoded=True),
            data=call.body or None,
            headers={name: request.headers[name] for name in ("Content-Type", "Accept") if name in request.headers},
        ) as answer:
            if call.is_watch and answer.status == web.HTTPOk.status_code:
                return await self._stream(request, call, answer)
            headers = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
            reply = Reply(status=answer.status, body=await answer.read(), headers=headers)
        for fault in self.faults:
            reply = await fault.after(call, reply)
        return _response(reply)

    async def _stream(self, request: web.BaseRequest, call: Call, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        rest = b""
        async for data in answer.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                told: bytes | None = line
                for fault in self.faults:
                    told = None if told is None else await fault.event(call, told)
                if told is not None:
                    await response.write(told + b"\n")
        await response.write_eof()
        return response


def _response(reply: Reply) -> web.Response:
    return web.Response(status=reply.status, body=reply.body, headers=reply.headers)


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()
