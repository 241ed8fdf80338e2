"""The versions that a generator pulls and passes on, for a server of weights to serve: a tensor as soon as it is verified.

Who asks for a version or a tensor that is still on its way waits, in the thread of his connection. Thread-safe.

Owns what is passed on, and for how long it is kept. Does not own pulling (`pull.py`), nor who is told of this generator (the scheduler).

Invariants:
- Only verified bytes are given.
- The newest version is kept, and an older one while somebody pulls it, at most `_PULLED_KEPT` of these.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.source import NotYetError

_WAIT_S = 3.0
"""For what is on its way. Then it is told how far we are, so that nobody takes us for dead."""
_PULLED_KEPT = 1

_T = TypeVar("_T")


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
        """What the version that began last has. Deltas are the trainer's to give: here whole tensors are near."""
        passed = pb.Manifest.FromString(manifest.SerializeToString())
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
            self._changed.wait_for(lambda: look() is not None or not still(), _WAIT_S)
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
        self._kept = older[-_PULLED_KEPT:] + self._kept[-1:]
        self._changed.notify_all()
