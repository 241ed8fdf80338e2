"""Frames between a process and its helpers: a mark, 4 bytes of length, then JSON. Nothing is pickled.

Used on Unix socket pairs, by the task pool and the ranker. Knows no meaning: they say what goes in a frame. User
code runs in the processes at the other end and can write to any descriptor: what does not begin with the mark is refused at its
first bytes, and nobody waits for the rest of a frame that never was one.
"""

import asyncio
import json
import socket
import struct
from collections import deque
from typing import Any

_HEAD = struct.Struct("<4sI")
_MARK = b"\xf7SR\x01"
"""No text begins so."""
MAX_FRAME_BYTES = 1 << 28
"""No request is near it."""

FOREVER_S = 1e8
"""Three years: no limit, where the end of the other side is what ends the wait."""
_MAX_UNREAD = 64


class ForeignBytesError(ValueError):
    """Somebody else wrote to the socket."""


def encode(value: object) -> bytes:
    """One frame. ASCII JSON carries every Python string, lone surrogates included."""
    body = json.dumps(value, separators=(",", ":")).encode("ascii")
    return _HEAD.pack(_MARK, len(body)) + body


def receive(connection: socket.socket) -> Any:  # noqa: ANN401 - JSON
    """Next frame, or None at the end of the stream. Blocks. Raises `ForeignBytesError`."""
    head = _receive_exactly(connection, _HEAD.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _body_bytes(head))
    return None if body is None else _decode(body)


class Frames(asyncio.Protocol):
    """Frames that arrive on a socket, one after the other. Bounded: a peer that sends more than is read is not listened to."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._bytes = bytearray()
        self._frames: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._foreign: ForeignBytesError | None = None

    async def read(self, *, limit_s: float) -> Any:  # noqa: ANN401 - JSON
        """Next frame, or None at the end of the stream.

        Raises:
            TimeoutError: none came within `limit_s`. What has arrived counts before the time does, also after a stall of ours.
            ForeignBytesError: something else came.
        """
        loop = asyncio.get_running_loop()
        while not self._frames:
            if self._foreign is not None:
                raise self._foreign
            if self._ended:
                return None
            self._waiter = loop.create_future()
            timer = loop.call_later(limit_s, self._wake, TimeoutError())
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if len(self._frames) == _MAX_UNREAD and self.transport is not None:
            self.transport.resume_reading()
        return self._frames.popleft()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        self._bytes += data
        try:
            while (frame := self._first_frame()) is not None:
                self._frames.append(frame)
        except ForeignBytesError as error:
            self._foreign = error
        if len(self._frames) >= _MAX_UNREAD and self.transport is not None:
            self.transport.pause_reading()
        self._wake(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        del exc  # an end is an end
        self._ended = True
        self._wake(None)

    def _first_frame(self) -> Any:  # noqa: ANN401 - JSON; a frame is never null
        if self._foreign is not None or len(self._bytes) < _HEAD.size:
            return None
        end = _HEAD.size + _body_bytes(bytes(self._bytes[: _HEAD.size]))
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEAD.size : end])
        del self._bytes[:end]
        return _decode(body)

    def _wake(self, error: BaseException | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)


async def open_frames(connection: socket.socket) -> tuple[asyncio.Transport, Frames]:
    """Both directions of a socket pair's end."""
    connection.setblocking(False)  # noqa: FBT003 - positional in the standard library
    return await asyncio.get_running_loop().create_connection(Frames, sock=connection)


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
