"""Connections of callers without a token: what each kind sends, and then it holds on until the server ends it."""

import asyncio
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

_PARTS = 98
"""Of what has no end: a little below the number of headers after which http.server gives up."""
_LINE = b"X: " + b"x" * 65_000 + b"\r\n"
_GET, _POST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client of HTTP/2 begins with."""
_HEADERS, _SETTINGS, _DATA = 1, 4, 0
_END_HEADERS = 4
_METHODS = (b"/streamrl.v1alpha1.Scheduler/GetModel", b"/streamrl.v1alpha1.Scheduler/Generate")


def _frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


def _field(name: bytes, value: bytes) -> bytes:
    """A header that is in no table."""
    return b"\0" + _text(name) + _text(value)


def _text(data: bytes) -> bytes:
    if (left := len(data) - 127) < 0:
        return bytes([len(data)]) + data
    size = b"\x7f"
    while left >= 128:
        size, left = size + bytes([left % 128 | 128]), left // 128
    return size + bytes([left]) + data


def _call(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    fixed = (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")
    return b"".join(_field(*field) for field in (*fixed, (b"content-type", b"application/grpc"), *more))


def _calls(*more: tuple[bytes, bytes], body: bytes = b"") -> Iterator[bytes]:
    yield PREFACE + _frame(_SETTINGS, 0, 0, b"")
    for number in range(64):
        stream = 1 + 2 * number
        yield _frame(_HEADERS, _END_HEADERS, stream, _call(_METHODS[number % 2], *more))
        yield _frame(_DATA, 0, stream, body) if body else b""


def _endless(begin: bytes, part: bytes) -> Iterator[bytes]:
    yield begin
    for _ in range(_PARTS):
        yield part


_BAD_TOKEN = b"Authorization: Bearer wrong\r\n"
KINDS: Mapping[str, Callable[[], Iterator[bytes]]] = {
    "idle": lambda: iter([b""]),
    "a line without end": lambda: _endless(b"GET /", _LINE[3:-2]),
    "headers without end": lambda: _endless(_GET, _LINE),
    "slow headers": lambda: iter([_GET + b"X: "]),
    "a slow body": lambda: iter([_POST + _BAD_TOKEN + b"Content-Length: 1000000000\r\n\r\n{"]),
    "a large body": lambda: _endless(_POST + b"Content-Length: 1000000000\r\n\r\n", _LINE),
    "a body without length": lambda: _endless(
        _POST + b"Transfer-Encoding: chunked\r\n\r\n", b"fde8\r\n" + 65_000 * b"x" + b"\r\n"
    ),
    "chained encodings": lambda: _endless(_POST + b"Transfer-Encoding: gzip, chunked, chunked\r\n\r\n", _LINE),
    "a wrong token": lambda: iter([_GET + _BAD_TOKEN + b"\r\n"]),
    "weights without a token": lambda: iter([b"GET /weights/v1/x HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]),
    "HTTP/2, idle": lambda: iter([PREFACE + _frame(_SETTINGS, 0, 0, b"")]),
    "HTTP/2, headers without end": lambda: iter(
        [PREFACE + _frame(_SETTINGS, 0, 0, b""), _frame(_HEADERS, 0, 1, _call(_METHODS[0], (b"x", b"y" * 15_000)))]
    ),
    "gRPC, no token": _calls,
    "gRPC, a wrong token": lambda: _calls((b"streamrl-token", b"wrong"), body=b"\0\0\0\0\0"),
    "gRPC, large metadata": lambda: _calls((b"x", b"y" * 15_000)),
    "gRPC, large messages": lambda: _calls(body=b"\0" + struct.pack(">I", 60 * 2**20) + 16_000 * b"x"),
}
"""What a stranger sends, in parts."""


HEADS = ("a line without end", "headers without end")
"""Kinds that a server takes as a whole, or refuses: it has no reason to let them wait."""


class Stranger:
    """One connection: it sends as much as the server takes, and stays until the server closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kind: str, at: str) -> None:
        self.kind = kind
        self.sending = asyncio.create_task(self._send(writer), name=f"sends {kind} to {at}")
        self.holding = asyncio.create_task(self._hold(reader, writer), name=f"{kind} at {at}")

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while await reader.read(65_536):
                    pass
        finally:
            self.sending.cancel()
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            for part in KINDS[self.kind]():
                writer.write(part)
                await writer.drain()

    async def end(self) -> None:
        """Close it."""
        self.holding.cancel()
        await asyncio.gather(self.holding, self.sending, return_exceptions=True)
