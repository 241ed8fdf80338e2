"""Keeps the newest published versions for generators to pull.

Owns: the bytes of a few versions and which of them are kept. Does not own: serving (`server.py`), announcing.
Thread-safe: the trainer publishes from its thread, the server reads from its loop.

Invariants:
- Published bytes never change: a writable buffer is copied.
- The newest `newest_kept` versions are kept, and at most `_PULLED_KEPT` older ones, only while somebody pulls them.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import TensorBytes, describe, manifest_hash

NEWEST_KEPT = 2
"""The one that generators run and the one that they pull."""
_PULLED_KEPT = 2
"""Older ones that are kept while pulled. Bounds memory: one more, and the puller of the oldest is told that it is gone."""

_Key = tuple[int, int, bytes]


@dataclass(slots=True, kw_only=True)
class _Kept:
    manifest: pb.Manifest
    data: dict[str, memoryview]
    pulls: int = 0


class WeightStore:
    """The versions that can be pulled."""

    def __init__(self, *, newest_kept: int = NEWEST_KEPT) -> None:
        self._newest_kept = newest_kept
        self._lock = threading.Lock()
        self._kept: dict[_Key, _Kept] = {}

    def publish(self, *, attempt: int, step: int, tensors: Mapping[str, TensorBytes]) -> pb.VersionName:
        """Keep `tensors` as version (attempt, step) and return its name with the hash."""
        owned = {name: TensorBytes(dtype, shape, _frozen(data)) for name, (dtype, shape, data) in tensors.items()}
        entries = describe(owned)
        version = pb.VersionName(attempt=attempt, step=step, hash=manifest_hash(entries))
        manifest = pb.Manifest(version=version, tensors=entries)
        kept = _Kept(manifest=manifest, data={name: tensor.data for name, tensor in owned.items()})
        with self._lock:
            self._kept.pop(_key(version), None)  # published again: it is the newest now
            self._kept[_key(version)] = kept
            self._evict()
        return version

    def versions(self) -> list[pb.VersionName]:
        """Names of the kept versions, oldest first."""
        with self._lock:
            return [kept.manifest.version for kept in self._kept.values()]

    def chunk(self, version: pb.VersionName, *, tensor: str, offset: int, limit_bytes: int) -> bytes | None:
        """Up to `limit_bytes` of `tensor` from `offset`; None when version or tensor is not kept."""
        with self._lock:
            kept = self._kept.get(_key(version))
            data = kept.data.get(tensor) if kept else None
        return None if data is None else bytes(data[offset : offset + limit_bytes])

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


def _frozen(data: memoryview) -> memoryview:
    """The same bytes, flat, in a buffer that nobody can write to."""
    if isinstance(data.obj, bytes) and data.c_contiguous:
        return data.cast("B") if data.nbytes else memoryview(b"")
    return memoryview(data.tobytes())
