"""What a server of weights serves: the versions that a rank of the trainer has published, or those that a generator passes on.

    WeightStore    rank 0         publish        (attempt, step, hash)   the manifest of the whole version, which names the ranks that hold the rest
                   other ranks    publish_part   (attempt, step, "")     the manifest of what this rank holds
    RelayStore     of a generator: a slice as soon as it is verified

Whoever asks for a part or a slice that is on its way waits in the thread of its connection.

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

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.deltas import DeltaStore, KeptSlice, SliceKey
from streamrl_workers.weights.hashing import (
    HASH_ALGORITHM,
    SliceBytes,
    TensorBytes,
    as_slices,
    at_one_place,
    contents,
    element_bytes,
    join_parts,
    row_bytes,
    slice_entry,
)
from streamrl_workers.weights.source import NotYetError

NEWEST_KEPT = 2
"""The one that generators run and the one that they pull."""
PULLED_KEPT = 2
"""Older ones that are kept while pulled. Bounds memory: one more, and the puller of the oldest is told that it is gone."""

_WAIT_S = 3.0
"""Maximum wait for what is on its way. Then the asker learns how far it is, so that it does not take this process for dead."""
_RELAY_PULLED_KEPT = 1
"""Maximum number of older versions in a relay, while they are pulled."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Version:
    name: pb.VersionName = field(default_factory=pb.VersionName)
    manifest: pb.Manifest | None = None  # None: on its way
    contents: dict[bytes, memoryview | None] = field(default_factory=dict)  # by hash; None: on its way
    pulls: int = 0
    mark: Callable[[], int] = lambda: 0  # rises with each byte on its way
    given: dict[SliceKey, memoryview] = field(
        default_factory=dict
    )  # those that were read-only: others may have changed since
    slices: dict[SliceKey, KeptSlice] = field(default_factory=dict)
    elsewhere: dict[bytes, tuple[str, int]] = field(default_factory=dict)  # address of the holder, and bytes, by hash


class VersionStore:
    """The kept versions, as a server gives them: a `ServedStore`."""

    def __init__(self, *, newest_kept: int, pulled_kept: int) -> None:
        """`pulled_kept`: maximum number of older versions, while they are pulled."""
        self._newest_kept = newest_kept
        self._pulled_kept = pulled_kept
        self._changed = threading.Condition()
        self._kept: list[_Version] = []  # oldest first

    def versions(self) -> list[pb.VersionName]:
        """Return the names of the versions that are kept or on their way, oldest first."""
        with self._changed:
            return [kept.name for kept in self._kept]

    @contextmanager
    def pulling(self, version: pb.VersionName) -> Iterator[pb.Manifest | None]:
        """Give the manifest, or None if the version is not kept; while inside, it is not dropped for being old.

        Raises:
            NotYetError: it is not there in time.
        """
        with self._changed:
            self._wait(lambda: not self._is_coming(version))
            kept = self._find(version)
            if kept is not None:
                kept.pulls += 1
        try:
            yield None if kept is None else kept.manifest
        finally:
            with self._changed:
                if kept is not None:
                    kept.pulls -= 1
                self._evict()

    def content(self, content_hash: bytes) -> memoryview | None:
        """Return the bytes of this hash; None: no kept version has them. Raises as `pulling`."""

        def found() -> list[memoryview | None]:
            return [kept.contents[content_hash] for kept in self._kept if content_hash in kept.contents]

        with self._changed:
            self._wait(lambda: not (places := found()) or any(one is not None for one in places))
            return next((one for one in found() if one is not None), None)

    def _is_coming(self, version: pb.VersionName) -> bool:
        kept = self._find(version)
        return kept is not None and kept.manifest is None

    def _wait(self, is_there: Callable[[], bool]) -> None:
        if not self._changed.wait_for(is_there, _WAIT_S):
            raise NotYetError(self._kept[-1].mark() if self._kept else 0)

    def _find(self, version: pb.VersionName) -> _Version | None:
        return next((kept for kept in self._kept if kept.name == version), None)

    def _add(self, version: _Version) -> None:
        """Keep a version as the newest one, also if it was kept before."""
        self._kept = [*(kept for kept in self._kept if kept.name != version.name), version]
        self._evict()

    def _evict(self) -> None:
        older = max(0, len(self._kept) - self._newest_kept)
        pulled = [kept for kept in self._kept[:older] if kept.pulls]
        self._kept = pulled[-self._pulled_kept :] + self._kept[older:]
        self._changed.notify_all()


class WeightStore(VersionStore):
    """The versions that a rank of the trainer has published."""

    def __init__(self, *, newest_kept: int = NEWEST_KEPT, deltas: DeltaStore | None = None) -> None:
        """`deltas`: gets those between consecutive versions; None: there are none."""
        super().__init__(newest_kept=newest_kept, pulled_kept=PULLED_KEPT)
        self._deltas = deltas
        self._coming: pb.VersionName | None = None
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
        part, kept = self._owned(attempt=attempt, step=step, slices=(*as_slices(tensors), *slices))
        whole = join_parts(part, parts())
        kept.elsewhere = {
            content_hash: (whole.holders[holder - 1], size_bytes)
            for content_hash, size_bytes, holder in contents(whole)
            if holder
        }
        self._publish(kept, manifest=whole)
        return kept.name

    def publish_part(self, *, attempt: int, step: int, slices: Iterable[SliceBytes]) -> pb.VersionName:
        """Keep what this rank holds of version (attempt, step), for rank 0 and for generators to ask for; its name has no hash."""
        part, kept = self._owned(attempt=attempt, step=step, slices=slices)
        self._publish(kept, manifest=part)
        return kept.name

    def content(self, content_hash: bytes) -> memoryview | None:
        """Return the bytes of this hash, of a slice or a delta; None: no kept version has them."""
        found = super().content(content_hash)
        return self._deltas.content(content_hash) if found is None and self._deltas is not None else found

    def elsewhere(self, content_hash: bytes) -> tuple[str, int] | None:
        """Return the address of another rank that holds the bytes of this hash, and their number; None: no kept version has them there."""
        with self._changed:
            return next((kept.elsewhere[content_hash] for kept in self._kept if content_hash in kept.elsewhere), None)

    def retain(self, is_needed: Callable[[pb.VersionName], bool]) -> list[pb.VersionName]:
        """Drop the versions that are not needed, before another one is copied; return the names of those that stay. Pulled ones do."""
        with self._changed:
            self._kept = [kept for kept in self._kept if kept.pulls or is_needed(kept.name)]
            return self.versions()

    def _owned(self, *, attempt: int, step: int, slices: Iterable[SliceBytes]) -> tuple[pb.Manifest, _Version]:
        """Return this rank's part, with the deltas to it, and what is kept of these slices."""
        with self._changed:
            before = self._kept[-1] if self._kept else None
        given = {(one.name, one.first_row): one for one in slices}
        owned = {key: _owned(one, before=before) for key, one in sorted(given.items())}
        part = pb.Manifest(version=pb.VersionName(attempt=attempt, step=step), hash_algorithm=HASH_ALGORITHM)
        for key, kept in owned.items():
            if not part.tensors or part.tensors[-1].name != given[key].name:
                part.tensors.add(name=given[key].name, dtype=given[key].dtype, shape=given[key].shape)
            part.tensors[-1].slices.append(kept.entry)
        if self._deltas is not None and before is not None:
            part.deltas.extend(self._deltas.make(before.slices, owned))
        return part, _Version(
            given={key: one.data for key, one in given.items() if one.data.readonly},
            slices=owned,
            contents={one.entry.hash: one.data for one in owned.values()},
        )

    def _publish(self, kept: _Version, *, manifest: pb.Manifest) -> None:
        kept.name, kept.manifest = manifest.version, manifest
        with self._changed:
            self._add(kept)
            self.published += 1


def _owned(given: SliceBytes, *, before: _Version | None) -> KeptSlice:
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


class RelayStore(VersionStore):
    """The versions that a generator pulls, and passes on meanwhile."""

    def __init__(self) -> None:
        super().__init__(newest_kept=1, pulled_kept=_RELAY_PULLED_KEPT)

    def begin(self, version: pb.VersionName, *, mark: Callable[[], int]) -> None:
        """Note that a version is on its way; `mark` rises with each byte."""
        with self._changed:
            self._add(_Version(name=version, mark=mark))

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
        """Give verified bytes of that version."""
        with self._changed:
            self._kept[-1].contents[content_hash] = data.toreadonly()
            self._changed.notify_all()

    def failed(self) -> None:
        """Forget the version that began last: it will not come."""
        with self._changed:
            self._kept.pop()
            self._changed.notify_all()
