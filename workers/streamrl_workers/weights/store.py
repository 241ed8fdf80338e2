"""The newest published versions, for a server of weights to serve.

Owns the bytes of a few versions, and which of them are kept. Does not own how they travel, nor announcing.
Thread-safe: the trainer publishes from its thread, a server reads from many.

With a `DeltaStore` each version's manifest names the deltas that lead to it; they are content like the tensors. They are made before the version
can be pulled, from the bytes that are kept of the version before.

Invariants:
- Published bytes never change: a writable buffer is copied; who publishes a read-only one writes no more to what is under it.
- A read-only tensor that is published again is neither copied nor hashed again: versions share it.
- The newest `newest_kept` versions are kept, and at most `_PULLED_KEPT` older ones, only while somebody pulls them.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.deltas import DeltaStore, KeptTensor
from streamrl_workers.weights.hashing import HASH_ALGORITHM, TensorBytes, entry_of, manifest_hash, tensor_bytes

NEWEST_KEPT = 2
"""The one that generators run and the one that they pull."""
_PULLED_KEPT = 2
"""Older ones that are kept while pulled. Bounds memory: one more, and the puller of the oldest is told that it is gone."""

_Key = tuple[int, int, bytes]


@dataclass(slots=True, kw_only=True)
class _KeptVersion:
    manifest: pb.Manifest
    given: dict[str, TensorBytes]  # of those that were read-only: the others may have changed since
    tensors: dict[str, KeptTensor]
    contents: dict[bytes, memoryview]  # by hash
    pulls: int = 0


class WeightStore:
    """The versions that can be pulled."""

    def __init__(self, *, newest_kept: int = NEWEST_KEPT, deltas: DeltaStore | None = None) -> None:
        """`deltas`: gets those between consecutive versions; None: there are none."""
        self._newest_kept = newest_kept
        self._deltas = deltas
        self._lock = threading.Lock()
        self._kept: dict[_Key, _KeptVersion] = {}
        self.published = 0
        """Versions, since the process began."""

    def publish(self, *, attempt: int, step: int, tensors: Mapping[str, TensorBytes]) -> pb.VersionName:
        """Keep `tensors` as version (attempt, step) and return its name with the hash."""
        with self._lock:
            before = next(reversed(self._kept.values()), None)
        owned = {name: _keep(name, tensor, before=before) for name, tensor in sorted(tensors.items())}
        entries = [tensor.entry for tensor in owned.values()]
        version = pb.VersionName(attempt=attempt, step=step, hash=manifest_hash(entries))
        manifest = pb.Manifest(version=version, tensors=entries, hash_algorithm=HASH_ALGORITHM)
        if self._deltas is not None and before is not None:
            manifest.deltas.extend(self._deltas.make(before.tensors, owned))
        contents = {tensor.entry.hash: tensor.data for tensor in owned.values()}
        given = {name: tensor for name, tensor in tensors.items() if tensor.data.readonly}
        kept = _KeptVersion(manifest=manifest, given=given, tensors=owned, contents=contents)
        with self._lock:
            self._kept.pop(_key(version), None)  # published again: it is the newest now
            self._kept[_key(version)] = kept
            self._evict()
            self.published += 1
        return version

    def versions(self) -> list[pb.VersionName]:
        """Names of the kept versions, oldest first."""
        with self._lock:
            return [kept.manifest.version for kept in self._kept.values()]

    def content(self, content_hash: bytes) -> memoryview | None:
        """The bytes of this hash; None when no version is kept that has them."""
        with self._lock:
            for kept in self._kept.values():
                if content_hash in kept.contents:
                    return kept.contents[content_hash]
        return None if self._deltas is None else self._deltas.content(content_hash)

    @contextmanager
    def pulling(self, version: pb.VersionName) -> Iterator[pb.Manifest | None]:
        """The manifest, or None when the version is not kept; while inside, it is not dropped for being old."""
        with self._lock:
            kept = self._kept.get(_key(version))
            if kept:
                kept.pulls += 1
        try:
            yield kept.manifest if kept else None
        finally:
            with self._lock:
                if kept:
                    kept.pulls -= 1
                self._evict()

    def _evict(self) -> None:
        """Drop old versions; oldest first in `_kept`."""
        for key in list(self._kept)[: -self._newest_kept]:
            if len(self._kept) > self._newest_kept + _PULLED_KEPT or not self._kept[key].pulls:
                del self._kept[key]


def _key(version: pb.VersionName) -> _Key:
    return version.attempt, version.step, version.hash


def _keep(name: str, tensor: TensorBytes, *, before: _KeptVersion | None) -> KeptTensor:
    if before is not None and before.given.get(name) is tensor:
        return before.tensors[name]
    assert tensor.data.nbytes == tensor_bytes(tensor.dtype, tensor.shape), "pullers refuse another size"
    owned = tensor._replace(data=_frozen(tensor.data))
    return KeptTensor(owned.data, entry_of(name, owned))


def _frozen(data: memoryview) -> memoryview:
    """The same bytes, flat, in a buffer that nobody can write to."""
    if data.readonly and data.c_contiguous:
        return data.cast("B") if data.nbytes else memoryview(b"")
    return memoryview(data.tobytes())
