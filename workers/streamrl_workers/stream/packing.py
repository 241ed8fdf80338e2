"""Token ids and log-probs as little-endian bytes, as the protocol carries them.

Owns the byte layout of `bytes` fields that hold numbers (int32, int64, float32). Knows no messages
and needs no numpy, so that processes without it can read what passes through them.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

_INT32, _INT64, _FLOAT32 = "i", "q", "f"
_N = TypeVar("_N", int, float)
_SWAP = sys.byteorder == "big"


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


def count_32(data: bytes) -> int:
    """How many 4-byte numbers `data` holds."""
    return len(data) >> 2


def _pack(numbers: "array[_N]") -> bytes:
    if _SWAP:
        numbers.byteswap()
    return numbers.tobytes()


def _unpack(numbers: "array[_N]", data: bytes) -> "array[_N]":
    numbers.frombytes(data)  # ValueError where the length is no multiple of the item size
    if _SWAP:
        numbers.byteswap()
    return numbers
