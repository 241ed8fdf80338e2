"""Whose an object is: found under a name that a job would use, by HTTP, before anything of it is written."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamrl import names
from streamrl_operator.apply import Ownership, keep
from streamrl_operator.kube.answers import ConflictError, KubeError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import CHILDREN, CLAIM, IN_MEMBERS, RLJOB, Kind
from streamrl_operator.kube.rest_config import RestConfig
from support.api_server import ApiServer

UID = "u-2"


def obj(kind: str, *, uid: str = UID, owner: str | None = None, job: str | None = "j") -> dict[str, Any]:
    """An object of job `j`, or of somebody who says so."""
    labels = {names.LABEL_JOB_UID: uid} | ({} if job is None else {names.LABEL_JOB: job})
    metadata = {"name": "x", "namespace": "n", "uid": "u-x", "resourceVersion": "1", "labels": labels}
    owners = [] if owner is None else [{"kind": "RLJob", "name": "j", "uid": owner, "controller": True}]
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata | ({"ownerReferences": owners} if owners else {})}


PATH = "/api/v1/namespaces/n/{}/x"
PLURALS = {"Secret": "secrets", "PersistentVolumeClaim": "persistentvolumeclaims"}


@pytest.fixture
def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def cluster(server: ApiServer) -> AsyncIterator[CachedCluster]:
    async with server.client() as client:
        yield CachedCluster(client, changed=lambda *_: None)


def there(server: ApiServer, found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Put an object there that the operator does not know of; its path, and as it is kept."""
    path = PATH.format(PLURALS[found["kind"]])
    return path, server.put(path, found)


KEEPS, LOSES = None, UID
"""Owner of the claim that the job wants: one that is kept has none."""


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (obj("Secret", owner=UID), obj("Secret", owner=UID)),
        (obj("Secret", owner=UID, job=None), obj("Secret", owner=UID)),
        (obj("Secret"), obj("Secret", owner=UID)),
        (obj("PersistentVolumeClaim", uid="u-1"), obj("PersistentVolumeClaim", owner=KEEPS)),
    ],
    ids=["owned", "without our label", "somebody took the owner", "kept by an earlier job"],
)
async def test_takes_what_is_its_own(
    cluster: CachedCluster, server: ApiServer, found: dict[str, Any], wanted: dict[str, Any]
) -> None:
    path, kept = there(server, found)
    assert await cluster.find_or_make(wanted, owner_uid=UID) == kept == server.objects[path]
    assert cluster.find(wanted, owner_uid=UID) == kept, "it is known from now on"


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (obj("Secret", owner="u-1"), obj("Secret", owner=UID)),
        (obj("Secret", uid="u-1"), obj("Secret", owner=UID)),
        (obj("Secret", job="k"), obj("Secret", owner=UID)),
        (obj("PersistentVolumeClaim", uid="u-1"), obj("PersistentVolumeClaim", owner=LOSES)),
        (obj("PersistentVolumeClaim", uid="u-1", job=None), obj("PersistentVolumeClaim", owner=KEEPS)),
    ],
    ids=[
        "owned by another",
        "a CA made ready for us",
        "another job's",
        "kept, and would go with us",
        "anybody's claim",
    ],
)
async def test_leaves_the_rest_alone(
    cluster: CachedCluster, server: ApiServer, found: dict[str, Any], wanted: dict[str, Any]
) -> None:
    path, kept = there(server, found)
    for _ in range(2):
        with pytest.raises(NameTakenError):
            await cluster.find_or_make(wanted, owner_uid=UID)
    assert server.objects[path] == kept
    assert cluster.find(wanted, owner_uid=UID) is None, "no watch tells when it goes"


async def test_a_claim_that_the_job_has_kept_in_a_member_is_its_own(cluster: CachedCluster, server: ApiServer) -> None:
    """All that it has there is its anchor's."""
    _, kept = there(server, obj("PersistentVolumeClaim"))
    assert await cluster.find_or_make(obj("PersistentVolumeClaim", owner="u-anchor"), owner_uid="u-anchor") == kept


async def test_what_nobody_has_is_made_without_asking(cluster: CachedCluster, server: ApiServer) -> None:
    wanted = obj("Secret", owner=UID)
    made = await cluster.find_or_make(wanted, owner_uid=UID)
    assert (made, server.reads) == (server.objects[PATH.format("secrets")], [])
    assert await cluster.find_or_make(wanted, owner_uid=UID) == made, "it is known"
    assert len(server.writes) == 1


async def test_what_is_gone_again_is_clean_to_the_next_look(cluster: CachedCluster, server: ApiServer) -> None:
    server.refuse = lambda *_: (409, "it exists")
    with pytest.raises(ConflictError):
        await cluster.find_or_make(obj("Secret", owner=UID), owner_uid=UID)


@pytest.mark.parametrize(
    ("meanwhile", "told"), [({}, 0), ({"spec": {"suspend": True}}, 1), ({"metadata": {"annotations": {"a": "b"}}}, 1)]
)
async def test_our_own_status_makes_nobody_look_unless_more_has_changed(
    server: ApiServer, meanwhile: dict[str, Any], told: int
) -> None:
    changed: list[object] = []
    path, job = RLJOB.path("n", "x"), obj("RLJob") | {"apiVersion": RLJOB.api_version, "spec": {}}
    async with server.client() as client:
        cluster = CachedCluster(client, lambda key, _: changed.append(key))
        cluster.job_watches[""].store.put(server.put(path, job))
        changed.clear()
        metadata = job["metadata"] | meanwhile.get("metadata", {})
        server.put(path, {**job, **meanwhile, "metadata": metadata})
        about = {name: job["metadata"][name] for name in ("name", "namespace", "uid")}
        await cluster.apply({**job, "metadata": about, "status": {"step": 3}}, subresource="status")
    assert len(changed) == told
    assert (cluster.known(RLJOB, "n", "x") or {})["status"] == {"step": 3}


async def test_what_waited_for_its_namespace_is_looked_at_when_all_of_it_is_known() -> None:
    changed: list[tuple[tuple[str, str], bool]] = []
    async with Client(RestConfig(server="http://127.0.0.1:1", tls=None)) as client:
        cluster = CachedCluster(client, lambda key, is_asked: changed.append((key, is_asked)), namespaces=("n", "m"))
    for namespace in ("n", "m"):
        found = obj("RLJob")
        metadata = found["metadata"] | {"namespace": namespace}
        cluster.job_watches[namespace].store.put(found | {"apiVersion": RLJOB.api_version, "metadata": metadata})
    changed.clear()
    for kind in (RLJOB, *CHILDREN):
        assert not cluster.cache_sync.is_whole("n")
        cluster.cache_sync.listed("n", kind)
    assert cluster.cache_sync.is_whole("n")
    assert changed == [(("n", "x"), True)]


@pytest.mark.parametrize("kinds", [CHILDREN, IN_MEMBERS], ids=["claims are followed", "claims are not"])
async def test_a_claim_that_outlives_its_job_has_no_owner_whether_claims_are_followed_or_not(
    server: ApiServer, kinds: tuple[Kind, ...]
) -> None:
    path, claim = there(server, obj("PersistentVolumeClaim", owner="u-anchor"))
    owner = Ownership(namespace="n", job="j", uid="u-anchor")
    async with server.client() as client:
        cluster = CachedCluster(client, lambda *_: None, kinds=kinds)
        if cluster.has(CLAIM):
            cluster._stores[CLAIM].put(claim)
        await keep(cluster, ["x", "gone"], owner=owner)
    assert "ownerReferences" not in server.objects[path]["metadata"]


async def test_what_owns_a_claim_does_not_go_while_nobody_tells_of_the_claim() -> None:
    async with Client(RestConfig(server="http://127.0.0.1:1", tls=None)) as client:
        cluster = CachedCluster(client, lambda *_: None, kinds=IN_MEMBERS)
        with pytest.raises(KubeError):
            await keep(cluster, ["x"], owner=Ownership(namespace="n", job="j", uid="u-anchor"))
