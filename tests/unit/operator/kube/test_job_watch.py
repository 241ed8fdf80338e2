"""kopf follows the jobs, over real HTTP, against a server that says what an API server says when things go right and wrong."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kopf._cogs.clients import watching as kopf_watching

from streamrl_operator.kube import job_watch
from streamrl_operator.kube.cache import CacheSync, Store
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.job_watch import JobWatch
from streamrl_operator.kube.kinds import API_VERSION, RLJOB
from streamrl_operator.kube.rest_config import RestConfig

DEADLINE_S = 120.0
VERBS = ["get", "list", "watch", "patch"]
FORBIDDEN = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no Role"}
EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
BROKEN = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}


def job(name: str, version: int, *, namespace: str = "n", uid: str = "") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": uid or name, "resourceVersion": str(version)}
    return {"apiVersion": API_VERSION, "kind": RLJOB.kind, "metadata": metadata, "spec": {}}


class ApiServer:
    """Lists what it has; its watches say what they are told to say."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.version = 5
        self.served = True
        self.discovered, self.discoveries = True, 0
        """Whether the kind is among those that the server says it has."""
        self.refused: set[str] = set()
        """Namespaces without a Role."""
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.wanted_token = ""
        self.watches: list[asyncio.Queue[tuple[str, Any]]] = []
        self.watched_namespaces: list[str] = []
        self.job_watches: list[JobWatch] = []
        self.cache_sync = CacheSync((), ())

    def application(self) -> web.Application:
        made = web.Application()
        made.router.add_get("/api", self._answer({"versions": ["v1"]}))
        made.router.add_get("/apis", self._answer({"groups": [self._group(*API_VERSION.split("/"))]}))
        made.router.add_get("/api/v1", self._answer({"resources": [self._resource("Namespace", "namespaces")]}))
        made.router.add_get(f"/apis/{API_VERSION}", self._discover)
        made.router.add_get(RLJOB.path(), self._jobs)
        made.router.add_get(RLJOB.path("{namespace}"), self._jobs)
        return made

    @staticmethod
    def _group(group: str, version: str) -> dict[str, Any]:
        entry = {"groupVersion": f"{group}/{version}", "version": version}
        return {"name": group, "versions": [entry], "preferredVersion": entry}

    @staticmethod
    def _resource(kind: str, plural: str) -> dict[str, Any]:
        return {"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": VERBS}

    def _answer(self, body: Any) -> Callable[[web.Request], Any]:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response(body)

        return answer

    async def _discover(self, _: web.Request) -> web.Response:
        self.discoveries += 1
        found = [self._resource(RLJOB.kind, RLJOB.plural)] if self.discovered else []
        return web.json_response({"resources": found})

    async def _jobs(self, request: web.Request) -> web.StreamResponse:
        namespace = request.match_info.get("namespace", "")
        self.asked.append(("watch " if "watch" in request.query else "list ") + namespace)
        self.tokens.add(request.headers.get("Authorization", ""))
        if self.wanted_token and request.headers.get("Authorization") != f"Bearer {self.wanted_token}":
            return web.json_response({"kind": "Status", "code": 401, "reason": "Unauthorized"}, status=401)
        if namespace in self.refused:
            return web.json_response(FORBIDDEN, status=403)
        if not self.served:
            return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)
        if "watch" not in request.query:
            items = [one for one in self.objects if namespace in ("", one["metadata"]["namespace"])]
            begin = int(request.query.get("continue") or 0)
            end = begin + int(request.query["limit"])
            more = str(end) if end < len(items) else ""
            metadata = {"resourceVersion": str(self.version), "continue": more}
            return web.json_response({"metadata": metadata, "items": items[begin:end]})
        said: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.watches.append(said)
        self.watched_namespaces.append(namespace)
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            kind, obj = await said.get()
            await reply.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")
            if kind == "ERROR":
                return reply

    def happens(self, watch: asyncio.Queue[tuple[str, Any]], kind: str, obj: dict[str, Any]) -> None:
        """A change that the watch tells of, and that every later list has."""
        others = [one for one in self.objects if one["metadata"]["name"] != obj["metadata"]["name"]]
        self.objects = others if kind == "DELETED" else [*others, obj]
        self.version = int(obj["metadata"]["resourceVersion"])
        watch.put_nowait((kind, obj))

    async def watched(self, count: int) -> asyncio.Queue[tuple[str, Any]]:
        """The watch of this number, once it is there."""
        await until(lambda: len(self.watches) >= count, what=f"watch {count}; {self.asked}")
        return self.watches[count - 1]


async def until(check: Callable[[], bool], *, what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not check():  # noqa: ASYNC110 - a poll with a deadline: what is awaited sets no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE_S:g} s for {what}") from None


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    yield ApiServer()


@asynccontextmanager
async def following(api: ApiServer, *namespaces: str, token: str | None = None) -> AsyncIterator[Store]:
    """A store that is kept equal to what the server has."""
    server = TestServer(api.application())
    await server.start_server(shutdown_timeout=0.1)
    access = RestConfig(server=str(server.make_url("")).rstrip("/"), tls=None, token=token)
    store = Store(lambda *_: None)
    async with Client(access) as client:
        cache_sync = api.cache_sync = CacheSync(namespaces or ("",), (RLJOB,))
        api.job_watches = [
            JobWatch(client=client, store=store, cache_sync=cache_sync, namespace=each)
            for each in cache_sync.namespaces
        ]
        tasks = [asyncio.ensure_future(each.run()) for each in api.job_watches]
        try:
            yield store
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await server.close()
    assert not cache_sync.unready()
    await until(lambda: "kopf" not in {one.name for one in threading.enumerate()}, what="the end of kopf's thread")


async def holds(store: Store, **versions: int) -> None:
    """Wait until the store has these jobs, and no others."""

    def known() -> dict[str, int]:
        found = {key: store.get(*key) for key in store.jobs()}
        return {name: int(one["metadata"]["resourceVersion"]) for (_, name), one in found.items() if one}

    try:
        await until(lambda: known() == versions, what=f"{versions}")
    except AssertionError as error:
        raise AssertionError(f"{error}; got {known()}") from None


async def test_what_is_there_and_what_changes(api: ApiServer) -> None:
    api.objects = [job("a", 1), job("b", 2)]
    async with following(api) as store:
        await holds(store, a=1, b=2)
        watch = await api.watched(1)
        for event in (("MODIFIED", job("a", 6)), ("DELETED", job("b", 7)), ("ADDED", job("c", 8))):
            api.happens(watch, *event)
        await holds(store, a=6, c=8)


async def test_a_deletion_in_a_gap_is_found_when_kopf_lists_again(api: ApiServer) -> None:
    api.objects = [job("a", 1), job("b", 2)]
    async with following(api) as store:
        await holds(store, a=1, b=2)
        watch = await api.watched(1)
        api.objects, api.version = [job("b", 2)], 9
        watch.put_nowait(("ERROR", EXPIRED))
        await holds(store, b=2)


async def test_the_last_job_gone_without_a_word_is_found_when_somebody_doubts(api: ApiServer) -> None:
    """A list that has become empty gives no event of kopf's."""
    api.objects = [job("a", 1)]
    async with following(api) as store:
        await holds(store, a=1)
        await until(lambda: api.asked.count("list ") == 3, what="kopf's list, and ours before and after it")
        api.objects, api.version = [], 9
        (await api.watched(1)).put_nowait(("ERROR", EXPIRED))
        await api.watched(2)
        await holds(store, a=1)
        api.job_watches[0].doubt()
        await holds(store)


async def test_an_error_that_ends_kopf_begins_it_again(api: ApiServer) -> None:
    api.objects = [job("a", 1)]
    async with following(api) as store:
        await holds(store, a=1)
        watch = await api.watched(1)
        api.objects, api.version = [job("c", 8)], 9
        watch.put_nowait(("ERROR", BROKEN))
        await holds(store, c=8)
        api.happens(await api.watched(2), "MODIFIED", job("c", 10))
        await holds(store, c=10)


async def test_jobs_that_are_large_together_are_listed_and_followed(api: ApiServer) -> None:
    names = [f"j{number}" for number in range(70)]
    api.objects = [job(name, 1) for name in names]
    for each in api.objects:
        each["metadata"]["annotations"] = {"a": "x" * (256 * 1024 - 1)}
    async with following(api) as store:
        api.happens(await api.watched(1), "ADDED", job("new", 8))
        await holds(store, **dict.fromkeys(names, 1), new=8)


async def test_an_event_that_is_too_long_for_kopf_is_told(api: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    async with following(api) as store:
        watch = await api.watched(1)
        endless = job("a", 6)
        endless["spec"] = {"a": "x" * 17 * 2**20}
        api.objects, api.version = [job("c", 8)], 9
        watch.put_nowait(("ADDED", endless))
        api.happens(await api.watched(2), "MODIFIED", job("c", 10))
        await holds(store, c=10)
    reported = [each.__dict__["error"] for each in caplog.records if each.message == "watch failed"]
    assert len(reported) == 1
    assert "it has ended: " in reported[0]
    assert "it has more than 16777216 bytes" in reported[0]


async def test_a_kind_that_is_not_served_yet_is_waited_for(api: ApiServer) -> None:
    api.served, api.objects = False, [job("a", 1)]
    async with following(api) as store:
        await until(lambda: len(api.asked) >= 2, what="a second attempt")
        assert not store.jobs()
        api.served = True
        await holds(store, a=1)
        api.happens(await api.watched(1), "MODIFIED", job("a", 6))
        await holds(store, a=6)


async def test_only_its_own_namespaces(api: ApiServer) -> None:
    api.objects = [job("a", 1, namespace="n"), job("b", 2, namespace="m"), job("c", 3, namespace="other")]
    async with following(api, "n", "m") as store:
        await holds(store, a=1, b=2)
        await api.watched(2)
    assert {one.split()[-1] for one in api.asked} == {"n", "m"}


async def test_a_namespace_without_rights_keeps_no_other_waiting(api: ApiServer) -> None:
    api.refused = {"m"}
    api.objects = [job("a", 1, namespace="n"), job("b", 2, namespace="m"), job("c", 3, namespace="o")]
    async with following(api, "m", "n", "o") as store:
        await holds(store, a=1, c=3)
        await api.watched(2)
        assert sorted(api.watched_namespaces) == ["n", "o"]  # kopf would end with every attempt at the third
        assert [api.cache_sync.is_whole(each) for each in ("m", "n", "o")] == [False, True, True]
        api.refused = set()
        await holds(store, a=1, b=2, c=3)
        await until(lambda: "m" in api.watched_namespaces, what="kopf to watch the third too")


async def test_a_namespace_that_is_lost_is_clean_and_the_others_go_on(api: ApiServer) -> None:
    api.objects = [job("a", 1, namespace="n"), job("b", 2, namespace="m")]
    async with following(api, "m", "n") as store:
        await holds(store, a=1, b=2)
        await api.watched(2)
        theirs = api.watched_namespaces.index("n")
        api.refused = {"m"}
        api.watches[1 - theirs].put_nowait(("ERROR", EXPIRED))
        await until(lambda: not api.cache_sync.is_whole("m"), what="the loss to be seen")
        api.happens(api.watches[theirs], "ADDED", job("c", 8, namespace="n"))
        await holds(store, a=1, b=2, c=8)
        assert sorted(api.watched_namespaces) == ["m", "n"], "nobody began the other's watch again"


async def test_a_kopf_that_follows_nothing_is_replaced(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds no such kind, say, since an API server that was begun again does not tell of it yet; and it asks no more."""
    monkeypatch.setattr(job_watch, "SILENT_S", 1.0)
    api.discovered, api.objects = False, [job("a", 1)]
    async with following(api) as store:
        await until(lambda: api.discoveries > 0, what="kopf to look for the kind")
        await holds(store, a=1)
        api.objects, api.discovered = [job("a", 1), job("b", 6)], True
        await holds(store, a=1, b=6)


async def test_a_kopf_that_does_not_end_keeps_no_other_from_its_work(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation that comes while a watch begins again is lost in kopf: it is told twice."""
    monkeypatch.setattr(job_watch, "_STOP_S", 0.2)
    begin, deaf = kopf_watching.continuous_watch, [True]

    async def hears_no_cancellation(**given: Any) -> AsyncIterator[Any]:
        try:
            async for each in begin(**given):
                yield each
        except asyncio.CancelledError:
            if not deaf:
                raise
            deaf.clear()
            await asyncio.Event().wait()

    monkeypatch.setattr(kopf_watching, "continuous_watch", hears_no_cancellation)
    api.objects = [job("a", 1)]
    async with following(api) as store:
        await holds(store, a=1)
        await api.watched(1)
        api.refused, api.served = {""}, False
        api.job_watches[0].doubt()
        await until(lambda: not deaf, what="the end of the first kopf")
        api.refused, api.served = set(), True
        api.happens(await api.watched(2), "ADDED", job("c", 8))
        await holds(store, a=1, c=8)


async def test_no_namespace_may_be_seen(api: ApiServer) -> None:
    api.refused, api.objects = {"n"}, [job("a", 1)]
    async with following(api, "n") as store:
        await until(lambda: len(api.asked) >= 3, what="attempts")
        assert api.cache_sync.unready().startswith(
            "no namespace may be seen: list /apis/streamrl.io/v1alpha1/namespaces/n"
        )
        assert not api.watches
        api.refused = set()
        await holds(store, a=1)


async def test_kopf_shows_who_we_are(api: ApiServer) -> None:
    api.wanted_token = "secret"
    async with following(api, token="secret") as store:
        await api.watched(1)
        await holds(store)
    assert api.tokens == {"Bearer secret"}


async def test_a_server_that_goes_away_and_comes_back(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_watch, "COMPARE_S", 0.05)
    api.objects = [job("a", 1)]
    async with following(api) as store:
        await holds(store, a=1)
        await api.watched(1)
        api.served = False
        for watch in api.watches:
            watch.put_nowait(("ERROR", EXPIRED))
        await until(lambda: api.asked[-2:] == ["list ", "list "], what="attempts")
        api.served, api.objects, api.version = True, [job("b", 12)], 15
        await holds(store, b=12)
