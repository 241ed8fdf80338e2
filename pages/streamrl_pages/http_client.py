"""Requests over HTTP by aiohttp: all clients of ours that wait in an event loop, of API servers, OIDC issuers and endpoints that judge.

Owns: what aiohttp is told, so that the invariants of `streamrl_pages.http_fetch` hold whoever reads an answer. Does not own: what is asked, how long it may
take (a timeout of the request, or of the caller), what an answer means.
Invariants: no body and no line of a stream is longer than its bound; nothing is decoded; no redirect is followed, or a token would go wherever a
pod behind an API server's proxy says; no cookie is kept, since such a pod may set some for the API server; nothing of the environment (proxies,
.netrc) is used unasked.
"""

import math
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any, Self, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import connector
from multidict import CIMultiDict, CIMultiDictProxy

from streamrl_pages.http_fetch import OversizeError, encoding_problem

Session = aiohttp.ClientSession
MOST_BYTES = 2**24
"""Of an answer, or of one line of a watch. An object has 3 MiB at most, and a page of lists that is larger is asked for in parts."""
_MOST_ERROR_BYTES = 2**16
"""Of a refusal: a sentence, and a cause for each field."""
_ERROR = 300
_WAYS_ELSEWHERE = ("location", "uri")
"""Headers of a redirect. Without them aiohttp follows none, whoever asks: it cannot be told so where a socket is asked for."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A peer that vanished without a word is noticed within half a minute. What Linux calls the first, macOS calls the second."""


class EncodedError(aiohttp.ClientPayloadError):
    """Answer that is encoded, though it was asked for as it is."""


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
        # None of aiohttp's errors: to kopf those are a connection that broke, and it asks for the same again at once, without a word.
        if size_bytes > self.most:
            raise OversizeError(f"it has more than {self.most:.0f} bytes")


class BoundedResponse(aiohttp.ClientResponse):
    """An answer that is read through its bound alone, also by those who know nothing of it."""

    async def start(self, connection: connector.Connection) -> Self:
        """As aiohttp begins to read it."""
        await super().start(connection)
        if problem := encoding_problem(self.headers.get("Content-Encoding")):
            raise EncodedError(f"status {self.status}: {problem}")
        bounded = _Bounded(self.content, most=_MOST_ERROR_BYTES if self.status >= _ERROR else MOST_BYTES)
        self.content = cast(aiohttp.StreamReader, bounded)
        return self

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """All but those that lead elsewhere."""
        kept = ((name, value) for name, value in self._headers.items() if name.lower() not in _WAYS_ELSEWHERE)
        return CIMultiDictProxy(CIMultiDict(kept))

    def at_most(self, size_bytes: float = math.inf) -> Self:
        """With another bound; without one the reader has its own."""
        cast(_Bounded, self.content).most = size_bytes
        return self


def session(
    *middlewares: aiohttp.ClientMiddlewareType,
    tls: ssl.SSLContext | None,
    agent: str,
    proxy: str | None = None,
    connections: int = 0,
) -> Session:
    """Make connections, when a loop runs.

    Args:
        middlewares: of aiohttp, around each request.
        tls: whom we trust; None: the system's authorities.
        agent: name of the program.
        proxy: through which all requests go.
        connections: at once; 0: any number.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls or True, limit=connections, socket_factory=_socket),
        headers={"User-Agent": agent, "Accept-Encoding": "identity"},
        middlewares=middlewares,
        response_class=BoundedResponse,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        proxy=proxy,
    )


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
