"""What a server of weights serves: the versions that a rank of the trainer has published, or those that a generator passes on.

    WeightStore    rank 0         publish        (attempt, step, hash)   the manifest of the whole version, which names the ranks that hold the rest
                   other ranks    publish_part   (attempt, step, "")     the manifest of what this rank holds
    RelayStore     of a generator: a slice as soon as it is verified; who asks for one that is still on its way waits in his connection's thread

With a `DeltaStore` each version's manifest names the deltas that lead to it; they are content like the slices. They are made before the version
can be pulled, from the bytes that are kept of the version before.

Owns the bytes, and which of them are kept. Does not own how they travel, pulling (`pull.py`), nor announcing. Thread-safe: the trainer publishes
from its thread, a server reads from many.

Invariants:
- Published bytes never change: a writable buffer is copied; who publishes a read-only one writes no more to what is under it.
- A read-only buffer that is published again is neither copied nor hashed again: versions share it.
- The newest `newest_kept` versions are kept (of a relay one), and a few older ones, only while they are pulled.
- A relay gives only verified bytes.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.deltas import DeltaStore, KeptSlice, SliceKey
from streamrl_workers.weights.hashing import (
    HASH_ALGORITHM,
    SliceBytes,
    TensorBytes,
    as_slices,
    element_bytes,
    row_bytes,
    slice_entry,
)
from streamrl_workers.weights.manifest import at_one_place, contents, join_parts
from streamrl_workers.weights.source import NotYetError

NEWEST_KEPT = 2
"""The one that generators run and the one that they pull."""
PULLED_KEPT = 2
"""Older ones that are kept while pulled. Bounds memory: one more, and the puller of the oldest is told that it is gone."""

_RELAY_WAIT_S = 3.0
"""Maximum wait for what is on its way to a relay. Then the asker is told how far it is, so that it does not take the relay for dead."""
_RELAY_PULLED_KEPT = 1
"""Maximum number of older versions in a relay, while they are pulled."""

_T = TypeVar("_T")
_Key = tuple[int, int, bytes]


@dataclass(slots=True, kw_only=True)
class _KeptVersion:
    manifest: pb.Manifest
    given: dict[SliceKey, memoryview]  # of those that were read-only: the others may have changed since
    slices: dict[SliceKey, KeptSlice]
    contents: dict[bytes, memoryview]  # by hash
    elsewhere: dict[bytes, tuple[str, int]] = field(default_factory=dict)  # address of the holder, and bytes, by hash
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

    def publish(
        self,
        *,
        attempt: int,
        step: int,
        tensors: Mapping[str, TensorBytes] = MappingProxyType({}),
        slices: Iterable[SliceBytes] = (),
        parts: Callable[[], Mapping[str, pb.Manifest]] = dict,
    ) -> pb.VersionName:
        """Keep what this rank holds of version (attempt, step), and return the whole version's name with its hash.

        Args:
            attempt: of the trainer.
            step: of the version.
            tensors: that this rank holds whole.
            slices: of other tensors.
            parts: returns what the other ranks hold, by the addresses of their servers; called once, after this rank's slices are hashed.

        Raises:
            ManifestError: slices and parts together are not each tensor once.
        """
        kept = self._owned(attempt=attempt, step=step, slices=(*as_slices(tensors), *slices))
        kept.manifest = join_parts(kept.manifest, parts())
        kept.elsewhere = {
            content_hash: (kept.manifest.holders[holder - 1], size_bytes)
            for content_hash, size_bytes, holder in contents(kept.manifest)
            if holder
        }
        self._keep(kept)
        return kept.manifest.version

    def publish_part(self, *, attempt: int, step: int, slices: Iterable[SliceBytes]) -> pb.VersionName:
        """Keep what this rank holds of version (attempt, step), for rank 0 and for generators to ask for; its name has no hash."""
        kept = self._owned(attempt=attempt, step=step, slices=slices)
        self._keep(kept)
        return kept.manifest.version

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

    def elsewhere(self, content_hash: bytes) -> tuple[str, int] | None:
        """Return the address of another rank that holds the bytes of this hash, and their number; None: no kept version has them there."""
        with self._lock:
            for kept in self._kept.values():
                if content_hash in kept.elsewhere:
                    return kept.elsewhere[content_hash]
        return None

    def retain(self, is_needed: Callable[[pb.VersionName], bool]) -> list[pb.VersionName]:
        """Drop the versions that are not needed, before another one is copied; return the names of those that stay. Pulled ones do."""
        with self._lock:
            for key, kept in list(self._kept.items()):
                if not kept.pulls and not is_needed(kept.manifest.version):
                    del self._kept[key]
            return [kept.manifest.version for kept in self._kept.values()]

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

    def _owned(self, *, attempt: int, step: int, slices: Iterable[SliceBytes]) -> _KeptVersion:
        """Return what is kept of these slices: this rank's part, with the deltas to it."""
        with self._lock:
            before = next(reversed(self._kept.values()), None)
        given = {(one.name, one.first_row): one for one in slices}
        owned = {key: _owned(one, before=before) for key, one in sorted(given.items())}
        part = pb.Manifest(version=pb.VersionName(attempt=attempt, step=step), hash_algorithm=HASH_ALGORITHM)
        for key, kept in owned.items():
            if not part.tensors or part.tensors[-1].name != given[key].name:
                part.tensors.add(name=given[key].name, dtype=given[key].dtype, shape=given[key].shape)
            part.tensors[-1].slices.append(kept.entry)
        if self._deltas is not None and before is not None:
            part.deltas.extend(self._deltas.make(before.slices, owned))
        return _KeptVersion(
            manifest=part,
            given={key: one.data for key, one in given.items() if one.data.readonly},
            slices=owned,
            contents={one.entry.hash: one.data for one in owned.values()},
        )

    def _keep(self, kept: _KeptVersion) -> None:
        key = _key(kept.manifest.version)
        with self._lock:
            self._kept.pop(key, None)  # published again: it is the newest now
            self._kept[key] = kept
            self._evict()
            self.published += 1

    def _evict(self) -> None:
        """Drop old versions; oldest first in `_kept`."""
        for key in list(self._kept)[: -self._newest_kept]:
            if len(self._kept) > self._newest_kept + PULLED_KEPT or not self._kept[key].pulls:
                del self._kept[key]


def _key(version: pb.VersionName) -> _Key:
    return version.attempt, version.step, version.hash


def _owned(given: SliceBytes, *, before: _KeptVersion | None) -> KeptSlice:
    key = given.name, given.first_row
    if before is not None and before.given.get(key) is given.data:
        return before.slices[key]
    data = _frozen(given.data)
    assert len(data) % max(1, row_bytes(given.dtype, given.shape)) == 0, "a slice has whole rows"
    return KeptSlice(data, slice_entry(data, first_row=given.first_row), element_bytes(given.dtype))


def _frozen(data: memoryview) -> memoryview:
    """Return the same bytes, flat, in a read-only buffer."""
    if data.readonly and data.c_contiguous:
        return data.cast("B") if data.nbytes else memoryview(b"")
    return memoryview(data.tobytes())


@dataclass(slots=True, kw_only=True)
class _PassedVersion:
    version: pb.VersionName
    mark: Callable[[], int]
    manifest: pb.Manifest | None = None
    contents: dict[bytes, memoryview | None] = field(default_factory=dict)
    """By hash; None: on its way."""
    pulls: int = 0


class RelayStore:
    """What `WeightStore` is to a trainer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: list[_PassedVersion] = []  # oldest first

    # ---- the pull's

    def begin(self, version: pb.VersionName, *, mark: Callable[[], int]) -> None:
        """It is on its way; `mark` rises with each byte."""
        with self._changed:
            self._kept = [kept for kept in self._kept if kept.version != version]
            self._kept.append(_PassedVersion(version=version, mark=mark))
            self._evict()

    def described(self, manifest: pb.Manifest) -> None:
        """Give what the version that began last has: all of it from here. Deltas are the trainer's to give, slices are near."""
        passed = at_one_place(manifest)
        passed.ClearField("deltas")
        with self._changed:
            self._kept[-1].manifest = passed
            self._kept[-1].contents = dict.fromkeys(
                (one.hash for entry in manifest.tensors for one in entry.slices), None
            )
            self._changed.notify_all()

    def have(self, content_hash: bytes, data: memoryview) -> None:
        """Verified bytes of it."""
        with self._changed:
            self._kept[-1].contents[content_hash] = data.toreadonly()
            self._changed.notify_all()

    def failed(self) -> None:
        """It will not come."""
        with self._changed:
            self._kept.pop()
            self._changed.notify_all()

    # ---- the server's

    def versions(self) -> list[pb.VersionName]:
        """Names of those that are kept or on their way, oldest first."""
        with self._changed:
            return [kept.version for kept in self._kept]

    @contextmanager
    def pulling(self, version: pb.VersionName) -> Iterator[pb.Manifest | None]:
        """The manifest, or None when the version is not kept; while inside, it is not dropped for being old.

        Raises:
            NotYetError: it is not there in time.
        """
        with self._changed:
            kept = self._find(version)
            if kept is not None:
                kept.pulls += 1
        try:
            yield None if kept is None else self._awaited(lambda: kept.manifest, still=lambda: kept in self._kept)
        finally:
            with self._changed:
                if kept is not None:
                    kept.pulls -= 1
                self._evict()

    def content(self, content_hash: bytes) -> memoryview | None:
        """The bytes of this hash; None when no version has them. Raises as `pulling`."""
        with self._changed:
            if not self._has(content_hash):
                return None
        return self._awaited(lambda: self._content(content_hash), still=lambda: self._has(content_hash))

    def _awaited(self, look: Callable[[], _T | None], *, still: Callable[[], bool]) -> _T | None:
        with self._changed:
            self._changed.wait_for(lambda: look() is not None or not still(), _RELAY_WAIT_S)
            found = look()
            if found is None and still():
                raise NotYetError(self._kept[-1].mark())
            return found

    def _find(self, version: pb.VersionName) -> _PassedVersion | None:
        return next((kept for kept in self._kept if kept.version == version), None)

    def _has(self, content_hash: bytes) -> bool:
        return any(content_hash in kept.contents for kept in self._kept)

    def _content(self, content_hash: bytes) -> memoryview | None:
        return next((kept.contents[content_hash] for kept in self._kept if kept.contents.get(content_hash)), None)

    def _evict(self) -> None:
        older = [kept for kept in self._kept[:-1] if kept.pulls]
        self._kept = older[-_RELAY_PULLED_KEPT:] + self._kept[-1:]
        self._changed.notify_all()
