"""One cluster as the operator sees it: what is known of it without asking, and writes that are known at once.

Owns: one store and its reflectors per kind, the rule that the answer to our own write is known before the watch tells of it, and that
nothing of somebody else is taken over. Does not own: what is to be written (`planning`), when (`controller.py`).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl import names
from streamrl_operator.kube.answers import ConflictError, NotFoundError
from streamrl_operator.kube.cache import CacheSync, Changed, Key, Reflector, Store
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.job_watch import JobWatch
from streamrl_operator.kube.kinds import CHILDREN, CLAIM, POD, POD_GROUPS, RLJOB, TLS_ROUTE, WORKLOAD, Kind, of

Object = dict[str, Any]


class NameTakenError(Exception):
    """An object that we would make is there and is not of this job."""

    def __init__(self, obj: Mapping[str, Any]) -> None:
        metadata = obj["metadata"]
        owner = next((f"{o['kind']} {o['name']}" for o in metadata.get("ownerReferences") or ()), "no one")
        super().__init__(
            f"{obj['kind']} {metadata['name']}: must not exist before the job makes it, got one that belongs to {owner}; "
            "delete it or give the job another name"
        )


class ObjectMissingError(Exception):
    """Pods of the job name an object that is not there: they would take their GPUs and wait for it."""

    def __init__(self, *, kind: str, name: str, user: str) -> None:
        super().__init__(f"{kind} {name}: must exist before the job starts, since {user} names it; create it")


@dataclass(slots=True)
class CachedCluster:
    """The home cluster, or a member."""

    client: Client
    changed: Changed
    namespaces: tuple[str, ...] = ()
    """Empty = all."""
    kinds: tuple[Kind, ...] = (RLJOB, *CHILDREN)
    """That are followed."""
    reported: Callable[[str, bool], None] = lambda *_: None
    """Told of a namespace that has become known, or is refused."""
    cache_sync: CacheSync = field(init=False)
    """Jobs are looked at where it says that all is known."""
    _stores: dict[Kind, Store] = field(init=False)
    _reflectors: list[Reflector] = field(init=False)
    job_watches: dict[str, JobWatch] = field(init=False)
    """By namespace."""

    def __post_init__(self) -> None:
        followed, every = self.kinds, (RLJOB, *CHILDREN, *POD_GROUPS.values(), WORKLOAD, TLS_ROUTE)
        self._stores = {kind: Store(self.changed, is_defined=kind in followed) for kind in every}
        self.cache_sync = CacheSync(self.namespaces or ("",), followed, self._on_cache_sync)
        self._reflectors = [
            Reflector(
                client=self.client,
                kind=kind,
                store=store,
                cache_sync=self.cache_sync,
                namespace=namespace,
                labels=names.LABEL_JOB,
            )
            for kind, store in self._stores.items()
            for namespace in self.cache_sync.namespaces
            if kind in followed and kind is not RLJOB
        ]
        self.job_watches = {
            namespace: JobWatch(
                client=self.client, store=self._stores[RLJOB], cache_sync=self.cache_sync, namespace=namespace
            )
            for namespace in self.cache_sync.namespaces
            if RLJOB in followed
        }

    async def follow(self) -> None:
        """Keep the stores up to date, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for reflector in (*self._reflectors, *self.job_watches.values()):
                name = f"watch {reflector.kind.plural} {reflector.namespace}"
                tasks.create_task(reflector.run(), name=name)

    def doubt(self, namespace: str) -> None:
        """A job there may be gone without a word, or the namespace not be ours any more: ask."""
        self.job_watches[namespace if namespace in self.job_watches else ""].doubt()

    def _on_cache_sync(self, namespace: str, is_whole: bool) -> None:  # noqa: FBT001 - as it is told
        """What changed while a namespace was not known whole was not looked at."""
        for key in self.jobs() if is_whole else ():
            if namespace in ("", key[0]):
                self.changed(key, is_whole)
        self.reported(namespace, is_whole)

    def has(self, kind: Kind) -> bool:
        """Whether objects of this kind can be had here."""
        return self._stores[kind].is_defined

    def known(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """One object, without asking."""
        return self._stores[kind].get(namespace, name)

    def of_job(self, kind: Kind, key: Key, *, failed: bool = False) -> list[Object]:
        """The objects of a job, without asking; `failed`: instead the last that were deleted in phase Failed."""
        store = self._stores[kind]
        return store.failed_of_job(*key) if failed else store.of_job(*key)

    def versions(self, kinds: Iterable[Kind], key: Key) -> tuple[object, ...]:
        """Of all objects of these kinds of a job: equal where nothing has changed."""
        return tuple(self._stores[kind].versions(*key) for kind in kinds)

    def jobs(self) -> set[Key]:
        """All jobs that there are, or that something is left of."""
        return set().union(*(store.jobs() for store in self._stores.values()))

    def counts(self) -> dict[str, int]:
        """Objects known, by kind."""
        found = dict.fromkeys((kind.plural for kind in self._stores), 0)
        for kind, store in self._stores.items():
            found[kind.plural] += len(store)  # PodGroups are of two groups
        return found

    def stale_s(self) -> dict[str, float]:
        """For how long the API server has not told of a kind, in the namespace where that is longest."""
        found = dict.fromkeys(self.counts(), 0.0)
        for reflector in (*self._reflectors, *self.job_watches.values()):
            found[reflector.kind.plural] = max(found[reflector.kind.plural], reflector.stale_s)
        return found

    async def apply(
        self, obj: Mapping[str, Any], *, manager: str = names.FIELD_MANAGER, subresource: str = ""
    ) -> Object:
        """Server-side apply. A status of ours makes nobody look at the job again: what it says was just decided."""
        answer = await self.client.apply(of(obj), obj, manager=manager, subresource=subresource)
        known = self.known(of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"])
        # The answer may have somebody else's change too, which then no watch tells.
        is_ours_alone = subresource == "status" and known is not None and _but_status(known) == _but_status(answer)
        return self._learn(answer, quietly=is_ours_alone)

    def find(self, obj: Mapping[str, Any], *, owner_uid: str) -> Object | None:
        """The object of this name, if we know of one.

        Raises:
            NameTakenError: it belongs to somebody else.
        """
        if not self.has(of(obj)):  # nothing tells when it goes
            return None
        found = self.known(of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"])
        return None if found is None else _own(found, obj, owner_uid=owner_uid)

    async def find_or_make(
        self, obj: Mapping[str, Any], *, owner_uid: str, manager: str = names.FIELD_MANAGER
    ) -> Object:
        """The object of this name as it is; where we know of none it is made in one request.

        One may be there all the same, without our label or newer than our caches: the API server says so and leaves it as it is.

        Raises:
            NameTakenError: it belongs to somebody else. It is left as it is.
            KubeError: a request failed.
        """
        known = self.find(obj, owner_uid=owner_uid)
        if known is not None:
            return known
        kind, metadata = of(obj), obj["metadata"]
        try:
            return await self.apply({**obj, "metadata": {**metadata, "resourceVersion": _OF_NONE}}, manager=manager)
        except ConflictError as conflict:
            try:
                found = await self.client.get(kind, namespace=metadata["namespace"], name=metadata["name"])
            except NotFoundError:
                raise conflict from None
        return self._learn(_own(found, obj, owner_uid=owner_uid))

    async def try_apply(
        self, obj: Mapping[str, Any], *, owner_uid: str, is_new: bool, warned: Callable[[str], None]
    ) -> None:
        """Ask whether the object would be made (`is_new`) or changed. `warned`: called with each warning of the answer.

        Raises:
            NameTakenError: it belongs to somebody else.
            KubeError: it would be refused, or a request failed.
        """
        kind, metadata = of(obj), obj["metadata"]
        body = {**obj, "metadata": {**metadata, "resourceVersion": _OF_NONE}} if is_new else obj
        try:
            await self.client.try_out(kind, body, manager=names.FIELD_MANAGER, warned=warned)
        except ConflictError:  # it is there all the same, or newer than our caches
            there = await self.client.get(kind, namespace=metadata["namespace"], name=metadata["name"])
            self._learn(_own(there, obj, owner_uid=owner_uid))

    async def delete(self, obj: Mapping[str, Any], *, propagation: str = "Background") -> None:
        """Delete this very object; it may be gone already."""
        metadata, store = obj["metadata"], self._stores[of(obj)]
        try:
            answer = await self.client.delete(
                of(obj),
                namespace=metadata["namespace"],
                name=metadata["name"],
                uid=metadata["uid"],
                propagation=propagation,
            )
        except NotFoundError:
            store.remove(obj)
            return
        if answer.get("kind") == "Status":
            store.remove(obj)
        else:
            self._learn(answer)

    async def merge(self, obj: Mapping[str, Any], change: Mapping[str, Any], *, subresource: str = "") -> Object:
        """JSON merge patch on the version that we know of."""
        metadata = obj["metadata"]
        own = {**(change.get("metadata") or {}), "resourceVersion": metadata["resourceVersion"]}
        answer = await self.client.merge(
            of(obj),
            namespace=metadata["namespace"],
            name=metadata["name"],
            change={**change, "metadata": own},
            subresource=subresource,
        )
        return self._learn(answer)

    def _learn(self, answer: Object, *, quietly: bool = False) -> Object:
        store, metadata = self._stores[of(answer)], answer["metadata"]
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers") and of(answer) is not POD:
            store.remove(answer)
        else:
            store.put(answer, quietly=quietly)
        return answer


_OF_NONE = "1"
"""No object has this resourceVersion: an apply with it makes one, or is refused. (etcd gives its first object 2.)"""


def _but_status(obj: Object) -> Object:
    metadata = {name: value for name, value in obj["metadata"].items() if name not in _OF_EACH_WRITE}
    return {**obj, "metadata": metadata, "status": None}


_OF_EACH_WRITE = ("resourceVersion", "managedFields")


def _own(found: Object, wanted: Mapping[str, Any], *, owner_uid: str) -> Object:
    if not _belongs(found, wanted, owner_uid=owner_uid):
        raise NameTakenError(found)  # not kept: no watch would tell us when it goes
    return found


def _belongs(found: Mapping[str, Any], wanted: Mapping[str, Any], *, owner_uid: str) -> bool:
    """Whether it is the job's, or a claim that a job of its name has kept and that this one would keep too.

    What an earlier job was told to keep must not go with this one; and what nobody owns may be anybody's work, a CA above all.
    """
    owners, labels = found["metadata"].get("ownerReferences") or (), found["metadata"].get("labels") or {}
    if any(owner["uid"] == owner_uid for owner in owners):
        return True
    ours = wanted["metadata"]["labels"]
    if owners or labels.get(names.LABEL_JOB) != ours[names.LABEL_JOB]:
        return False
    was_ours = labels.get(names.LABEL_JOB_UID, "") == ours[names.LABEL_JOB_UID]  # the owner may be its anchor
    return was_ours or (of(wanted) is CLAIM and not wanted["metadata"].get("ownerReferences"))
