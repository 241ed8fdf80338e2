"""Names the bytes of a model: tensor hash, manifest hash, manifest entries.

Owns: the value `TensorBytes` and how it is hashed. Does not own: storing or moving bytes. No torch, no numpy.

Invariant: equal hash = same names, dtypes, shapes and bytes; the order in which tensors are given does not matter.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from streamrl.proto import stream_pb2 as pb

HASH_BYTES = 16
"""Length of every hash (blake2b-128): collisions are out of reach, and it is the fastest of hashlib's."""


class TensorBytes(NamedTuple):
    """A tensor as published: its raw bytes in C order, in the machine's (little) endianness."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def manifest_hash(entries: Iterable[pb.TensorEntry]) -> bytes:
    """Hash over (name, dtype, shape, tensor hash) of all tensors, sorted by name: names a version's bytes."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for entry in sorted(entries, key=lambda e: e.name):
        shape = ",".join(map(str, entry.shape))
        for field in (entry.name.encode(), entry.dtype.encode(), shape.encode(), entry.hash):
            digest.update(len(field).to_bytes(8, "little"))  # length first: no two lists of fields look alike
            digest.update(field)
    return digest.digest()


def describe(tensors: Mapping[str, TensorBytes]) -> list[pb.TensorEntry]:
    """Manifest entries of `tensors`, sorted by name."""
    return [
        pb.TensorEntry(
            name=name,
            dtype=dtype,
            shape=shape,
            size_bytes=data.nbytes,
            hash=hashlib.blake2b(data, digest_size=HASH_BYTES).digest(),
        )
        for name, (dtype, shape, data) in sorted(tensors.items())
    ]


def tensors_hash(tensors: Mapping[str, TensorBytes]) -> bytes:
    """The manifest hash of these tensors: what `VersionName.hash` holds and what an engine's hash must equal."""
    return manifest_hash(describe(tensors))
