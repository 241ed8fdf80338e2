"""Connections to servers of weights over HTTP (`http_server.py`): a puller's, which is a `Source`; and rank 0's to other ranks, of which it passes slices on.

Connecting is the event loop's; handshake, requests and bytes are a thread's, which blocks and fills the final memory. A call that is cancelled
shuts the connection down, so its thread ends, and waits for that: no thread writes into memory that somebody else has by then.

Rank 0 passes on what other ranks hold to those who reach rank 0 alone: generators in another cluster. One piece is in memory meanwhile, and
nothing is kept. Whatever is wrong with the holder ends the pieces early; whoever asked for them finds out by their number, and by their hash.

Owns requests, and what answers mean. Does not own what is asked for, or whether it is asked again (`pull.py`), or what it hashes to.
"""

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead, NotConnected
from time import monotonic
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from streamrl.proto import stream_pb2 as pb
from streamrl_pages.http_fetch import BoundedReader, OversizeError
from streamrl_workers.stream.auth import Role, identity_in
from streamrl_workers.stream.tls import Tls, peer_names
from streamrl_workers.weights.http_server import (
    CLUSTER_HEADER,
    MARK_HEADER,
    HttpWeightServer,
    content_path,
    keep_alive,
    versions_path,
)
from streamrl_workers.weights.source import (
    NotKeptError,
    NotYetError,
    Piece,
    SourceBrokenError,
    SourceRefusedError,
    until_ended,
)
from streamrl_workers.weights.store import WeightStore

_CONNECT_TIMEOUT_S = 5.0
"""Of one attempt, the handshake not included."""
_STALL_TIMEOUT_S = 20.0
"""Without a byte for so long, the connection is given up; the head of an answer is whole by then."""
_MANIFEST_BYTES = 2**28
"""Longest manifest: of two million tensors."""
_REASON_BYTES = 1000
"""Of a refusal's text."""
_TOLD_BYTES = 2**20
"""Bytes that have arrived are told of in such portions."""
_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})")
_MARK = re.compile(r"\d{1,20}")
_HEAD_BYTES = 2**13
"""Maximum size of an answer's head, and of a refusal's text: read byte by byte, it takes tens of milliseconds."""

_T = TypeVar("_T")
_log = logging.getLogger("streamrl.weights")


class HttpSource:
    """Made by `connect`."""

    def __init__(self, connection: socket.socket, *, address: str, tls: Tls | None, headers: dict[str, str]) -> None:
        self._tls = tls
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        connection.settimeout(_STALL_TIMEOUT_S)
        keep_alive(connection)
        self._socket = connection if tls is None else _secured(connection, tls=tls)
        self._http = _Http(address, self._socket)

    @classmethod
    async def connect(cls, address: str, *, tls: Tls | None, token: str, role: Role, cluster: str = "") -> "HttpSource":
        """A connection to the server at host:port, whose certificate names `role`; we are in `cluster`.

        Raises:
            SourceBrokenError: nobody is there, or is not who he should be.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= {CLUSTER_HEADER: cluster} if cluster else {}
        connection = await _connected(address)
        try:
            source = cls(connection, address=address, tls=tls, headers=headers)
        except (OSError, ValueError) as error:  # it has ended, or our files are not whole
            connection.close()
            raise SourceBrokenError(str(error) or type(error).__name__) from None
        try:
            await source._in_thread(source._begin, role)
        except BaseException:
            await source.close()
            raise
        return source

    async def manifest(self, version: pb.VersionName) -> pb.Manifest:
        return await self._in_thread(self._manifest, version)

    async def fetch(self, piece: Piece, *, arrived: Callable[[int], None]) -> None:
        await self._in_thread(self._fetch, piece, lambda size: self._loop.call_soon_threadsafe(arrived, size))

    def abort(self) -> None:
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    async def close(self) -> None:
        self._http.close()
        self._socket.close()
        self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[..., _T], *args: Any) -> _T:  # noqa: ANN401 - whatever `call` takes
        future = self._loop.run_in_executor(self._thread, call, *args)
        try:
            return await asyncio.shield(future)
        except (OSError, NotConnected, IncompleteRead) as error:
            raise SourceBrokenError(_reason(error)) from None
        except (HTTPException, OversizeError) as error:
            raise SourceRefusedError(f"this is no server of weights: {_reason(error)[:_REASON_BYTES]}") from None
        except asyncio.CancelledError:
            self.abort()
            with suppress(asyncio.CancelledError):
                await until_ended(future)
            raise

    # ---- in the thread

    def _begin(self, role: Role) -> None:
        _check_role(self._socket, role=role, tls=self._tls)

    def _manifest(self, version: pb.VersionName) -> pb.Manifest:
        with self._answer(versions_path(version), headers={}) as response:
            size = response.length
            if size is None or size > _MANIFEST_BYTES:
                raise SourceRefusedError(f"a manifest of {size} bytes")
            body = self._received(size)
        try:
            return pb.Manifest.FromString(body)
        except DecodeError:
            raise SourceRefusedError(f"{size} bytes that are no manifest") from None

    def _fetch(self, piece: Piece, told: Callable[[int], object]) -> None:
        begin, end = piece.begin, piece.end
        with self._answer(content_path(piece.hash), headers={"Range": f"bytes={begin}-{end - 1}"}) as response:
            found = _RANGE.fullmatch(response.getheader("Content-Range", ""))
            sent = [int(number) for number in found.groups()] if found else None
            if sent != [begin, end - 1, len(piece.buffer)] or response.length != end - begin:
                self._http.close()  # what it sends is not read, so nothing else can be asked here
                raise SourceRefusedError(
                    f"of {len(piece.buffer)} bytes {begin} to {end} were asked for, it sends {sent}"
                )
            told_to = begin
            try:
                while piece.begin < end:
                    piece.begin += self._receive_some(piece.buffer[piece.begin : end])
                    if piece.begin - told_to >= _TOLD_BYTES:
                        told(piece.begin - told_to)
                        told_to = piece.begin
            finally:
                if piece.begin > told_to:
                    told(piece.begin - told_to)

    @contextmanager
    def _answer(self, path: str, *, headers: dict[str, str]) -> Iterator[HTTPResponse]:
        self._http.request("GET", path, headers={**self._headers, **headers})
        with self._http.getresponse() as response:
            if response.status in (200, 206):
                self._socket.settimeout(_STALL_TIMEOUT_S)
                yield response
                return
            reason = _line(response.read(_REASON_BYTES).decode(errors="replace"))
            mark = response.getheader(MARK_HEADER, "")
            if response.length:
                self._http.close()  # the rest is not read, so nothing else can be asked here
        if response.status == 404:  # noqa: PLR2004
            raise NotKeptError(reason)
        if 400 <= response.status < 500:  # noqa: PLR2004
            raise SourceRefusedError(f"{response.status}: {reason}")
        if response.status == 503 and _MARK.fullmatch(mark):  # noqa: PLR2004
            raise NotYetError(int(mark))
        raise SourceBrokenError(f"{response.status}: {reason}")

    def _received(self, size: int) -> bytes:
        """All bytes of a body; memory is taken as they arrive, not as they are announced."""
        body, part = bytearray(), memoryview(bytearray(_TOLD_BYTES))
        while len(body) < size:
            body += part[: self._receive_some(part[: size - len(body)])]
        return bytes(body)

    def _receive_some(self, memory: memoryview) -> int:
        count = self._socket.recv_into(memory)
        if not count:
            raise ConnectionError("the connection has ended")
        return count


class _Unbuffered(HTTPResponse):
    """Takes no byte behind the head: the body is received where it stays, and what has arrived is known when the connection breaks.

    The head, and the text of a refusal, have one deadline and a bound: they may not arrive byte by byte for as long as a pull lasts.
    """

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as http.client has it
        super().__init__(sock, *args, **options)
        self.fp.close()
        until_s = monotonic() + _STALL_TIMEOUT_S
        reader = BoundedReader(sock, until_s=until_s, most_bytes=_HEAD_BYTES)
        self.fp = reader  # type: ignore[assignment] # it is read by `readline` alone


class _Http(HTTPConnection):
    response_class = _Unbuffered
    auto_open = 0  # what has ended stays so

    def __init__(self, address: str, connection: socket.socket) -> None:
        super().__init__(address)
        self.sock = connection


class PassingWeightServer(HttpWeightServer):
    """Rank 0's server."""

    def __init__(
        self,
        store: WeightStore,
        *,
        token: str,
        tls: Tls | None,
        **options: Any,  # noqa: ANN401 - of `HttpWeightServer`
    ) -> None:
        self._elsewhere = store.elsewhere
        self._token = token
        self._tls = tls
        super().__init__(store, token=token, tls=tls, **options)

    def size_bytes(self, content_hash: bytes) -> int | None:
        """Return the size of a content, also of one that another rank holds."""
        own, found = super().size_bytes(content_hash), self._elsewhere(content_hash)
        return found[1] if own is None and found is not None else own

    def content(self, content_hash: bytes, *, begin: int, end: int) -> Iterator[memoryview]:
        """Yield bytes of a content, also of one that another rank holds."""
        for piece in super().content(content_hash, begin=begin, end=end):
            yield piece
            begin += len(piece)
        found = self._elsewhere(content_hash)
        if begin == end or found is None:
            return
        buffer = memoryview(bytearray(min(self.slice_bytes, end - begin)))
        try:
            with self._asked(found[0], content_hash, begin=begin, end=end) as holder:
                while begin < end and (count := holder.recv_into(buffer[: end - begin])):
                    yield buffer[:count]
                    begin += count
        except (OSError, HTTPException, OversizeError, ValueError) as error:
            _log.warning("the rank at %s gave no slice to pass on: %s", found[0], error or type(error).__name__)

    @contextmanager
    def _asked(self, address: str, content_hash: bytes, *, begin: int, end: int) -> Iterator[socket.socket]:
        """Give a connection to a holder, on which the bytes follow."""
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_STALL_TIMEOUT_S) as plain:
            connection = plain if self._tls is None else _secured(plain, tls=self._tls)
            with connection:
                _check_role(connection, role="trainer", tls=self._tls)
                http = _Http(address, connection)
                headers = {"Range": f"bytes={begin}-{end - 1}", "Authorization": f"Bearer {self._token}"}
                http.request("GET", content_path(content_hash), headers=headers)
                with http.getresponse() as answer:
                    if answer.status != 206:  # noqa: PLR2004
                        raise ConnectionError(f"it answered {answer.status}")
                    connection.settimeout(_STALL_TIMEOUT_S)
                    yield connection


async def _connected(address: str) -> socket.socket:
    """By the event loop, which can be told to stop."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            return await _first_of(host.strip("[]"), port)
    except TimeoutError:
        raise SourceBrokenError(f"nobody answered within {_CONNECT_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise SourceBrokenError(_reason(error)) from None


async def _first_of(host: str, port: str) -> socket.socket:
    """A connection to the first address of a host that takes it."""
    loop = asyncio.get_running_loop()
    error = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)  # noqa: FBT003 - as socket has it
            await loop.sock_connect(connection, place)
        except OSError as failed:
            connection.close()
            error = failed
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise error


def _secured(connection: socket.socket, *, tls: Tls) -> ssl.SSLSocket:
    return tls.ssl_context(server=False).wrap_socket(
        connection, server_hostname=tls.server_name, do_handshake_on_connect=False
    )


def _check_role(connection: socket.socket, *, role: Role, tls: Tls | None) -> None:
    """Shake hands, where there are certificates. Raises OSError unless the other side has `role` in this job."""
    if tls is None:
        return
    assert isinstance(connection, ssl.SSLSocket)
    connection.do_handshake()
    peer, me = identity_in(peer_names(connection)), tls.identity
    if peer is None or (peer.namespace, peer.job, peer.role) != (me.namespace, me.job, role):
        raise ConnectionError(
            f"its certificate is of {peer or 'no role'}, not of the {role} of {me.namespace}/{me.job}"
        )


def _reason(error: OSError | HTTPException | OversizeError) -> str:
    return _line(str(error)) or type(error).__name__


def _line(text: str) -> str:
    """Return what a server has sent, in one line."""
    return " ".join(text.split())
