"""Serves the versions of a store over HTTP/1.1, by TLS where there are certificates; a thread for each connection.

    GET /weights/v2/blake3/versions/<attempt>-<step>-<hash>    its Manifest; the version stays kept while this connection lives
    GET /weights/v2/blake3/content/<hash>                      the bytes of a slice; `Range: bytes=a-b` is answered

Owns the port, who is let in, requests and status codes. Does not own which versions are kept (`store.py`).

Invariants:
- Nobody is given anything before `stream/auth.py` has let him in: by the token of the run, or by the role in his certificate.
- A connection ends when its handshake or first request takes too long, when the other side takes no bytes, and when it is too old.
- A request's head has `_HEAD_BYTES` at most; no more of it is read. A request has no body.
- A reader who stalls holds the bytes of one piece, and with it of its slice, until `_STALL_S` end him: they are looked up again for each piece.
- Strangers take no places from those who are let in, and one address with many takes none from another.
"""

import io
import logging
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from math import inf
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from types import MappingProxyType
from typing import Any, ClassVar

import grpc

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.auth import LOOPBACK, WEIGHTS_PATH, Refusal, RoleDoor, TokenDoor
from streamrl_workers.stream.channel import PEER_LOST_S, port_in_use
from streamrl_workers.stream.tls import AGE_S, GRACE_S, Tls, peer_names
from streamrl_workers.weights.hashing import HASH_ALGORITHM, version_text
from streamrl_workers.weights.source import NotYetError, ServedStore

_MOST_CONNECTIONS = 512
"""That are let in. More are closed at once, and come again. Each has a thread; a puller has four."""
_MOST_STRANGERS = 128
"""Connections that have not shown yet who they are; of the address that has most of them the oldest makes room."""
_HEAD_BYTES = 8 * 1024
"""Maximum size of a request's line and headers together. A puller's have some hundred bytes."""
_FIRST_REQUEST_S = 10.0
"""From the first byte of a connection until we know who it is."""
_STALL_S = 60.0
"""For the other side to take a piece."""
_LOOK_S = 0.25
"""Between two looks at connections that are too old."""
CLUSTER_HEADER = "Streamrl-Cluster"
"""With a request: where the asker is, if that is not the trainer's cluster."""
_MOST_LINKS = 256
"""Clusters with a bound of their own; what is more shares one."""
_LINK_STEP_S = 0.1
"""Of a bounded link's time, that one sender takes at once."""
MARK_HEADER = "Streamrl-Arrived"
"""With 503: what was asked for is on its way to this server, and so much has come to it."""
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_VERSION = re.compile(r"(\d{1,9})-(\d{1,19})-((?:[0-9a-f]{2}){0,64})")
_HASH = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger("streamrl.weights")


def versions_path(version: pb.VersionName) -> str:
    """Of a version's manifest; it says by what the asker verifies."""
    return f"{WEIGHTS_PATH}/v2/{HASH_ALGORITHM}/versions/{version_text(version)}"


def content_path(content_hash: bytes) -> str:
    """Of the bytes of a hash."""
    return f"{WEIGHTS_PATH}/v2/{HASH_ALGORITHM}/content/{content_hash.hex()}"


class LinkCap:
    """A link that carries so many bytes a second; those who use it wait in turn."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait_s(self, size_bytes: int, *, now_s: float) -> float:
        """How long a sender waits before he sends so many bytes, which he does then."""
        with self._lock:
            begin_s = max(now_s, self._free_s)
            self._free_s = begin_s + size_bytes / self.bytes_per_s
            return begin_s - now_s


class HttpWeightServer:
    """Serves from its making until `close`."""

    slice_bytes: ClassVar[int] = 2**20
    """Sent at once: between two pieces the version may go."""

    def __init__(
        self,
        store: ServedStore,
        *,
        token: str,
        tls: Tls | None = None,
        host: str = LOOPBACK,
        port: int = 0,
        remote_bytes_per_s: float | None = None,
        uplink_bytes_per_s: float | None = None,
    ) -> None:
        """Serve holders of `token`; with `tls`, roles of this job's certificates. `port`: 0 = any.

        remote_bytes_per_s: most that each other cluster is sent; None: no bound.
        uplink_bytes_per_s: most that all of them together are sent; None: no bound.

        Raises:
            UserError: the port is in use or not ours to take.
        """
        self.store = store
        self.served_bytes = 0
        """Of slices and deltas of the store, since it began. What is passed on is counted by its holder alone."""
        self._lock = threading.Lock()
        self._remote_bytes_per_s = remote_bytes_per_s
        self._uplink = None if uplink_bytes_per_s is None else LinkCap(uplink_bytes_per_s)
        self._links: dict[str, LinkCap] = {}
        try:
            self._server = _Server(self, host=host, port=port, token=token, tls=tls)
        except OSError:
            raise port_in_use(port, host=host) from None
        bound = self._server.server_address[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        """host:port."""
        threading.Thread(target=self._server.serve_forever, args=(_LOOK_S,), name="weights-server", daemon=True).start()

    def manifest(self, version: pb.VersionName, *, kept: ExitStack) -> pb.Manifest | None:
        """Return the manifest of a version, which stays kept until `kept` ends; None: it is not kept."""
        return kept.enter_context(self.store.pulling(version))

    def size_bytes(self, content_hash: bytes) -> int | None:
        """Return the size of a content; None: it is not kept. Raises NotYetError."""
        data = self.store.content(content_hash)
        return None if data is None else len(data)

    def content(self, content_hash: bytes, *, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a hash in pieces, each read before the next one is asked for; they end early when it is not kept any more."""
        while begin < end and (data := self.store.content(content_hash)) is not None:
            piece = data[begin : min(end, begin + self.slice_bytes)]
            yield piece
            begin += len(piece)
            with self._lock:
                self.served_bytes += len(piece)

    def links(self, cluster: str) -> Sequence[LinkCap]:
        """The bounded links on the way to a cluster; none to our own, ""."""
        if not cluster:
            return ()
        uplink = () if self._uplink is None else (self._uplink,)
        if self._remote_bytes_per_s is None:
            return uplink
        with self._lock:
            known = cluster if cluster in self._links or len(self._links) < _MOST_LINKS else ""
            return (*uplink, self._links.setdefault(known, LinkCap(self._remote_bytes_per_s)))

    def offer(self, version: pb.VersionName, *, ended: Callable[[], bool]) -> bool:
        """It is in the store, so it can be had."""
        return True

    def close(self) -> None:
        """End all connections, and take no new ones."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads, block_on_close = True, False
    request_queue_size = 128

    def __init__(self, service: HttpWeightServer, *, host: str, port: int, token: str, tls: Tls | None) -> None:
        self.service = service
        self.tls = tls
        self.age_s = AGE_S if tls is None else tls.age_s
        self._token_door = TokenDoor(token)
        self._role_door = None if tls is None else RoleDoor(tls.identity)
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, float] = {}
        """When each connection that was let in is ended, if it has not ended by itself."""
        self._strangers: dict[socket.socket, tuple[str, float]] = {}
        """The address, and the same moment, of those that are not let in yet, oldest first."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def refusal(self, handler: "_Handler") -> Refusal | None:
        """Why the peer is not let in."""
        if self._role_door is None:
            kind, _, token = handler.headers.get("Authorization", "").partition(" ")
            return self._token_door.refusal(token if kind == "Bearer" else "")
        names = peer_names(handler.connection)
        return self._role_door.refusal(names, method=WEIGHTS_PATH, address=handler.client_address[0])

    def let_in(self, connection: socket.socket, *, begun_s: float) -> None:
        """This connection may grow old."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._ends[connection] = begun_s + self.age_s + min(GRACE_S, self.age_s)

    def end_connections(self, *, older_than_s: float = float("inf")) -> None:
        """End those whose time has come before then."""
        with self._lock:
            ends = {connection: end_s for connection, (_, end_s) in self._strangers.items()} | self._ends
        for connection in [connection for connection, end_s in ends.items() if end_s <= older_than_s]:
            _end(connection)

    # ---- what socketserver calls

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        keep_alive(connection)
        if self.tls is not None:
            try:
                context = self.tls.ssl_context(server=True)
                connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            except (OSError, ValueError) as error:
                connection.close()
                raise OSError(str(error)) from error
        return connection, address

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401 - as socketserver has it
        with self._lock:
            if len(self._ends) >= _MOST_CONNECTIONS:
                return False
            if len(self._strangers) >= _MOST_STRANGERS:
                self._make_room()
            self._strangers[request] = (client_address[0], time.monotonic() + _FIRST_REQUEST_S)
        return True

    def _make_room(self) -> None:
        (address, _), *_ = Counter(address for address, _ in self._strangers.values()).most_common(1)
        oldest = next(connection for connection, (other, _) in self._strangers.items() if other == address)
        del self._strangers[oldest]
        _end(oldest)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        with self._lock:
            self._strangers.pop(request, None)
            self._ends.pop(request, None)
        with suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_WR)
        request.close()

    def service_actions(self) -> None:
        self.end_connections(older_than_s=time.monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        log.debug("a connection of %s ended", client_address, exc_info=True)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # its thread awakes, and closes it


def keep_alive(connection: socket.socket) -> None:
    """A peer that vanished without a word is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(PEER_LOST_S / 2))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(PEER_LOST_S / 6))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


_STATUSES = {
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
}


class _Incoming(io.BufferedReader):
    """What a peer sends, line by line, as far as a request's head may be long."""

    left_bytes = 0

    def readline(self, size: int | None = None, /) -> bytes:
        """Read a line. Raises LineTooLong: it goes beyond the head's bound."""
        line = super().readline(self.left_bytes + 1)
        self.left_bytes -= len(line)
        if self.left_bytes < 0:
            raise LineTooLong("head")
        return line


class _Handler(BaseHTTPRequestHandler):
    """One connection, in its thread."""

    protocol_version = "HTTP/1.1"
    rbufsize = 0  # `_Incoming` has the buffer
    server: _Server
    connection: ssl.SSLSocket

    def __init__(self, request: Any, client_address: Any, server: BaseServer) -> None:  # noqa: ANN401
        self._kept = ExitStack()
        with self._kept:
            super().__init__(request, client_address, server)

    def setup(self) -> None:
        self._begun_s = time.monotonic()
        self.request.settimeout(_FIRST_REQUEST_S)
        if self.server.tls is not None:
            self.request.do_handshake()
        super().setup()
        self.rfile: _Incoming = _Incoming(self.rfile)  # without a buffer it is raw

    def handle_one_request(self) -> None:
        self.rfile.left_bytes = _HEAD_BYTES
        with suppress(OSError):  # the peer is gone, or was ended
            try:
                super().handle_one_request()
            except LineTooLong:
                self.requestline = self.request_version = self.command = ""  # http.server's answer has them
                self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
            return
        self.close_connection = True

    def do_GET(self) -> None:
        if (refusal := self.server.refusal(self)) is not None:
            self.close_connection = True
            self._say(_STATUSES[refusal[0]], refusal[1])
            return
        self.server.let_in(self.connection, begun_s=self._begun_s)
        has_body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if has_body or self.request_version != "HTTP/1.1":
            self.close_connection = True
            self._say(HTTPStatus.BAD_REQUEST, "this server takes requests of HTTP/1.1 without a body")
            return
        self.connection.settimeout(_STALL_S)
        try:
            self._answer()
        except NotYetError as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers={MARK_HEADER: str(error.mark)})
        self.connection.settimeout(self.server.age_s)

    def _answer(self) -> None:
        match self.path.removeprefix(WEIGHTS_PATH).split("/"):
            case ["", "v2", algorithm, "versions" | "content", _] if algorithm != HASH_ALGORITHM:
                text = f"this server hashes weights by {HASH_ALGORITHM}, the generator verifies {algorithm}; run one release everywhere"
                self._say(HTTPStatus.BAD_REQUEST, text)
            case ["", "v2", _, "versions", name] if found := _VERSION.fullmatch(name):
                version = pb.VersionName(attempt=int(found[1]), step=int(found[2]), hash=bytes.fromhex(found[3]))
                self._send_manifest(version)
            case ["", "v2", _, "content", name] if _HASH.fullmatch(name):
                self._send_content(bytes.fromhex(name))
            case _:
                self._say(HTTPStatus.BAD_REQUEST, "no such path; run one release everywhere")

    def _send_manifest(self, version: pb.VersionName) -> None:
        service = self.server.service
        self._kept.close()
        manifest = service.manifest(version, kept=self._kept)
        if manifest is None:
            kept = ", ".join(f"({v.attempt}, {v.step})" for v in service.store.versions()) or "none"
            text = f"version ({version.attempt}, {version.step}) is not kept; kept: {kept}"
            self._say(HTTPStatus.NOT_FOUND, text)
            return
        self._send(HTTPStatus.OK, manifest.SerializeToString(), headers={"Content-Type": "application/x-protobuf"})

    def _send_content(self, content_hash: bytes) -> None:
        size = self.server.service.size_bytes(content_hash)
        if size is None:
            self._say(HTTPStatus.NOT_FOUND, f"{content_hash.hex()} is not kept")
            return
        asked = _range(self.headers.get("Range"), size=size)
        if asked is None:
            self._say(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"it has {size} bytes")
            return
        begin, end = asked
        self._begin(
            HTTPStatus.PARTIAL_CONTENT if "Range" in self.headers else HTTPStatus.OK,
            size=end - begin,
            headers={
                "Content-Type": "application/octet-stream",
                "ETag": f'"{content_hash.hex()}"',
                "Accept-Ranges": "bytes",
                **({"Content-Range": f"bytes {begin}-{end - 1}/{size}"} if "Range" in self.headers else {}),
            },
        )
        sent, links = 0, self.server.service.links(self.headers.get(CLUSTER_HEADER, ""))
        with suppress(NotYetError):  # the answer has begun: that it ends early says it
            for piece in self.server.service.content(content_hash, begin=begin, end=end):
                self._send_piece(piece, links)
                sent += len(piece)
        self.close_connection |= sent < end - begin  # the version went: so the other side learns of it

    def _send_piece(self, piece: memoryview, links: Sequence[LinkCap]) -> None:
        narrowest = min((link.bytes_per_s for link in links), default=inf)
        step = len(piece) if narrowest == inf else max(1, int(narrowest * _LINK_STEP_S))
        for begin in range(0, len(piece), step):
            part = piece[begin : begin + step]
            now_s = time.monotonic()
            wait_s = max((link.wait_s(len(part), now_s=now_s) for link in links), default=0.0)
            if wait_s:
                time.sleep(wait_s)
            self.connection.sendall(part)

    def _say(self, status: HTTPStatus, text: str, *, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._send(status, text.encode(), headers={"Content-Type": "text/plain; charset=utf-8", **headers})

    def _send(self, status: HTTPStatus, body: bytes, *, headers: dict[str, str]) -> None:
        self._begin(status, size=len(body), headers=headers)
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, *, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        if time.monotonic() - self._begun_s >= self.server.age_s:
            self.close_connection = True
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses: requests that are none."""
        self.close_connection = True
        self._say(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - as http.server has it
        log.debug(format, *args)


def _range(header: str | None, *, size: int) -> tuple[int, int] | None:
    """(begin, end) that are asked for; None: there is nothing there, or it is no single range."""
    if header is None:
        return 0, size
    found = _RANGE.fullmatch(header)
    if found is None:
        return None
    begin, end = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
    return (begin, end) if begin < end else None
