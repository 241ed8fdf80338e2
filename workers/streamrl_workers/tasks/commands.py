"""Commands from the pool to the nursery: one byte of command and the worker's number. `SPAWN` carries the worker's socket."""

import struct

_COMMAND = struct.Struct("<cI")
SIZE = _COMMAND.size

SPAWN = b"S"
KILL = b"K"


def encode(command: bytes, worker: int) -> bytes:
    """One command."""
    return _COMMAND.pack(command, worker)


def decode(data: bytes) -> tuple[bytes, int]:
    """(command, worker)"""
    command, worker = _COMMAND.unpack(data)
    return command, worker
