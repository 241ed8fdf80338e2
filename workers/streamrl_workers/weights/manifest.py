"""Holds a manifest against the version that was announced, before any number in it is used.

The announced hash covers name, dtype, shape and hash of each tensor, and nothing else. The rest is checked against these: a tensor's size
against dtype and shape, the version against the announced one. Deltas are offers: one that cannot be used is left out.

Does not own what a manifest hashes to (`hashing.py`), nor who gave it (`pull.py`).
"""

from streamrl.errors import shorten
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import HASH_ALGORITHM, HASH_BYTES, manifest_hash, tensor_bytes


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
        _check_size(entry)


def usable_deltas(manifest: pb.Manifest) -> dict[bytes, pb.TensorDelta]:
    """Return the deltas by the hash of what they make, without those that name no content."""
    return {
        delta.new_hash: delta
        for delta in manifest.deltas
        if all(len(one) == HASH_BYTES for one in (delta.hash, delta.base_hash, delta.new_hash))
    }


def _check_size(entry: pb.TensorEntry) -> None:
    try:
        size_bytes = tensor_bytes(entry.dtype, entry.shape)
    except ValueError as error:
        raise ManifestError(f"tensor {entry.name}: {error}") from None
    if entry.size_bytes != size_bytes:
        raise ManifestError(
            f"tensor {entry.name}: size_bytes is {entry.size_bytes}, "
            f"{entry.dtype} {list(entry.shape)} has {size_bytes} bytes"
        )
