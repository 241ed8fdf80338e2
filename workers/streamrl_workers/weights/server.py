"""The Weights service of the trainer: keeps the newest published versions and serves them to generators.

Owns the bytes of a few versions, which of them are kept, and the RPCs' checks and status codes. Does not own the server's
port, who may call, announcing. `WeightStore` is thread-safe: the trainer publishes from its thread, the service reads from its loop.

Invariants:
- Published bytes never change: a writable buffer is copied; who publishes a read-only one writes no more to what is under it.
- The newest `newest_kept` versions are kept, and at most `_PULLED_KEPT` older ones, only while somebody pulls them.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.messages import frames
from streamrl_workers.weights.hashing import HASH_ALGORITHM, TensorBytes, describe, manifest_hash

_MAX_CHUNK_BYTES = 3 * 2**20
"""gRPC refuses messages above 4 MiB; the rest is room for framing."""


NEWEST_KEPT = 2
"""The one that generators run and the one that they pull."""
_PULLED_KEPT = 2
"""Older ones that are kept while pulled. Bounds memory: one more, and the puller of the oldest is told that it is gone."""

_Key = tuple[int, int, bytes]


@dataclass(slots=True, kw_only=True)
class _KeptVersion:
    manifest: pb.Manifest
    data: dict[str, memoryview]
    pulls: int = 0


class WeightStore:
    """The versions that can be pulled."""

    def __init__(self, *, newest_kept: int = NEWEST_KEPT) -> None:
        self._newest_kept = newest_kept
        self._lock = threading.Lock()
        self._kept: dict[_Key, _KeptVersion] = {}
        self.published = 0
        """Versions, since the process began."""

    def publish(self, *, attempt: int, step: int, tensors: Mapping[str, TensorBytes]) -> pb.VersionName:
        """Keep `tensors` as version (attempt, step) and return its name with the hash."""
        owned = {name: TensorBytes(dtype, shape, _frozen(data)) for name, (dtype, shape, data) in tensors.items()}
        entries = describe(owned)
        version = pb.VersionName(attempt=attempt, step=step, hash=manifest_hash(entries))
        manifest = pb.Manifest(version=version, tensors=entries, hash_algorithm=HASH_ALGORITHM)
        kept = _KeptVersion(manifest=manifest, data={name: tensor.data for name, tensor in owned.items()})
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
    if data.readonly and data.c_contiguous:
        return data.cast("B") if data.nbytes else memoryview(b"")
    return memoryview(data.tobytes())


class WeightsService:
    """GetManifest and Fetch over a `WeightStore`."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.served_bytes = 0
        """Of tensors, since the process began."""

    async def GetManifest(  # noqa: N802 - the RPC's name
        self, request: pb.ManifestRequest, context: "grpc.aio.ServicerContext[pb.ManifestRequest, pb.Frame]"
    ) -> AsyncIterator[pb.Frame]:
        if request.hash_algorithm != HASH_ALGORITHM:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"this trainer hashes weights by {HASH_ALGORITHM}, the generator verifies "
                f"{request.hash_algorithm or 'blake2b'}; run one release everywhere",
            )
        with self._store.pulling(request.version) as manifest:
            if manifest is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, self._gone(request.version))
                raise AssertionError("abort raises")
            for frame in frames(manifest.SerializeToString()):
                yield frame
            await asyncio.get_running_loop().create_future()  # for ever: the puller ends the call

    async def Fetch(  # noqa: N802 - the RPC's name
        self, request: pb.FetchRequest, context: "grpc.aio.ServicerContext[pb.FetchRequest, pb.Chunk]"
    ) -> AsyncIterator[pb.Chunk]:
        if not 1 <= request.chunk_bytes <= _MAX_CHUNK_BYTES:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"chunk_bytes must be 1 to {_MAX_CHUNK_BYTES}, got {request.chunk_bytes}",
            )
        offset = request.offset
        while True:  # looked up again for each chunk: a stalled reader holds no bytes
            data = self._store.chunk(
                request.version, tensor=request.tensor, offset=offset, limit_bytes=request.chunk_bytes
            )
            if data is None:
                await context.abort(
                    grpc.StatusCode.NOT_FOUND, f"tensor {request.tensor}: {self._gone(request.version)}"
                )
            if not data:
                return
            yield pb.Chunk(data=data)
            self.served_bytes += len(data)
            offset += len(data)

    def _gone(self, version: pb.VersionName) -> str:
        kept = ", ".join(f"({v.attempt}, {v.step})" for v in self._store.versions()) or "none"
        return f"version ({version.attempt}, {version.step}) is not kept; kept: {kept}"
