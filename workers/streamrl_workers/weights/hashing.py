"""Names the bytes of a model: hash of a slice, of a version; and its manifest: joined of the parts of its ranks, and held against the announced version.

The announced hash covers name, dtype, shape and the hashes of the slices of each tensor, and nothing else. The rest is checked against these
before any number in it is used: the slices' rows and sizes against dtype and shape, holders against their list, the version against the
announced one. Deltas are offers: one that cannot be used is left out.

Owns: the values `TensorBytes` and `SliceBytes`, memory for one, how it is hashed, and manifests. Does not own: storing or moving bytes. No torch, no
numpy. Hashing leaves other Python threads running.

Invariant: equal hash = same names, dtypes, shapes, slices and bytes; the order in which tensors are given does not matter.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

from blake3 import blake3

from streamrl.errors import shorten
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
    """A whole tensor: its raw bytes in C order, in the machine's (little) endianness."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class SliceBytes(NamedTuple):
    """Consecutive rows of a tensor, as a rank publishes them; bytes as of `TensorBytes`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first_row: int
    data: memoryview


def as_slices(tensors: Mapping[str, TensorBytes]) -> Iterator[SliceBytes]:
    """Yield each tensor as one slice, sorted by name."""
    for name, (dtype, shape, data) in sorted(tensors.items()):
        yield SliceBytes(name, dtype, shape, 0, data)


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


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element. Raises ValueError: the type is not known."""
    if dtype not in _WIDTHS:
        raise ValueError(f"its dtype {dtype!r} is not known")
    return _WIDTHS[dtype]


def row_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a row; a tensor without dimensions is one row. Raises as `element_bytes`."""
    return element_bytes(dtype) * prod(shape[1:])


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor. Raises as `element_bytes`."""
    return element_bytes(dtype) * prod(shape)


def new_digest(*, threads: int = blake3.AUTO) -> blake3:
    """Return a digest that takes large pieces on that many processors, on all by default."""
    return blake3(max_threads=threads)


def bytes_hash(data: memoryview) -> bytes:
    """Return the hash of raw bytes."""
    return new_digest().update(data).digest()


def manifest_hash(entries: Iterable[pb.TensorEntry]) -> bytes:
    """Return the hash over (name, dtype, shape, hashes of the slices) of all tensors, sorted by name: it names a version's bytes."""
    digest = new_digest()
    for entry in sorted(entries, key=lambda e: e.name):
        shape = ",".join(map(str, entry.shape))
        slices = b"".join(one.hash for one in entry.slices)  # each of HASH_BYTES, so their number is in the length
        for field in (entry.name.encode(), entry.dtype.encode(), shape.encode(), slices):
            digest.update(len(field).to_bytes(8, "little"))  # length first: no two lists of fields look alike
            digest.update(field)
    return digest.digest()


def slice_entry(data: memoryview, *, first_row: int = 0) -> pb.TensorSlice:
    """Return the manifest entry of a slice of the server's own."""
    return pb.TensorSlice(hash=bytes_hash(data), size_bytes=data.nbytes, first_row=first_row)


def entry_of(name: str, tensor: TensorBytes) -> pb.TensorEntry:
    """Return the manifest entry of one whole tensor."""
    dtype, shape, data = tensor
    return pb.TensorEntry(name=name, dtype=dtype, shape=shape, slices=[slice_entry(data)])


def describe(tensors: Mapping[str, TensorBytes]) -> list[pb.TensorEntry]:
    """Return manifest entries of whole `tensors`, sorted by name."""
    return [entry_of(name, tensor) for name, tensor in sorted(tensors.items())]


def size_bytes(entry: pb.TensorEntry) -> int:
    """Return the bytes of a tensor in a manifest that was checked."""
    return sum(one.size_bytes for one in entry.slices)


def version_text(version: pb.VersionName) -> str:
    """Return a version's name in one word. The name of a rank's part has no hash: it ends with the hyphen."""
    return f"{version.attempt}-{version.step}-{version.hash.hex()}"


def tensors_hash(tensors: Mapping[str, TensorBytes]) -> bytes:
    """Return the hash of a version of these whole tensors: what `VersionName.hash` holds."""
    return manifest_hash(describe(tensors))


class ManifestError(ValueError):
    """The manifest is not that of the version: what is wrong with it."""


def check_manifest(manifest: pb.Manifest, *, version: pb.VersionName) -> None:
    """Raise `ManifestError` unless the manifest is that of `version` and its sizes are those of its shapes."""
    if manifest.hash_algorithm != HASH_ALGORITHM:
        raise ManifestError(
            f"refused: the trainer hashes weights by {shorten(manifest.hash_algorithm or 'blake2b')}, "
            f"this generator verifies {HASH_ALGORITHM}; run one release everywhere"
        )
    got = manifest_hash(manifest.tensors)
    if got != version.hash:
        raise ManifestError(f"its manifest hashes to {got.hex()}, announced was {version.hash.hex()}")
    if manifest.version != version:
        named = manifest.version
        raise ManifestError(f"its manifest names version ({named.attempt}, {named.step})")
    for entry in manifest.tensors:
        _check_slices(entry, holders=len(manifest.holders))


def join_parts(own: pb.Manifest, parts: Mapping[str, pb.Manifest]) -> pb.Manifest:
    """Return the manifest of a whole version, which it gets the hash of.

    Args:
        own: the part of the rank that gives the manifest.
        parts: those of the other ranks, by the address at which each serves its slices.

    Raises:
        ManifestError: the slices of a tensor are not all of its rows, each once; or ranks differ in its dtype or shape, or in the version.
    """
    whole = pb.Manifest(version=own.version, hash_algorithm=HASH_ALGORITHM, holders=parts)
    entries: dict[str, pb.TensorEntry] = {}
    for holder, part in enumerate((own, *parts.values())):
        if part.version != own.version or part.hash_algorithm != own.hash_algorithm:
            raise ManifestError(f"rank {holder} gave another version, or hashes by {part.hash_algorithm!r}")
        for given in part.tensors:
            new = pb.TensorEntry(name=given.name, dtype=given.dtype, shape=given.shape)
            entry = entries.setdefault(given.name, new)
            if (entry.dtype, entry.shape) != (given.dtype, given.shape):
                raise ManifestError(f"tensor {given.name}: ranks differ in its dtype or shape")
            for one in given.slices:
                entry.slices.add(hash=one.hash, size_bytes=one.size_bytes, first_row=one.first_row, holder=holder)
        for delta in part.deltas:
            whole.deltas.add(holder=holder).MergeFrom(delta)
    for _, entry in sorted(entries.items()):
        entry.slices.sort(key=lambda one: one.first_row)
        _check_slices(entry, holders=len(parts))
        whole.tensors.append(entry)
    whole.version.hash = manifest_hash(whole.tensors)
    return whole


def at_one_place(manifest: pb.Manifest) -> pb.Manifest:
    """Return the manifest of a server that gives all slices and deltas of a version itself."""
    whole = pb.Manifest.FromString(manifest.SerializeToString())
    whole.ClearField("holders")
    for entry in whole.tensors:
        for one in entry.slices:
            one.holder = 0
    for delta in whole.deltas:
        delta.holder = 0
    return whole


def contents(manifest: pb.Manifest) -> Iterator[tuple[bytes, int, int]]:
    """Yield the hash, the size in bytes and the holder of each slice, then of each delta."""
    for entry in manifest.tensors:
        for one in entry.slices:
            yield one.hash, one.size_bytes, one.holder
    for delta in manifest.deltas:
        yield delta.hash, delta.size_bytes, delta.holder


def usable_deltas(manifest: pb.Manifest) -> dict[bytes, pb.TensorDelta]:
    """Return the deltas by the hash of what they make, without those that name no content or holder."""
    return {
        delta.new_hash: delta
        for delta in manifest.deltas
        if all(len(one) == HASH_BYTES for one in (delta.hash, delta.base_hash, delta.new_hash))
        and delta.holder <= len(manifest.holders)
    }


def _check_slices(entry: pb.TensorEntry, *, holders: int) -> None:
    """Check that the slices are all rows of the tensor, each once, in their order."""
    try:
        size_bytes, row = tensor_bytes(entry.dtype, entry.shape), max(1, row_bytes(entry.dtype, entry.shape))
    except ValueError as error:
        raise ManifestError(f"tensor {entry.name}: {error}") from None
    end_bytes = 0
    for one in entry.slices:
        if len(one.hash) != HASH_BYTES or one.holder > holders:
            rule = f"a hash has {len(one.hash)} bytes, and its holder is {one.holder} of {holders}"
            raise ManifestError(f"tensor {entry.name}: {rule}")
        if one.first_row != end_bytes // row or one.size_bytes % row or not (one.size_bytes or not size_bytes):
            rule = f"a slice has {one.size_bytes} bytes from row {one.first_row}, expected were rows from {end_bytes // row}"
            raise ManifestError(f"tensor {entry.name}: {rule}")
        end_bytes += one.size_bytes
    if end_bytes != size_bytes or not entry.slices or not (size_bytes or len(entry.slices) == 1):
        raise ManifestError(
            f"tensor {entry.name}: its slices have {end_bytes} bytes, "
            f"{entry.dtype} {list(entry.shape)} has {size_bytes} bytes"
        )
