"""Names the bytes of a model: tensor hash, manifest hash, manifest entries.

Owns: the value `TensorBytes`, memory for one, and how it is hashed. Does not own: storing or moving bytes. No torch, no numpy.
Hashing leaves other Python threads running.

Invariant: equal hash = same names, dtypes, shapes and bytes; the order in which tensors are given does not matter.
"""

import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from blake3 import blake3

from streamrl.proto import stream_pb2 as pb

HASH_ALGORITHM = "blake3"
"""Of every hash here; manifests name it. No two contents of one hash can be found, so a peer is as good as the trainer."""


class TensorBytes(NamedTuple):
    """A tensor as published: its raw bytes in C order, in the machine's (little) endianness."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def reserved(size_bytes: int) -> memoryview:
    """Memory that the system gives page by page, as bytes arrive: a `bytearray` of a large model is zeroed for seconds."""
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # where there are no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size_bytes]


def new_digest() -> blake3:
    """A digest that takes large pieces on all processors."""
    return blake3(max_threads=blake3.AUTO)


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
