"""Calls and answers between ranks as bytes: a JSON header that describes the value, then the raw bytes of its arrays.

Owns: the encoding. Does not own: the connection (`links.py`). No pickle: what is decoded can only be a value of the kinds
below. Imports no torch.

    u32 length of the header | header, JSON | raw bytes of all arrays and byte strings, in the header's order

Kinds: None, bool, int, float (with inf and nan), str; bytes, `array`; list, tuple, dict with string keys; the
dataclasses of `CLASSES`. Both ends run the same machine type and the same version: arrays are as they lie in memory.
"""

import json
import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from streamrl_workers.trainer.engines import packing

CLASSES: dict[str, type[Any]] = {
    name: found
    for name, found in vars(packing).items()
    if isinstance(found, type) and hasattr(found, "__dataclass_fields__")
}
"""The dataclasses that may cross: all of `packing.py`."""

_LENGTH = struct.Struct("!I")
_PLAIN = (type(None), bool, int, float, str)


class CodecError(ValueError):
    """Bytes that no rank of this version wrote."""


def encode(value: Any) -> bytes:  # noqa: ANN401 - any of the kinds above
    """The bytes of `value`; a TypeError for a value of another kind."""
    blobs: list[bytes | memoryview] = []
    header = json.dumps(_described(value, blobs), separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(header)), header, *blobs))


def decode(data: bytes | bytearray | memoryview) -> Any:  # noqa: ANN401 - any of the kinds above
    """The value that `encode` was given. Raises CodecError."""
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        begin = _LENGTH.size + length
        reader = _Reader(view[begin:])
        value = reader.value(json.loads(bytes(view[_LENGTH.size : begin])))
    except (struct.error, ValueError, TypeError, KeyError, IndexError) as error:
        raise CodecError(f"a message between ranks cannot be read: {error}") from error
    if reader.left:
        raise CodecError(f"a message between ranks has {reader.left} bytes too many")
    return value


def _described(value: Any, blobs: list[bytes | memoryview]) -> Any:  # noqa: ANN401 - as `encode`; JSON
    """Plain values stand for themselves; all else is [kind, ...]."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        blobs.append(bytes(value))
        return ["bytes", len(value)]
    if isinstance(value, array):
        blobs.append(memoryview(value).cast("B"))
        return ["array", value.typecode, len(value) * value.itemsize]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *(_described(item, blobs) for item in value)]
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) for key in value), "keys between ranks are strings"
        return ["dict", {key: _described(item, blobs) for key, item in value.items()}]
    name = type(value).__name__
    if CLASSES.get(name) is not type(value):
        raise TypeError(f"a {name} does not cross between ranks")
    return [name, {field.name: _described(getattr(value, field.name), blobs) for field in fields(value)}]


class _Reader:
    """Takes the raw bytes in the order in which the header names them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._kinds: dict[str, Callable[..., Any]] = {
            "bytes": lambda size: bytes(self._take(size)),
            "array": self._array,
            "list": lambda *items: [self.value(item) for item in items],
            "tuple": lambda *items: tuple(self.value(item) for item in items),
            "dict": lambda items: {key: self.value(item) for key, item in items.items()},
        }

    @property
    def left(self) -> int:
        """Bytes that nothing has asked for yet."""
        return len(self._data) - self._at

    def value(self, described: Any) -> Any:  # noqa: ANN401 - JSON; any of the kinds
        """The value behind its description."""
        if not isinstance(described, list):
            return described
        kind, *rest = described
        if kind in self._kinds:
            return self._kinds[kind](*rest)
        (items,) = rest
        return CLASSES[kind](**{key: self.value(item) for key, item in items.items()})

    def _array(self, typecode: str, size: int) -> "array[Any]":
        found: array[Any] = array(typecode)
        found.frombytes(self._take(size))
        return found

    def _take(self, size: int) -> memoryview:
        if not 0 <= size <= self.left:
            raise CodecError(f"{size} bytes are announced, {self.left} are there")
        self._at += size
        return self._data[self._at - size : self._at]
