"""The campaigns' proxy between the operator's own client and a small HTTP server: what is numbered, and each kind of harm."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from cluster.campaign import faults
from cluster.campaign.proxy import Fault, Proxy, Reply, upstream
from streamrl_operator.kube.answers import ConflictError, ExpiredError, KubeError, UnavailableError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.kinds import CONFIG_MAP, EVENT, LEASE, POD, Kind
from streamrl_operator.kube.rest_config import RestConfig

NAMESPACE = "space"


@dataclass
class Server:
    """Counts what arrives; its lists and watches hold as many objects as it was told."""

    arrived: list[str] = field(default_factory=list)
    objects: int = 3
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether the watch may tell more than its first event."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.arrived.append(f"{request.method} {request.path}")
        if request.query.get("watch"):
            return await self._watch(request)
        if request.method == "GET":
            return web.json_response(
                {"items": [_object(n) for n in range(self.objects)], "metadata": {"resourceVersion": "9"}}
            )
        return web.json_response(_object(0, kind=_kind_of(request.path)))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(self.objects):
            await response.write(json.dumps({"type": "ADDED", "object": _object(number, kind=POD)}).encode() + b"\n")
            await self.told.wait()
        return response


def _kind_of(path: str) -> Kind:
    return next(kind for kind in (CONFIG_MAP, EVENT, LEASE, POD) if f"/{kind.plural}" in path)


def _object(number: int, *, kind: Kind | None = None) -> dict[str, Any]:
    stamp = {} if kind is None else {"apiVersion": kind.api_version, "kind": kind.kind}
    metadata = {"name": f"n{number}", "namespace": NAMESPACE, "resourceVersion": str(number), "uid": "u"}
    return stamp | {"metadata": metadata}


@dataclass
class Setting:
    server: Server
    proxy: Proxy
    client: Client

    async def write(self, kind: Any = CONFIG_MAP) -> None:
        await self.client.apply(kind, _object(0), manager="m")

    async def listed(self) -> int:
        return sum([len(items) async for items, _ in self.client.list(POD, namespace=NAMESPACE)])

    async def watched(self) -> list[str]:
        events = self.client.watch(POD, version="1", duration_s=5, namespace=NAMESPACE)
        return [event["metadata"]["name"] async for _, event in events]


@pytest_asyncio.fixture
async def setting() -> AsyncIterator[Setting]:
    server = Server()
    runner = web.ServerRunner(web.Server(server.answer))  # type: ignore[arg-type]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with upstream(RestConfig(server=f"http://127.0.0.1:{runner.addresses[0][1]}", tls=None)) as behind:
        proxy = Proxy(behind)
        async with Client(RestConfig(server=await proxy.start(), tls=None)) as client:
            yield Setting(server, proxy, client)
        server.told.set()
        await proxy.close()
    await runner.cleanup()


async def test_writes_are_numbered_from_the_mark_but_leases_and_events(setting: Setting) -> None:
    await setting.write()
    setting.proxy.mark()
    await setting.write()
    await setting.write(LEASE)
    await setting.client.create(EVENT, _object(0))
    await setting.listed()
    await setting.client.delete(POD, namespace=NAMESPACE, name="n0", uid="u")
    assert [(call.number, call.text) for call in setting.proxy.writes] == [
        (1, "PATCH configmaps n0"),
        (2, "DELETE pods n0"),
    ]
    assert setting.proxy.events == 1
    assert len(setting.server.arrived) == 6


@pytest.mark.parametrize(("has_answer", "arrived", "answered"), [(False, 2, 1), (True, 2, 2)])
async def test_death_at_a_write(setting: Setting, *, has_answer: bool, arrived: int, answered: int) -> None:
    deaths: list[int] = []
    setting.proxy.faults = (faults.KillAt(2, lambda: deaths.append(1), has_answer=has_answer),)
    done = 0
    for _ in range(4):
        try:
            await setting.write()
            done += 1
        except UnavailableError as error:
            assert error.status == 0
    assert (len(deaths), len(setting.server.arrived), done) == (1, arrived, answered)


async def test_a_lost_answer_is_of_a_write_that_was_done(setting: Setting) -> None:
    setting.proxy.faults = (faults.LoseReply(1),)
    with pytest.raises(UnavailableError):
        await setting.write()
    await setting.write()
    assert len(setting.server.arrived) == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (409, ConflictError),
        (410, ExpiredError),
        (429, UnavailableError),
        (500, UnavailableError),
        (503, UnavailableError),
    ],
)
async def test_a_refused_write_is_not_done(setting: Setting, status: int, error: type[KubeError]) -> None:
    setting.proxy.faults = (faults.RefuseAt(1, status),)
    with pytest.raises(error) as told:
        await setting.write()
    assert (setting.server.arrived, told.value.retry_after_s) == ([], 1.0 if status == 429 else None)
    await setting.write()


async def test_a_share_is_refused(setting: Setting) -> None:
    setting.proxy.faults = (faults.RefuseShare(50, [409, 410, 500], random.Random(1)),)
    refused = 0
    for _ in range(60):
        try:
            await setting.listed()
        except UnavailableError as error:  # a list has no conflict and goes on from nowhere
            refused += error.status == 500
    assert 15 < refused < 45
    assert len(setting.server.arrived) == 60 - refused


async def test_watches_pass_as_they_come(setting: Setting) -> None:
    setting.server.told.set()
    assert await setting.watched() == ["n0", "n1", "n2"]


HARM: dict[str, tuple[Callable[[], Fault], type[KubeError]]] = {
    "events are lost, then 410": (lambda: faults.Swallow(100, random.Random(1)), ExpiredError),
    "it is cut": (lambda: faults.CloseWatches(100, random.Random(1)), UnavailableError),
    "410 at once": (lambda: faults.ExpireWatches(100, random.Random(1)), ExpiredError),
    "410 as an event": (lambda: faults.ExpireWatches(100, random.Random(0)), ExpiredError),
}


@pytest.mark.parametrize("harm", HARM)
async def test_watches_come_to_harm(setting: Setting, harm: str) -> None:
    make, error = HARM[harm]
    setting.proxy.faults = (make(),)
    with pytest.raises(error):
        await setting.watched()


async def test_events_are_late(setting: Setting) -> None:
    setting.server.told.set()
    setting.proxy.faults = (faults.Delay(0.1),)
    begun_s = asyncio.get_running_loop().time()
    assert await setting.watched() == ["n0", "n1", "n2"]
    assert asyncio.get_running_loop().time() >= begun_s + 0.3


async def test_a_list_of_the_past_is_told_once(setting: Setting) -> None:
    old = Reply(status=200, body=json.dumps({"items": [_object(7)], "metadata": {"resourceVersion": "1"}}).encode())
    setting.proxy.faults = (faults.StaleLists({POD.path(NAMESPACE): old}, 0.0),)
    assert (await setting.listed(), await setting.listed()) == (1, 3)


async def test_nobody_answers_for_a_while(setting: Setting) -> None:
    setting.proxy.faults = (faults.Stopped(0.3),)
    with pytest.raises(UnavailableError):
        await setting.listed()
    async with asyncio.timeout(5):
        while True:
            try:
                assert await setting.listed() == 3
                break
            except UnavailableError:
                await asyncio.sleep(0.02)


async def test_open_watches_can_be_cut(setting: Setting) -> None:
    told = []
    with pytest.raises(UnavailableError):
        async for _, event in setting.client.watch(POD, version="1", duration_s=5, namespace=NAMESPACE):
            told.append(event["metadata"]["name"])
            setting.proxy.cut_all()
    assert told == ["n0"]
