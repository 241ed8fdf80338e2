"""Names the bytes of a model: tensor hash, manifest hash, manifest entries.

Owns: the value `TensorBytes`, memory for one, and how it is hashed. Does not own: storing or moving bytes. No torch, no numpy.
Hashing leaves other Python threads running.

Invariant: equal hash = same names, dtypes, shapes and bytes; the order in which tensors are given does not matter.
"""

import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import prod
from typing import NamedTuple

from blake3 import blake3

from streamrl.proto import stream_pb2 as pb

HASH_ALGORITHM = "blake3"
"""Of every hash here; manifests name it. No two contents of one hash can be found, so a peer is as good as the trainer."""
HASH_BYTES = 32
"""Of every hash here."""
_WIDTHS = {
    **dict.fromkeys(
        (
            "bool",
            "uint8",
            "int8",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        ),
        1,
    ),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, by torch's name of its type."""


class TensorBytes(NamedTuple):
    """A tensor as published: its raw bytes in C order, in the machine's (little) endianness."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def reserved(size_bytes: int) -> memoryview:
    """Memory that the system gives page by page, as bytes arrive: a `bytearray` of a large model is zeroed for seconds.

    Raises MemoryError: the system does not give it.
    """
    try:
        memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        raise MemoryError(f"the system gives no {size_bytes} bytes of memory") from None
    with suppress(AttributeError, OSError):  # where there are no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size_bytes]


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor. Raises ValueError: the type of its elements is not known."""
    if dtype not in _WIDTHS:
        raise ValueError(f"its dtype {dtype!r} is not known")
    return _WIDTHS[dtype] * prod(shape)


def new_digest(*, threads: int = blake3.AUTO) -> blake3:
    """Return a digest that takes large pieces on that many processors, on all by default."""
    return blake3(max_threads=threads)


def bytes_hash(data: memoryview) -> bytes:
    """The hash of one tensor's raw bytes."""
    return new_digest().update(data).digest()


def manifest_hash(entries: Iterable[pb.TensorEntry]) -> bytes:
    """Hash over (name, dtype, shape, tensor hash) of all tensors, sorted by name: names a version's bytes."""
    digest = new_digest()
    for entry in sorted(entries, key=lambda e: e.name):
        shape = ",".join(map(str, entry.shape))
        for field in (entry.name.encode(), entry.dtype.encode(), shape.encode(), entry.hash):
            digest.update(len(field).to_bytes(8, "little"))  # length first: no two lists of fields look alike
            digest.update(field)
    return digest.digest()


def entry_of(name: str, tensor: TensorBytes) -> pb.TensorEntry:
    """The manifest entry of one tensor."""
    dtype, shape, data = tensor
    return pb.TensorEntry(name=name, dtype=dtype, shape=shape, size_bytes=data.nbytes, hash=bytes_hash(data))


def describe(tensors: Mapping[str, TensorBytes]) -> list[pb.TensorEntry]:
    """Manifest entries of `tensors`, sorted by name."""
    return [entry_of(name, tensor) for name, tensor in sorted(tensors.items())]


def version_text(version: pb.VersionName) -> str:
    """A version's name in one word."""
    return f"{version.attempt}-{version.step}-{version.hash.hex()}"


def tensors_hash(tensors: Mapping[str, TensorBytes]) -> bytes:
    """The manifest hash of these tensors: what `VersionName.hash` holds."""
    return manifest_hash(describe(tensors))
