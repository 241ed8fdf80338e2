"""HTTP/1.1 in the running loop: a few read-only endpoints of a process, or an application with pages for people (`website.py`).

Owns: the port, and who may hold it how long. Does not own: what a page says. Starlette has the routes, uvicorn and h11 the protocol.

Invariants:
- A connection carries one request. It ends `_TIMEOUT_S` after it was made (an application may name another time), whatever it has sent or read.
  An application may admit one whose caller it knows (`admit` of the state): strangers do not take its place. It may hold one
  (`hold`): then it has no deadline either.
- `_CONNECTIONS` of strangers are open at most, `of_a_peer` of one address. A new one takes the place of the oldest: who asks is
  answered at once, so the oldest is one that waits for nothing but its end.
- GET and HEAD alone; other methods are 405, other paths 404. Nobody reads a request's body.
"""

import asyncio
import errno
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from streamrl.errors import UserError
from streamrl.keys import ENV_SIGNALS_PORT

Endpoint = Callable[[], Response]
"""Makes an answer. It is called in the server's loop and must be quick. One that raises is logged and answered with 500."""

_TIMEOUT_S = 5.0
"""For one request, from the connection to the last byte of the answer."""
_CONNECTIONS = 256
"""Some 30 kB each, and a process has 1,024 file descriptors or more."""
_CONNECTIONS_OF_A_PEER = 16
"""Kubelet, Prometheus and the operator open one at a time; some may share an address."""
_HEADER_BYTES = 8 * 1024
"""A scraper's request has some hundred bytes."""
_TURNS_OF_AN_ACCEPT = 3
"""Of asyncio's loop: from a socket's accept to `connection_made` it needs a task, a call, and ours after it."""
_CLOSE = ("connection", "close")
_NOT_KEPT = ("cache-control", "no-store")


def metrics_response(text: bytes) -> Response:
    """Metrics as prometheus_client writes them."""
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def health_response(fault: str) -> Response:
    """200 where there is no fault, else 503 with what it is."""
    return PlainTextResponse(f"{fault or 'ok'}\n", status_code=503 if fault else 200)


def json_response(value: Mapping[str, Any]) -> Response:
    """A JSON object. It has no word for infinity: what is no finite number is null."""
    text = json.dumps(value)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None))
    return Response(text, media_type="application/json")


class PageServer:
    """Serves an application. `start` binds, `close` ends."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        timeout_s: float | None = None,
        of_a_peer: int = _CONNECTIONS_OF_A_PEER,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`timeout_s`: for one request; None: `_TIMEOUT_S`. `of_a_peer`: open connections of one address. `headers`: of every answer."""
        self._timeout_s = timeout_s
        self._of_a_peer = of_a_peer
        self._config = Config(
            app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            workers=1,
            proxy_headers=False,
            access_log=False,
            log_config=None,
            log_level=logging.ERROR,  # what peers send wrong is no news
            headers=[_CLOSE, *headers],
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        self._config.load()
        self._open: dict[_Connection, str] = {}
        self._held: set[_Connection] = set()
        self._state = ServerState()
        self._state.default_headers = self._config.encoded_headers
        self._server: asyncio.Server | None = None

    async def start(self, *, host: str, port: int, field: str = ENV_SIGNALS_PORT) -> int:
        """Bind and serve; returns the port (0 = any free one). A port in use is the error of the user, who named it by `field`."""
        try:
            self._server = await asyncio.get_running_loop().create_server(self._connection, host, port)
        except OSError as error:
            raise _unbindable(error, port=port, field=field) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop serving; connections that are still open are broken off."""
        if self._server is None:
            return
        # Nobody more is accepted before the server is closed: asyncio would leave the socket open of a peer whom it has just accepted.
        for socket in self._server.sockets:
            asyncio.get_running_loop().remove_reader(socket.fileno())
        await _turns(_TURNS_OF_AN_ACCEPT)
        self._server.close()
        for connection in (*self._open, *self._held):
            connection.transport.abort()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        await self._server.wait_closed()
        # The broken connections close their sockets; Python 3.11's `wait_closed` does not wait for that.
        await _turns(1)
        self._server = None

    def _connection(self) -> "_Connection":
        timeout_s = _TIMEOUT_S if self._timeout_s is None else self._timeout_s
        return _Connection(
            self._config, self._state, open_=self._open, held=self._held, timeout_s=timeout_s, of_a_peer=self._of_a_peer
        )


class EndpointServer(PageServer):
    """Serves endpoints by path."""

    def __init__(self, pages: Mapping[str, Endpoint]) -> None:
        routes = [Route(path, _endpoint(page), methods=["GET"]) for path, page in pages.items()]
        super().__init__(Router(routes, redirect_slashes=False), headers=[_NOT_KEPT])


class _Connection(H11Protocol):
    """One peer's connection, until its deadline or until its place is needed."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        *,
        open_: "dict[_Connection, str]",
        held: "set[_Connection]",
        timeout_s: float,
        of_a_peer: int,
    ) -> None:
        super().__init__(config, state, app_state={"admit": self._admit, "hold": self._hold})
        self._timeout_s = timeout_s
        self._of_a_peer = of_a_peer
        self._open = open_  # oldest first, with the address of each
        self._held = held

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._timeout_s, transport.abort)
        peer = self.client[0] if self.client else ""
        self._make_room(peer)
        self._open[self] = peer

    def _admit(self) -> None:
        """Let no newer connection take the place of this one."""
        if self._open.pop(self, None) is not None:
            self._held.add(self)

    def _hold(self) -> None:
        """Admit it, and let its request wait without a deadline."""
        self._deadline.cancel()
        self._admit()

    def _make_room(self, peer: str) -> None:
        of_peer = [connection for connection, other in self._open.items() if other == peer]
        oldest = of_peer if len(of_peer) >= self._of_a_peer else list(self._open)
        if oldest is of_peer or len(oldest) >= _CONNECTIONS:
            del self._open[oldest[0]]
            oldest[0].transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._open.pop(self, None)
        self._held.discard(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Nothing where the request is whole and only its body is wrong: the answer is on its way, and a second would be an error."""
        if self.cycle is None:
            super().send_400_response(msg)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _endpoint(page: Endpoint) -> Callable[[Request], Any]:
    async def endpoint(_: Request) -> Response:
        return page()

    return endpoint


def _unbindable(error: OSError, *, port: int, field: str) -> UserError:
    rule = f"port {port} is in use" if error.errno == errno.EADDRINUSE else f"cannot bind port {port}: {error.strerror}"
    return UserError(field=field, rule=rule, fix="choose another port, or 0 for any free one")
