"""Numbers as little-endian bytes, as the protocol's `bytes` fields carry them (int32, int64, float32), and items in batches by bytes.

Knows no messages, needs neither numpy nor grpc: so processes without them can read what passes through them.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import TypeVar

_HASH_BYTES = 16
_INT32, _INT64, _FLOAT32 = "i", "q", "f"
_N = TypeVar("_N", int, float)
_T = TypeVar("_T")
_SWAP = sys.byteorder == "big"

BATCH_BYTES = 2**20
"""Of items in one message where there may be many: the first is at work before the last has come."""


def pack_int32(values: Iterable[int]) -> bytes:
    """`values` as int32, little-endian. Raises OverflowError where one does not fit."""
    return _pack(array(_INT32, values))


def unpack_int32(data: bytes) -> "array[int]":
    """The int32 numbers in `data`."""
    return _unpack(array(_INT32), data)


def pack_int64(values: Iterable[int]) -> bytes:
    """`values` as int64, little-endian."""
    return _pack(array(_INT64, values))


def unpack_int64(data: bytes) -> "array[int]":
    """The int64 numbers in `data`."""
    return _unpack(array(_INT64), data)


def pack_float32(values: Iterable[float]) -> bytes:
    """`values` as float32, little-endian."""
    return _pack(array(_FLOAT32, values))


def unpack_float32(data: bytes) -> "array[float]":
    """The float32 numbers in `data`."""
    return _unpack(array(_FLOAT32), data)


def count_32(data: bytes | bytearray) -> int:
    """How many 4-byte numbers `data` holds."""
    return len(data) >> 2


def tokens_hash(data: bytes) -> bytes:
    """Tells sequences of tokens apart."""
    return blake2b(data, digest_size=_HASH_BYTES).digest()


def no_negative_32(data: bytes) -> bool:
    """Whether `data` is int32 numbers of which none is negative. Read off their highest bytes, at the speed of C."""
    return not len(data) % 4 and data[3::4].isascii()


def all_finite_32(data: bytes) -> bool:
    """Whether `data` is float32 numbers below 1.7e38: neither infinite nor NaN. Read off as above."""
    highest = data[3::4]
    return not (len(data) % 4 or b"\x7f" in highest or b"\xff" in highest)


def batches(items: Iterable[_T], *, size_bytes: Callable[[_T], int]) -> Iterator[list[_T]]:
    """`items` in order, each list within `BATCH_BYTES`; what is larger stands alone."""
    batch: list[_T] = []
    room_bytes = BATCH_BYTES
    for item in items:
        size = size_bytes(item)  # of a message it costs as much as to serialize it
        if batch and size > room_bytes:
            yield batch
            batch, room_bytes = [], BATCH_BYTES
        batch.append(item)
        room_bytes -= size
    if batch:
        yield batch


def _pack(numbers: "array[_N]") -> bytes:
    if _SWAP:
        numbers.byteswap()
    return numbers.tobytes()


def _unpack(numbers: "array[_N]", data: bytes) -> "array[_N]":
    numbers.frombytes(data)  # ValueError where the length is no multiple of the item size
    if _SWAP:
        numbers.byteswap()
    return numbers
