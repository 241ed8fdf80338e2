"""What the API server last told us of the objects of one kind.

Owns: the objects, in little memory (one JSON text each: a thousand jobs have forty thousand objects), by name and by job; the rule of what
is newer. Does not own: where they come from (`reflector.py`), and what was written (`cluster.py` puts answers to our own writes here, so
the next look already sees them and a watch event of our own write changes nothing).
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from streamrl import names
from streamrl_operator.kube.kinds import GENERATOR_POOL, RLJOB

_MAX_GONE = 4096
"""Deletions remembered: far more than there are in the seconds that an answer can be late."""

Key = tuple[str, str]
"""(namespace, name)"""
Changed = Callable[[Key, bool], None]
"""Called with (namespace, name of the job) when something of it has changed, and whether it is what the job's owner asks for."""


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    generation: int
    uid: str
    job: str
    text: bytes


def job_of(obj: Mapping[str, Any]) -> str:
    """Name of the job that an object belongs to: it is the job, says so by label, or is owned by it; else empty."""
    metadata = obj["metadata"]
    if obj.get("kind") == RLJOB.kind:
        return str(metadata["name"])
    label = (metadata.get("labels") or {}).get(names.LABEL_JOB)
    if label:
        return str(label)
    owners = metadata.get("ownerReferences") or ()
    return next((str(owner["name"]) for owner in owners if owner.get("kind") == RLJOB.kind), "")


def version_of(obj: Mapping[str, Any]) -> int:
    """The version as a number: versions of one API server rise."""
    return int(obj["metadata"].get("resourceVersion") or 0)


@dataclass(slots=True)
class Store:
    """The objects of one kind."""

    changed: Changed
    _kept: dict[Key, _Kept] = field(default_factory=dict)
    _gone: dict[Key, int] = field(default_factory=dict)
    """Versions of the latest deletions: the late answer to a write must not bring back what is deleted since.
    Of the very version is what only lost its label: to a watch by label that is a deletion too."""
    _by_job: dict[Key, set[Key]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, namespace: str, name: str) -> dict[str, Any] | None:
        """One object; a copy."""
        kept = self._kept.get((namespace, name))
        return None if kept is None else _unpack(kept.text)

    def of_job(self, namespace: str, job: str) -> Iterator[dict[str, Any]]:
        """The objects of a job, by name; copies."""
        for key in sorted(self._by_job.get((namespace, job), ())):
            yield _unpack(self._kept[key].text)

    def versions(self, namespace: str, job: str) -> frozenset[tuple[Key, int]]:
        """Names and versions of the objects of a job: equal where nothing has changed."""
        return frozenset((key, self._kept[key].version) for key in self._by_job.get((namespace, job), ()))

    def jobs(self) -> set[Key]:
        """All jobs that something here belongs to."""
        return set(self._by_job)

    def put(self, obj: Mapping[str, Any]) -> Key:
        """Keep an object unless we know of a newer version."""
        key = _key(obj)
        known, version = self._kept.get(key), version_of(obj)
        if (known is not None and version <= known.version) or version < self._gone.get(key, 0):
            return key
        self._forget(key)
        metadata, job = obj["metadata"], job_of(obj)
        generation = int(metadata.get("generation") or 0)
        self._kept[key] = _Kept(version, generation, metadata["uid"], job, _pack(obj))
        self._by_job.setdefault((key[0], job), set()).add(key)
        is_asked = obj.get("kind") == RLJOB.kind and (known is None or known.generation != generation)
        self._tell(key[0], {job, known.job if known else job}, is_asked=is_asked)
        return key

    def remove(self, obj: Mapping[str, Any]) -> None:
        """Forget a deleted object, unless another has come in its place."""
        key = _key(obj)
        known = self._kept.get(key)
        if known is not None and (known.uid == obj["metadata"]["uid"] or known.version < version_of(obj)):
            self._forget(key)
            self._tell(key[0], {known.job})
        self._gone[key] = max(self._gone.pop(key, 0), version_of(obj))
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def keep(self, listed: Set[Key], *, version: int, namespace: str = "") -> None:
        """After a list as of `version` (of one namespace, or of all): what it lacked and is not newer is gone."""
        for key, kept in list(self._kept.items()):
            if key not in listed and kept.version <= version and namespace in ("", key[0]):
                self._forget(key)
                self._tell(key[0], {kept.job})

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            of_job = self._by_job[key[0], kept.job]
            of_job.discard(key)
            if not of_job:
                del self._by_job[key[0], kept.job]

    def _tell(self, namespace: str, jobs: set[str], *, is_asked: bool = False) -> None:
        for job in jobs - {""}:
            self.changed((namespace, job), is_asked)


def _key(obj: Mapping[str, Any]) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _pack(obj: Mapping[str, Any]) -> bytes:
    """Without the bookkeeping of field managers, which is half of an object; of a pool it tells who holds `replicas`."""
    kept = obj["metadata"]
    if obj.get("kind") != GENERATOR_POOL.kind:
        kept = {name: value for name, value in kept.items() if name != "managedFields"}
    return zlib.compress(json.dumps({**obj, "metadata": kept}, separators=(",", ":")).encode(), level=1)


def _unpack(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(text))
    return found
