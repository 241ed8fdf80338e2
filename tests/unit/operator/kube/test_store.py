"""What is known: of objects, where newer wins and deletions are neither missed nor undone, and of namespaces, each by itself."""

from typing import Any

import pytest

from streamrl.names import LABEL_JOB
from streamrl_operator.kube.answers import KubeError, Status, from_status
from streamrl_operator.kube.cache import CacheSync, Key, Store
from streamrl_operator.kube.kinds import POD, RLJOB

NS = "lab"


class Told(list[tuple[Key, bool]]):
    """Whom the store told."""

    def __call__(self, key: Key, is_asked: bool) -> None:
        self.append((key, is_asked))

    def jobs(self) -> set[str]:
        """Names; forgets them."""
        found = {key[1] for key, _ in self}
        self.clear()
        return found


def thing(name: str, version: int, *, job: str = "a", uid: str = "u1", **more: Any) -> dict[str, Any]:
    """A Service of a job."""
    labels = {LABEL_JOB: job} if job else {}
    metadata = {"name": name, "namespace": NS, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, **more}


@pytest.fixture
def reported() -> Told:
    return Told()


@pytest.fixture
def store(reported: Told) -> Store:
    return Store(reported)


def version(store: Store, name: str) -> int | None:
    """What is known of it."""
    found = store.get(NS, name)
    return None if found is None else int(found["metadata"]["resourceVersion"])


def test_newer_wins_in_any_order(store: Store, reported: Told) -> None:
    store.put(thing("s", 5))
    assert reported.jobs() == {"a"}
    store.put(thing("s", 4))
    store.put(thing("s", 5))
    assert (version(store, "s"), reported.jobs()) == (5, set())
    store.put(thing("s", 6))
    assert (version(store, "s"), reported.jobs()) == (6, {"a"})


def test_objects_are_copies_by_job_and_name(store: Store) -> None:
    for name, job in (("s2", "a"), ("s1", "a"), ("s3", "b")):
        store.put(thing(name, 1, job=job, spec={"x": [1]}))
    assert [each["metadata"]["name"] for each in store.of_job(NS, "a")] == ["s1", "s2"]
    store.get(NS, "s1")["spec"]["x"].append(2)  # type: ignore[index]
    assert store.get(NS, "s1")["spec"] == {"x": [1]}  # type: ignore[index]
    assert store.jobs() == {(NS, "a"), (NS, "b")}


def test_a_label_that_changes_tells_both_jobs(store: Store, reported: Told) -> None:
    store.put(thing("s", 1))
    reported.clear()
    store.put(thing("s", 2, job="b"))
    assert reported.jobs() == {"a", "b"}
    assert store.jobs() == {(NS, "b")}


def test_without_a_label_the_owner_counts(store: Store) -> None:
    owned = thing("s", 1, job="")
    owned["metadata"]["ownerReferences"] = [{"kind": "RLJob", "name": "a", "uid": "j"}]
    store.put(owned)
    assert store.jobs() == {(NS, "a")}


def test_a_deletion(store: Store, reported: Told) -> None:
    store.put(thing("s", 1))
    reported.clear()
    store.remove(thing("s", 2))
    assert (version(store, "s"), reported.jobs()) == (None, {"a"})


def test_a_late_answer_does_not_bring_back_what_is_deleted(store: Store) -> None:
    store.put(thing("s", 1))
    store.remove(thing("s", 7))
    store.put(thing("s", 6))
    assert version(store, "s") is None
    store.put(thing("s", 8, uid="u2"))
    assert version(store, "s") == 8


def test_what_only_lost_its_label_can_be_known_again(store: Store) -> None:
    store.put(thing("s", 1))
    store.remove(thing("s", 7, job=""))
    found = thing("s", 7, job="")
    found["metadata"]["ownerReferences"] = [{"kind": "RLJob", "name": "a", "uid": "j"}]
    store.put(found)
    assert store.jobs() == {(NS, "a")}


def test_a_late_deletion_does_not_hide_what_has_come_in_its_place(store: Store) -> None:
    store.put(thing("s", 1))
    store.put(thing("s", 9, uid="u2"))
    store.remove(thing("s", 7))
    assert version(store, "s") == 9


def test_a_list_finds_deletions_that_nobody_told_of(store: Store, reported: Told) -> None:
    for name in ("gone", "here"):
        store.put(thing(name, 2, job=name))
    epoch = store.begin_list()
    store.put(thing("new", 9, job="new"))  # the answer to a write of ours, while the list is read
    reported.clear()
    store.keep({(NS, "here")}, version=5, epoch=epoch)
    assert [version(store, name) for name in ("gone", "here", "new")] == [None, 2, 9]
    assert reported.jobs() == {"gone"}


def test_a_list_of_one_namespace_says_nothing_of_others(store: Store) -> None:
    store.put(thing("s", 2))
    store.keep(set(), version=5, epoch=store.begin_list(), namespace="other")
    assert version(store, "s") == 2


def test_what_was_deleted_before_versions_fell_can_come_again(store: Store) -> None:
    """A list as of 20 from an etcd that was restored from a backup; what is deleted while it is read stays deleted."""
    store.put(thing("s", 40))
    store.remove(thing("s", 47))
    epoch = store.begin_list()
    store.remove(thing("t", 25))
    store.keep(set(), version=20, epoch=epoch)
    store.put(thing("s", 21))
    store.put(thing("t", 24))
    assert (version(store, "s"), version(store, "t")) == (21, None)


def test_what_the_owner_of_a_job_asks_is_told_apart(store: Store, reported: Told) -> None:
    def job(at: int, generation: int) -> dict[str, Any]:
        found = thing("a", at, job="")
        found |= {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob"}
        found["metadata"]["generation"] = generation
        return found

    store.put(job(1, 1))
    store.put(job(2, 1))
    store.put(job(3, 2))
    assert [is_asked for _, is_asked in reported] == [True, False, True]


def test_field_managers_are_kept_of_pools_alone(store: Store) -> None:
    service, pool = thing("s", 1), thing("p", 1)
    for each in (service, pool):
        each["metadata"]["managedFields"] = [{"manager": "m"}]
    pool |= {"apiVersion": "streamrl.io/v1alpha1", "kind": "GeneratorPool"}
    store.put(service)
    store.put(pool)
    assert "managedFields" not in store.get(NS, "s")["metadata"]  # type: ignore[index]
    assert store.get(NS, "p")["metadata"]["managedFields"] == [{"manager": "m"}]  # type: ignore[index]


# ---- namespaces

KINDS = (RLJOB, POD)


def error(status: int) -> KubeError:
    return from_status("list pods", status, Status(reason="Because", message="it is so"))


def seen(*namespaces: str) -> CacheSync:
    """All is known everywhere."""
    cache_sync = CacheSync(namespaces, KINDS)
    for namespace in namespaces:
        for kind in KINDS:
            cache_sync.listed(namespace, kind)
    return cache_sync


def test_a_namespace_is_whole_when_all_kinds_are_listed() -> None:
    cache_sync = CacheSync(("a", "b"), KINDS)
    assert cache_sync.unready() == "waits for the first list of pods, rljobs"
    cache_sync.listed("a", RLJOB)
    assert not cache_sync.is_whole("a")
    cache_sync.listed("a", POD)
    assert (cache_sync.is_whole("a"), cache_sync.is_whole("b")) == (True, False)
    cache_sync.listed("b", POD)
    assert cache_sync.unready() == "waits for the first list of rljobs"


@pytest.mark.parametrize(
    ("namespace", "status", "refused"),
    [("a", 403, True), ("a", 404, True), ("a", 401, False), ("a", 500, False), ("", 403, False), ("", 404, False)],
)
def test_what_is_a_refusal(namespace: str, status: int, refused: bool) -> None:
    cache_sync = seen(namespace)
    assert cache_sync.is_refused(namespace, POD, error(status)) is refused
    assert cache_sync.is_whole("a") is not refused


def test_a_refused_namespace_is_whole_only_when_all_of_it_is_listed_again() -> None:
    cache_sync = seen("a", "b")
    for kind in KINDS:
        cache_sync.is_refused("a", kind, error(403))
    assert cache_sync.unready() == ""  # the other can be worked on
    cache_sync.listed("a", POD)
    assert not cache_sync.is_whole("a")
    cache_sync.listed("a", RLJOB)
    assert cache_sync.is_whole("a")


def test_the_last_pods_that_were_deleted_as_failed_are_remembered(store: Store) -> None:
    for life in range(10):
        pod = thing("p", 2 * life + 1, uid=f"u{life}", status={"phase": "Pending"})
        store.put(pod)
        store.remove(thing("p", 2 * life + 2, uid=f"u{life}", status={"phase": "Failed" if life else "Running"}))
    assert [pod["metadata"]["uid"] for pod in store.failed_of_job(NS, "a")] == [f"u{life}" for life in range(2, 10)]
    assert (store.failed_of_job(NS, "b"), store.of_job(NS, "a")) == ([], [])
