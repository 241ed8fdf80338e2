"""Connections to an API server: of the operator, of kopf, and of the commands. Whoever reads an answer, it is bounded.

Owns: what aiohttp is told, and who is told who we are. Does not own: what is asked, what an answer means.
Invariants: no body and no line of a stream is longer than its bound; nothing is unpacked (what is packed all the same is no JSON); no
cookie is kept, since a pod behind the API server's proxy may set some for the API server.
"""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import connector
from multidict import CIMultiDict

from streamrl.errors import UserError
from streamrl_operator.kube.rest_config import RestConfig

MOST_BYTES = 2**24
"""Of an answer, or of one line of a watch. An object has 3 MiB at most, and a page of lists that is larger is asked for in parts."""
_MOST_ERROR_BYTES = 2**16
"""Of a refusal: a sentence, and a cause for each field."""
_ERROR = 300
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A peer that vanished without a word is noticed within half a minute. What Linux calls the first, macOS calls the second."""


class OversizeError(Exception):
    """An answer is longer than it may be. What was read is dropped, and the connection closed.

    None of aiohttp's errors: to kopf those are a connection that broke, and it asks for the same again at once, without a word.
    """


class _Bounded:
    """The content of an answer; all that is not about reading is the stream's."""

    def __init__(self, stream: aiohttp.StreamReader, *, most: float) -> None:
        self._stream = stream
        self.most = most

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)

    async def read(self) -> bytes:
        """The whole body."""
        data = bytearray()
        async for part in self._stream.iter_any():
            data += part
            self._check(len(data))
        return bytes(data)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Parts of a stream of lines."""
        line_bytes = 0
        async for part in self._stream.iter_chunked(size):
            ended = part.rfind(b"\n")
            line_bytes = line_bytes + len(part) if ended < 0 else len(part) - ended - 1
            self._check(line_bytes)
            yield part

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self.most:
            raise OversizeError(f"it has more than {self.most:.0f} bytes")


class ApiResponse(aiohttp.ClientResponse):
    """An answer that is read through its bound alone, also by those who know nothing of it."""

    async def start(self, connection: connector.Connection) -> Self:
        """As aiohttp begins to read it."""
        await super().start(connection)
        bounded = _Bounded(self.content, most=_MOST_ERROR_BYTES if self.status >= _ERROR else MOST_BYTES)
        self.content = cast(aiohttp.StreamReader, bounded)
        return self

    def at_most(self, size_bytes: float = math.inf) -> Self:
        """With another bound; without one the reader has its own."""
        cast(_Bounded, self.content).most = size_bytes
        return self


class ApiConnection:
    """Requests to one API server, in our name."""

    def __init__(self, access: RestConfig, *, agent: str) -> None:
        self.access = access
        self._made = partial(session, access, _no_redirected_socket, agent=agent)
        self._session = self._made()
        self._before: aiohttp.ClientSession | None = None
        """The one before ends what it has begun: its connections still show the certificate before."""
        self._shown: str | None = None
        """Certificate of the present one, if it is one that is renewed."""

    async def aclose(self) -> None:
        """End all that is under way."""
        for each in filter(None, (self._before, self._session)):
            await each.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - as aiohttp takes it
        **options: Any,  # noqa: ANN401 - as aiohttp takes them
    ) -> AsyncIterator[ApiResponse]:
        """The answer, whatever it is. `path`: of the API server, or a URL elsewhere, where nobody is told who we are.

        No redirect is followed: an API server sends none, but a pod behind its proxy may, and our token would go wherever it says.

        Raises:
            UserError: we have no credential, or none in time.
            aiohttp.ClientError, OSError, TimeoutError: there is no answer.
        """
        is_ours = path.startswith("/")
        way = await self._way(timeout.total) if is_ours else {"headers": CIMultiDict()}
        way["headers"].update(headers)
        url = self.access.server + path if is_ours else path
        if self._session.closed:  # aiohttp has a RuntimeError for that
            raise aiohttp.ClientConnectionError("the connection was ended")
        async with self._session.request(
            method, url, allow_redirects=False, timeout=timeout, **way, **options
        ) as response:
            assert isinstance(response, ApiResponse), "the session makes no others"
            yield response

    async def websocket(self, path: str, **options: Any) -> aiohttp.ClientWebSocketResponse:  # noqa: ANN401 - as aiohttp takes them
        """A socket of the API server. Raises as a request does, and aiohttp.WSServerHandshakeError."""
        way = await self._way()
        socket: aiohttp.ClientWebSocketResponse = await self._session.ws_connect(
            self.access.server + path, **way, **options
        )
        return socket

    async def _way(self, total_s: float | None = None) -> dict[str, Any]:
        """Waits for a credential as long as the request may take. A new certificate has new connections."""
        try:
            async with asyncio.timeout(total_s):
                headers = await self.access.headers()
        except TimeoutError:
            rule, fix = f"there was no credential within {total_s:g} s", "run kubectl once with this kubeconfig"
            raise UserError(field="KUBECONFIG", rule=rule, fix=fix) from None
        if self.access.source is not None and self.access.source.certificate != self._shown:
            self._shown = self.access.source.certificate
            ended, self._before, self._session = self._before, self._session, self._made()
            if ended is not None:
                await ended.close()
        return {"headers": headers, "proxy": self.access.proxy, "server_hostname": self.access.tls_server_name}


def session(
    access: RestConfig,
    *middlewares: aiohttp.ClientMiddlewareType,
    agent: str,
    proxy: str | None = None,
) -> aiohttp.ClientSession:
    """Connections to an API server, for those who make their requests themselves."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=access.tls or True, limit=0, socket_factory=_socket),
        headers={"User-Agent": agent, "Accept-Encoding": "identity"},
        middlewares=middlewares,
        response_class=ApiResponse,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        proxy=proxy,
    )


async def _no_redirected_socket(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """aiohttp cannot be told to follow no redirect where a socket is asked for, and our token would go along."""
    response = await handler(request)
    if "Upgrade" in request.headers and response.status >= _ERROR:
        response.close()
        raise aiohttp.WSServerHandshakeError(
            response.request_info, (), status=response.status, message="no socket", headers=response.headers
        )
    return response


def environment_proxy(url: str) -> str | None:
    """The proxy that the environment names for a URL. aiohttp's own look there (`trust_env`) would send what .netrc has, too."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _socket(address: Any) -> socket.socket:  # noqa: ANN401 - aiohttp's own AddrInfoType
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
