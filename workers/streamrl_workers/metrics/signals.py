"""The signals port: a read-only HTTP/1.1 server for metrics, health and numbers.

Owns: parsing requests, limits, routes. Does not own: what the numbers are (callbacks).

GET /metrics  Prometheus text      GET /healthz  200 ok | 503 with the reason      GET /numbers  JSON
Anything else is 404; another method is 405. One request per connection.

Invariants: requests have no effect; a request is bounded in bytes and in time; connections are bounded in number.
"""

import asyncio
import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from streamrl.errors import UserError
from streamrl.keys import ENV_SIGNALS_PORT

_MAX_HEADER_BYTES = 8 * 1024
"""A scraper's request has some hundred bytes."""
_REQUEST_TIMEOUT_S = 5.0
"""For one request, reading and writing together."""
_MAX_CONNECTIONS = 64
"""More at once are closed unanswered: nobody reads numbers so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Where the pages come from; the callbacks are called in the server's loop and must be quick."""

    metrics: Callable[[], bytes]
    numbers: Callable[[], Mapping[str, Any]]
    fault: Callable[[], str] = lambda: ""  # "" = healthy, else why not


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    def encoded(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + self.body


class SignalsServer:
    """Serves `Pages` in the running loop. `start` binds, `close` ends."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self, *, host: str, port: int) -> int:
        """Bind and serve; returns the port (0 = any free one). A port in use is the user's error."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEADER_BYTES)
        except OSError as error:
            raise _unbindable(error, port=port) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    writer.write((await self._answer(reader)).encoded())
                    await writer.drain()
        except (TimeoutError, ConnectionError):
            writer.transport.abort()  # a slow or vanished reader gets nothing more
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> _Response:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except asyncio.IncompleteReadError:
            return _text(HTTPStatus.BAD_REQUEST)
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):  # noqa: PLR2004 - method, path, protocol
            return _text(HTTPStatus.BAD_REQUEST)
        return self._route(method=words[0], path=words[1].partition("?")[0])

    def _route(self, *, method: str, path: str) -> _Response:
        page = {"/metrics": self._metrics, "/healthz": self._healthz, "/numbers": self._numbers}.get(path)
        if page is None:
            return _text(HTTPStatus.NOT_FOUND)
        if method != "GET":
            return _text(HTTPStatus.METHOD_NOT_ALLOWED)
        return page()

    def _metrics(self) -> _Response:
        return _Response(
            status=HTTPStatus.OK,
            body=self._pages.metrics(),
            content_type="text/plain; version=0.0.4; charset=utf-8",
        )

    def _healthz(self) -> _Response:
        fault = self._pages.fault()
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, fault) if fault else _text(HTTPStatus.OK, "ok")

    def _numbers(self) -> _Response:
        body = json.dumps(self._pages.numbers()).encode()
        return _Response(status=HTTPStatus.OK, body=body, content_type="application/json")


def _text(status: HTTPStatus, text: str = "") -> _Response:
    return _Response(status=status, body=f"{text or status.phrase}\n".encode())


def _unbindable(error: OSError, *, port: int) -> UserError:
    rule = f"port {port} is in use" if error.errno == errno.EADDRINUSE else f"cannot bind port {port}: {error.strerror}"
    return UserError(field=ENV_SIGNALS_PORT, rule=rule, fix="choose another port, or 0 for any free one")
