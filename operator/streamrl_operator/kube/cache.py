"""What an API server has, in memory: one `Store` for each kind, kept equal by a `Reflector` for each namespace; `CacheSync` says where all is there.

    Reflector: list, then watch from there ──▶ Store ──changed(job)──▶ work queue
            └── listed, refused ──▶ CacheSync ──▶ only jobs of namespaces in sync are reconciled

Owns: the objects, in little memory (one JSON text each: a thousand jobs have forty thousand objects), by name and by job; the rule of what is
newer. Does not own: what was written (`cluster.py` puts answers to our own writes here, so the next reconcile already sees them).
After any doubt (a version too old, an error in the stream) a reflector lists again. A list is not older than the request for it, so it wins over
all that was known before, whatever the versions: a deletion that nobody reported is not missed, and an etcd restored from a backup, whose
versions begin again below, is believed. Each namespace is by itself: one whose Role is gone is reported once and asked again until all of it can be listed.
Where all namespaces are one ("", by a ClusterRole) a refusal is an error like any other, and what was known stays in use; `stale_s` says for how long.
Waits for: the API server; unblocked by its answer, the request's deadline, or cancellation.
"""

import asyncio
import json
import logging
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from streamrl import names
from streamrl_operator.kube.answers import (
    ExpiredError,
    ForbiddenError,
    KubeError,
    NotFoundError,
    UnavailableError,
    UnusableError,
)
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.kinds import CLUSTER, GENERATOR_POOL, RLJOB, Kind

_MAX_GONE = 4096
"""Deletions remembered: far more than there are in the seconds that an answer can be late."""

_MAX_FAILED, _MAX_FAILED_OF_JOB = 256, 8
"""Jobs whose failed pods are remembered, and pods of each."""

Key = tuple[str, str]
"""(namespace, name)"""
Changed = Callable[[Key, bool], None]
"""Called with (namespace, name of the job) when something of it has changed, and whether it is what the job's owner asks for."""


@dataclass(frozen=True, slots=True)
class _CachedObject:
    version: int
    epoch: int
    generation: int
    uid: str
    job: str
    text: bytes


def job_of(obj: Mapping[str, Any]) -> str:
    """Name of the job that an object belongs to: it is the job, says so by label, or is owned by it; else empty. Of an RLCluster its own."""
    metadata = obj["metadata"]
    if obj.get("kind") in (RLJOB.kind, CLUSTER.kind):
        return str(metadata["name"])
    label = (metadata.get("labels") or {}).get(names.LABEL_JOB)
    if label:
        return str(label)
    owners = metadata.get("ownerReferences") or ()
    return next((str(owner["name"]) for owner in owners if owner.get("kind") == RLJOB.kind), "")


def version_of(obj: Mapping[str, Any]) -> int:
    """The version as a number: versions of one API server rise, until its etcd is restored from a backup."""
    return int(obj["metadata"].get("resourceVersion") or 0)


@dataclass(slots=True)
class Store:
    """The objects of one kind."""

    changed: Changed
    is_defined: bool = True
    """Whether the API server knows the kind."""
    _kept: dict[Key, _CachedObject] = field(default_factory=dict)
    _gone: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """(version, epoch) of the latest deletions: the late answer to a write must not bring back what is deleted since.
    Of the very version is what only lost its label: to a watch by label that is a deletion too."""
    _epoch: int = 0
    """Lists begun so far: what was known in an earlier epoch than a list's yields to the list."""
    _by_job: dict[Key, set[Key]] = field(default_factory=dict)
    _failed: dict[Key, deque[bytes]] = field(default_factory=dict)
    """By job: the last that were deleted in phase Failed. A StatefulSet replaces such a pod within milliseconds, before a reconcile sees it."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, namespace: str, name: str) -> dict[str, Any] | None:
        """One object; a copy."""
        kept = self._kept.get((namespace, name))
        return None if kept is None else _unpack(kept.text)

    def of_job(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """The objects of a job, by name; copies."""
        return [_unpack(self._kept[key].text) for key in sorted(self._by_job.get((namespace, job), ()))]

    def failed_of_job(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """Return the last objects of a job that were deleted in phase Failed, as they were."""
        return [_unpack(text) for text in self._failed.get((namespace, job), ())]

    def versions(self, namespace: str, job: str) -> frozenset[tuple[Key, int]]:
        """Names and versions of the objects of a job: equal where nothing has changed."""
        return frozenset((key, self._kept[key].version) for key in self._by_job.get((namespace, job), ()))

    def jobs(self) -> set[Key]:
        """All jobs that something here belongs to."""
        return set(self._by_job)

    def begin_list(self) -> int:
        """The epoch of a list that is asked for from now on."""
        self._epoch += 1
        return self._epoch

    def put(self, obj: Mapping[str, Any], *, epoch: int = 0, quietly: bool = False) -> Key:
        """Keep an object unless we know of a newer version; `epoch`: of the list that has it. `quietly`: nobody need look at it."""
        key, version = _key(obj), version_of(obj)
        known, (gone_version, gone_epoch) = self._kept.get(key), self._gone.get(key, (0, 0))
        is_newer = known is None or version > known.version or (version != known.version and known.epoch < epoch)
        if not is_newer or (version < gone_version and gone_epoch >= epoch):
            return key
        self._forget(key)
        metadata, job = obj["metadata"], job_of(obj)
        generation = int(metadata.get("generation") or 0)
        self._kept[key] = _CachedObject(version, self._epoch, generation, metadata["uid"], job, _pack(obj))
        self._by_job.setdefault((key[0], job), set()).add(key)
        is_asked = obj.get("kind") == RLJOB.kind and (known is None or known.generation != generation)
        if not quietly:
            self._tell(key[0], {job, known.job if known else job}, is_asked=is_asked)
        return key

    def remove(self, obj: Mapping[str, Any]) -> None:
        """Forget a deleted object, unless another has come in its place."""
        key = _key(obj)
        known = self._kept.get(key)
        if known is not None and (known.uid == obj["metadata"]["uid"] or known.version < version_of(obj)):
            self._forget(key)
            self._remember_failed(key[0], known.job, obj)
            self._tell(key[0], {known.job})
        self._gone[key] = max(self._gone.pop(key, (0, 0)), (version_of(obj), self._epoch))
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def keep(self, listed: Set[Key], *, version: int, epoch: int, namespace: str = "") -> None:
        """After a list as of `version` (of one namespace, or of all): what it lacked and is not newer is gone.

        A deletion of a version that the list has not reached, known before it, is of no history that this API server has.
        """
        for key, kept in list(self._kept.items()):
            is_older = kept.version <= version or kept.epoch < epoch
            if key not in listed and is_older and namespace in ("", key[0]):
                self._forget(key)
                self._tell(key[0], {kept.job})
        for key, (gone_version, gone_epoch) in list(self._gone.items()):
            if gone_version > version and gone_epoch < epoch and namespace in ("", key[0]):
                del self._gone[key]

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            of_job = self._by_job[key[0], kept.job]
            of_job.discard(key)
            if not of_job:
                del self._by_job[key[0], kept.job]

    def _remember_failed(self, namespace: str, job: str, obj: Mapping[str, Any]) -> None:
        if (obj.get("status") or {}).get("phase") != "Failed":
            return
        failed = self._failed.pop((namespace, job), deque(maxlen=_MAX_FAILED_OF_JOB))
        failed.append(_pack(obj))
        self._failed[namespace, job] = failed
        if len(self._failed) > _MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _tell(self, namespace: str, jobs: set[str], *, is_asked: bool = False) -> None:
        for job in jobs - {""}:
            self.changed((namespace, job), is_asked)


def _key(obj: Mapping[str, Any]) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _pack(obj: Mapping[str, Any]) -> bytes:
    """Without the bookkeeping of field managers, which is half of an object; of a pool it tells who holds `replicas`."""
    kept = obj["metadata"]
    if obj.get("kind") != GENERATOR_POOL.kind:
        kept = {name: value for name, value in kept.items() if name != "managedFields"}
    return zlib.compress(json.dumps({**obj, "metadata": kept}, separators=(",", ":")).encode(), level=1)


def _unpack(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(text))
    return found


log = logging.getLogger(__name__)

LONGEST_REFUSED_S = 30.0
"""Between two attempts to list what is refused: a dozen kinds ask, for as long as the namespace is on the list."""


@dataclass(slots=True)
class CacheSync:
    """What is known of the namespaces that the operator watches."""

    namespaces: tuple[str, ...]
    """("",) = all, as one."""
    kinds: Iterable[Kind]
    """A namespace is whole when all of these are listed."""
    changed: Callable[[str, bool], None] = lambda *_: None
    """Told of a namespace that has become whole, or (False) is refused."""
    _missing: dict[str, set[Kind]] = field(init=False)
    _refused: dict[str, str] = field(default_factory=dict)
    """Namespace -> the first refusal, until it is whole again."""

    def __post_init__(self) -> None:
        self._missing = {namespace: set(self.kinds) for namespace in self.namespaces}

    def listed(self, namespace: str, kind: Kind) -> None:
        """All of the kind is known there."""
        missing = self._missing[namespace]
        if kind not in missing:
            return
        missing.discard(kind)
        if not missing:
            self._refused.pop(namespace, None)
            log.info("namespace is known", extra={"namespace": namespace or "all"})
            self.changed(namespace, self.is_whole(namespace))

    def is_refused(self, namespace: str, kind: Kind, error: KubeError) -> bool:
        """Whether the error says that the kind cannot be seen there; then nothing there is looked at before it can be."""
        if not namespace or not isinstance(error, ForbiddenError | NotFoundError):
            return False
        self._missing[namespace].add(kind)
        if namespace not in self._refused:
            self._refused[namespace] = str(error)
            fix = "restore its Role and RoleBinding, or take it out of watchNamespaces"
            log.warning("namespace is left alone", extra={"namespace": namespace, "error": str(error), "fix": fix})
            self.changed(namespace, self.is_whole(namespace))
        return True

    def is_whole(self, namespace: str) -> bool:
        """Whether all is known of what is there."""
        return not self._missing.get(namespace, self._missing.get("", ()))

    def unready(self) -> str:
        """Why the work cannot be done, empty if it can: a list is waited for, or there is no namespace that may be seen."""
        unlisted = [missing for namespace, missing in self._missing.items() if namespace not in self._refused]
        if waiting := {kind.plural for missing in unlisted for kind in missing}:
            return f"waits for the first list of {', '.join(sorted(waiting))}"
        return "" if unlisted else f"no namespace may be seen: {next(iter(self._refused.values()))}"


WATCH_S = (240.0, 480.0)
"""A watch ends after a time drawn from here, so that not all of them begin again at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 15.0
"""Between two attempts: doubles from the first to the longest, each drawn from its upper half."""


@dataclass(slots=True, kw_only=True)
class Reflector:
    """Fills one store from one kind in one namespace (empty: all)."""

    client: Client
    kind: Kind
    store: Store
    cache_sync: CacheSync
    """Told when the store holds all there is."""
    namespace: str = ""
    labels: str = ""
    _version: str = ""
    """Of the API server: where the next watch goes on; empty: list first."""
    _failures: int = 0
    _stale_since_s: float | None = None
    """Monotonic clock: the first failure since the API server told anything."""

    @property
    def stale_s(self) -> float:
        """For how long the API server has refused or failed to tell what there is; 0 while it does."""
        return 0.0 if self._stale_since_s is None else time.monotonic() - self._stale_since_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ExpiredError:
                self._version = ""
            except KubeError as error:
                self._failures += 1
                # A connection that broke goes on from where it was; after any other error we no longer know where that is, and an
                # event that cannot be read would come again and again.
                if not _is_broken_connection(error):
                    self._version = ""
                await self._pause(error)

    async def _pause(self, error: KubeError) -> None:
        longest_s, is_absent = LONGEST_PAUSE_S, self.kind.optional and isinstance(error, NotFoundError)
        self._stale_since_s = None if is_absent else self._stale_since_s or time.monotonic()
        if is_absent:
            self.store.is_defined, longest_s = False, LONGEST_REFUSED_S
            self.cache_sync.listed(self.namespace, self.kind)
        elif self.cache_sync.is_refused(self.namespace, self.kind, error):
            longest_s = LONGEST_REFUSED_S
        else:
            extra = {"kind": self.kind.kind, "error": str(error), "failures": self._failures}
            log.warning("watch failed", extra=extra)
        await asyncio.sleep(pause_s(self._failures, asked_s=error.retry_after_s, longest_s=longest_s))

    async def _list(self) -> None:
        """Make the store equal to what there is; a watch goes on from there."""
        listed: set[Key] = set()
        version, epoch = "", self.store.begin_list()
        async for items, newest in self.client.list(self.kind, namespace=self.namespace, labels=self.labels):
            listed |= {self.store.put(obj, epoch=epoch) for obj in items}
            version = newest
        self.store.keep(listed, version=int(version), epoch=epoch, namespace=self.namespace)
        self._version, self.store.is_defined, self._stale_since_s = version, True, None
        self.cache_sync.listed(self.namespace, self.kind)

    async def _watch(self) -> None:
        """Follow the changes until the watch has had its time."""
        duration_s = random.uniform(*WATCH_S)
        events = self.client.watch(
            self.kind, version=self._version, duration_s=duration_s, namespace=self.namespace, labels=self.labels
        )
        async for event, obj in events:
            if event in ("ADDED", "MODIFIED"):
                self.store.put(obj)
            elif event == "DELETED":
                self.store.remove(obj)
            self._version, self._failures, self._stale_since_s = obj["metadata"]["resourceVersion"], 0, None


def _is_broken_connection(error: KubeError) -> bool:
    return isinstance(error, UnavailableError) and not isinstance(error, UnusableError) and error.status in (0, 200)


def pause_s(
    failures: int, *, asked_s: float | None = None, longest_s: float = LONGEST_PAUSE_S, drawn: float | None = None
) -> float:
    """How long to wait after so many failures in a row; `drawn` from 0 to 1, at random if absent."""
    bound_s = min(longest_s, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
    share = 0.5 + 0.5 * (random.random() if drawn is None else drawn)
    return max(bound_s * share, asked_s or 0.0)
