"""Whose an object is: found under a name that a job would use, by HTTP, before anything of it is written."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from streamrl import names
from streamrl_operator.kube.answers import KubeError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import CHILDREN, RLJOB
from streamrl_operator.kube.rest_config import RestConfig
from support.api_server import client_of

UID = "u-2"


def obj(kind: str, *, uid: str = UID, owner: str | None = None, job: str | None = "j") -> dict[str, Any]:
    """An object of job `j`, or of somebody who says so."""
    labels = {names.LABEL_JOB_UID: uid} | ({} if job is None else {names.LABEL_JOB: job})
    metadata = {"name": "x", "namespace": "n", "uid": "u-x", "resourceVersion": "1", "labels": labels}
    owners = [] if owner is None else [{"kind": "RLJob", "name": "j", "uid": owner, "controller": True}]
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata | ({"ownerReferences": owners} if owners else {})}


@pytest.fixture
async def there() -> dict[str, Any]:
    return {}


@pytest.fixture
async def cluster(there: dict[str, Any]) -> AsyncIterator[CachedCluster]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(there)

    async with client_of(answer) as client:
        yield CachedCluster(client, changed=lambda *_: None)


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
    cluster: CachedCluster, there: dict[str, Any], found: dict[str, Any], wanted: dict[str, Any]
) -> None:
    there |= found
    assert await cluster.find(wanted, owner_uid=UID) == found


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
    cluster: CachedCluster, there: dict[str, Any], found: dict[str, Any], wanted: dict[str, Any]
) -> None:
    there |= found
    with pytest.raises(NameTakenError):
        await cluster.find(wanted, owner_uid=UID)


def named(name: str, *, owner: str = UID) -> dict[str, Any]:
    """A Secret of that name."""
    made = obj("Secret", owner=owner)
    return made | {"metadata": made["metadata"] | {"name": name}}


ANSWERS = {"ours": named("ours"), "foreign": named("foreign", owner="u-1"), "absent": None}


async def answered(request: web.Request, asked: asyncio.Semaphore, all_asked: asyncio.Event) -> web.Response:
    """Only when all that is asked for at once has arrived."""
    await asked.acquire()
    if asked.locked():
        all_asked.set()
    await all_asked.wait()
    name = request.path.rpartition("/")[2]
    if name == "broken":
        return web.json_response({"code": 500, "reason": "InternalError"}, status=500)
    found = ANSWERS[name]
    refusal = {"code": 404, "reason": "NotFound"}
    return web.json_response(found or refusal, status=200 if found else 404)


@pytest.fixture
async def waiting(request: pytest.FixtureRequest) -> AsyncIterator[CachedCluster]:
    """A cluster whose API server answers no read before so many have come."""
    asked, all_asked = asyncio.Semaphore(request.param), asyncio.Event()

    async def answer(each: web.Request) -> web.Response:
        return await answered(each, asked, all_asked)

    async with client_of(answer, timeout_s=60.0) as client:
        yield CachedCluster(client, changed=lambda *_: None)


@pytest.mark.parametrize("waiting", [3], indirect=True)
async def test_what_is_not_known_is_asked_for_at_once(waiting: CachedCluster) -> None:
    ours, foreign, absent = await waiting.find_all([named(name) for name in ANSWERS], owner_uid=UID)
    assert (ours, absent) == (named("ours"), None)
    assert isinstance(foreign, NameTakenError)


@pytest.mark.parametrize("waiting", [2], indirect=True)
async def test_a_read_that_fails_ends_it(waiting: CachedCluster) -> None:
    with pytest.raises(KubeError):
        await waiting.find_all([named("ours"), named("broken")], owner_uid=UID)


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
