"""Joins a version's manifest of the parts of its ranks, and holds one against the version that was announced, before any number in it is used.

The announced hash covers name, dtype, shape and the hashes of the slices of each tensor, and nothing else. The rest is checked against these:
the slices' rows and sizes against dtype and shape, holders against their list, the version against the announced one. Deltas are offers:
one that cannot be used is left out.

Does not own what a manifest hashes to (`hashing.py`), nor who gave it (`pull.py`).
"""

from collections.abc import Iterator, Mapping

from streamrl.errors import shorten
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import HASH_ALGORITHM, HASH_BYTES, manifest_hash, row_bytes, tensor_bytes


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
