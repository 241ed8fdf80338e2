"""Frames between a process and its helpers: a mark, 4 bytes of length, then JSON. Nothing is pickled.

Used on Unix socket pairs, by the task pool and the ranker. Knows no meaning: they say what goes in a frame. User
code runs in the processes at the other end and can write to any descriptor: what does not begin with the mark is refused with its
first eight bytes, and nobody waits for the rest of a frame that never was one.
"""

import asyncio
import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<4sI")
_MARK = b"\xf7SR\x01"
"""No text begins so."""
MAX_FRAME_BYTES = 1 << 28
"""No request is near it."""

FOREVER_S = 1e8
"""Three years: no limit, where the end of the other side is what ends the wait."""


class ForeignBytesError(ValueError):
    """Somebody else wrote to the socket."""


def encode(value: object) -> bytes:
    """One frame. ASCII JSON carries every Python string, lone surrogates included."""
    body = json.dumps(value, separators=(",", ":")).encode("ascii")
    return _HEAD.pack(_MARK, len(body)) + body


def send(transport: asyncio.WriteTransport, value: object) -> None:
    """Write one frame. A peer that is gone gets none: its reader sees that, and asyncio would warn of each further write."""
    if not transport.is_closing():
        transport.write(encode(value))


def receive(connection: socket.socket) -> Any:  # noqa: ANN401 - JSON
    """Next frame, or None at the end of the stream. Blocks. Raises `ForeignBytesError`."""
    head = _receive_exactly(connection, _HEAD.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _body_bytes(head))
    return None if body is None else _decode(body)


class Frames:
    """Frames that arrive on a socket, one after the other. Bounded: a peer that sends more than is read is not listened to."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._next: asyncio.Task[Any] | None = None

    async def read(self, *, limit_s: float) -> Any:  # noqa: ANN401 - JSON
        """Next frame, or None at the end of the stream.

        Raises:
            TimeoutError: none came within `limit_s`. What has arrived counts before the time does, also after a stall of ours.
            ForeignBytesError: something else came.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._read(), name="next frame")
        done, _ = await asyncio.wait({self._next}, timeout=limit_s)
        if not done:
            raise TimeoutError
        frame, self._next = self._next.result(), None  # behind foreign bytes nothing is read any more
        return frame

    async def _read(self) -> Any:  # noqa: ANN401 - JSON
        try:
            head = await self._reader.readexactly(_HEAD.size)
            return _decode(await self._reader.readexactly(_body_bytes(head)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


async def open_frames(connection: socket.socket) -> tuple[asyncio.Transport, Frames]:
    """Both directions of a socket pair's end."""
    connection.setblocking(False)  # noqa: FBT003 - positional in the standard library
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: asyncio.StreamReaderProtocol(reader), sock=connection
    )
    return transport, Frames(reader)


def _body_bytes(head: bytes) -> int:
    mark, size = _HEAD.unpack(head)
    if mark != _MARK or size > MAX_FRAME_BYTES:
        raise ForeignBytesError(f"no frame begins with {head!r}")
    return int(size)


def _decode(body: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ForeignBytesError(f"a frame holds no JSON: {error}") from error
    if value is None:
        raise ForeignBytesError("a frame holds null")
    return value


def _receive_exactly(connection: socket.socket, size_bytes: int) -> bytes | None:
    buffer = bytearray(size_bytes)
    view = memoryview(buffer)
    filled = 0
    while filled < size_bytes:
        try:
            count = connection.recv_into(view[filled:])
        except ConnectionError:
            return None
        if count == 0:
            return None
        filled += count
    return bytes(buffer)
