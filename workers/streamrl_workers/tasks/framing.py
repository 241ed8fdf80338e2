"""Frames between the task pool and its processes: 4 bytes of length, then JSON. Nothing is pickled.

Used on Unix socket pairs. Knows no meaning; `worker.py` and `pool.py` say what goes in a frame.
"""

import asyncio
import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
"""No batch is near it; a larger length means that somebody else wrote to the socket."""


def encode(value: object) -> bytes:
    """One frame. ASCII JSON carries every Python string, lone surrogates included."""
    body = json.dumps(value, separators=(",", ":")).encode("ascii")
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:  # noqa: ANN401 - JSON
    """Next frame, or None at the end of the stream. Blocks."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _body_bytes(head))
    return None if body is None else json.loads(body)


async def read(reader: asyncio.StreamReader) -> Any:  # noqa: ANN401 - JSON
    """Next frame, or None at the end of the stream."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return json.loads(await reader.readexactly(_body_bytes(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _body_bytes(head: bytes) -> int:
    (size,) = _LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {size} bytes was announced; the stream is broken")
    return int(size)


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
