"""Client and reflector over real HTTP, against a server that answers by a script: what an API server says when things go wrong."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from streamrl_operator.kube.answers import (
    ConflictError,
    ExpiredError,
    ForbiddenError,
    KubeError,
    NotFoundError,
    RequestRefusedError,
    UnavailableError,
)
from streamrl_operator.kube.cache import CacheSync, Reflector, Store
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.kinds import RESOURCE_FLAVOR, SERVICE, WORKLOAD, Kind
from streamrl_operator.kube.rest_config import RestConfig
from support.api_server import client_of

DEADLINE_S = 120.0
Answers = list[Callable[[web.Request], Any]]


def service(name: str, version: int, **more: Any) -> dict[str, Any]:
    """As an API server has it."""
    metadata = {"name": name, "namespace": "n", "uid": name, "resourceVersion": str(version)}
    metadata["labels"] = {"streamrl.io/job": "j"}  # type: ignore[assignment]
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, **more}


def status(code: int, **more: Any) -> Callable[[web.Request], web.Response]:
    """A refusal."""
    body = {"kind": "Status", "code": code, "reason": "Because", "message": "no\n such  thing", **more}
    return lambda _: web.json_response(body, status=code)


def listed(version: int, *items: dict[str, Any], more: str = "") -> Callable[[web.Request], web.Response]:
    """A page of a list."""
    metadata = {"resourceVersion": str(version), "continue": more}
    bare = [{key: value for key, value in item.items() if key not in ("apiVersion", "kind")} for item in items]
    return lambda _: web.json_response({"metadata": metadata, "items": bare})


def watched(*events: tuple[str, Any], stay: bool = False) -> Callable[[web.Request], Any]:
    """Events of a watch; it ends after them, or stays open."""

    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for kind, obj in events:
            text = json.dumps({"type": kind, "object": obj}).encode() + b"\n"
            for start in range(0, len(text), 50_000):
                await reply.write(text[start : start + 50_000])
        if stay:
            await asyncio.sleep(3600)
        return reply

    return answer


class Script:
    """Answers in turn; remembers what was asked."""

    def __init__(self) -> None:
        self.answers: Answers = []
        self.asked: list[str] = []
        self.over = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        self.asked.append(f"watch {query['resourceVersion']}" if "watch" in query else query.get("continue", "list"))
        if not self.answers:
            self.over.set()
            await asyncio.sleep(3600)
        answer = self.answers.pop(0)(request)
        found: web.StreamResponse = await answer if asyncio.iscoroutine(answer) else answer
        return found


@pytest.fixture
async def script() -> Script:
    return Script()


@pytest.fixture
async def client(script: Script) -> AsyncIterator[Client]:
    async with client_of(script.answer) as made:
        yield made


NOT_IN_SCHEMA = "failed to create typed patch object (n/x; apps/v1): .spec.nonsense: field not declared in schema"


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (404, "no\n such  thing", NotFoundError),
        (409, "the object has been modified", ConflictError),
        (410, "too old resource version", ExpiredError),
        (429, "too many requests", UnavailableError),
        (500, "etcdserver: leader changed", UnavailableError),
        (500, NOT_IN_SCHEMA, RequestRefusedError),
        (503, "apiserver not ready", UnavailableError),
        (422, "spec.replicas: Invalid value", RequestRefusedError),
        (403, "not allowed", ForbiddenError),
    ],
)
async def test_errors_say_whether_asking_again_can_help(
    client: Client, script: Script, code: int, message: str, kind: type[KubeError]
) -> None:
    script.answers = [status(code, message=message, details={"retryAfterSeconds": 3})]
    with pytest.raises(kind) as caught:
        await client.get(SERVICE, namespace="n", name="s")
    assert (caught.value.status, caught.value.reason, caught.value.retry_after_s) == (code, "Because", 3.0)
    assert type(caught.value) is kind
    assert str(caught.value) == f"get /api/v1/namespaces/n/services/s: {code} Because: {' '.join(message.split())}"


async def test_an_answer_that_is_no_json(client: Client, script: Script) -> None:
    script.answers = [lambda _: web.Response(text="<html>", status=502), lambda _: web.Response(text="<html>")]
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await client.get(SERVICE, namespace="n", name="s")


async def test_nobody_there() -> None:
    async with Client(RestConfig(server="http://127.0.0.1:1", tls=None)) as client:
        with pytest.raises(UnavailableError, match="get /api/v1/namespaces/n/services/s: no answer Unreachable"):
            await client.get(SERVICE, namespace="n", name="s")


async def test_no_answer_in_time(client: Client, script: Script) -> None:
    with pytest.raises(UnavailableError, match=r"within 0\.2 s"):
        await client.read_page(namespace="n", service="s", port="signals", page="numbers", timeout_s=0.2)


async def reflect(client: Client, script: Script, *answers: Callable[[web.Request], Any], **given: Any) -> Store:
    """What a reflector knows when the script has ended."""
    return (await reflector_after(client, script, *answers, **given)).store


async def reflector_after(
    client: Client,
    script: Script,
    *answers: Callable[[web.Request], Any],
    namespace: str = "",
    cache_sync: CacheSync | None = None,
    kind: Kind = SERVICE,
) -> Reflector:
    """Run a reflector until the script has ended."""
    script.answers = list(answers)
    store = Store(lambda _key, _asked: None)
    cache_sync = cache_sync or CacheSync((namespace,), (kind,))
    reflector = Reflector(client=client, kind=kind, store=store, cache_sync=cache_sync, namespace=namespace)
    task = asyncio.ensure_future(reflector.run())
    try:
        await asyncio.wait_for(script.over.wait(), DEADLINE_S)
    finally:
        task.cancel()
        await asyncio.wait((task,))
    assert cache_sync.is_whole("n")
    return reflector


def known(store: Store) -> dict[str, int]:
    """Versions by name."""
    return {each["metadata"]["name"]: int(each["metadata"]["resourceVersion"]) for each in store.of_job("n", "j")}


async def test_lists_page_by_page_and_follows(client: Client, script: Script) -> None:
    store = await reflect(
        client,
        script,
        listed(5, service("a", 1), more="page2"),
        listed(5, service("b", 2), service("c", 3)),
        watched(("MODIFIED", service("a", 6)), ("DELETED", service("b", 7)), ("ADDED", service("d", 8))),
    )
    assert script.asked == ["list", "page2", "watch 5", "watch 8"]
    assert known(store) == {"a": 6, "c": 3, "d": 8}


async def test_objects_of_any_size(client: Client, script: Script) -> None:
    large = service("a", 6, spec={"text": "x" * 1_400_000})
    store = await reflect(client, script, listed(5), watched(("ADDED", large), ("ADDED", service("b", 7))))
    assert known(store) == {"a": 6, "b": 7}
    assert store.get("n", "a") == large


async def test_a_deletion_in_a_gap_is_found_by_the_next_list(client: Client, script: Script) -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    store = await reflect(
        client,
        script,
        listed(5, service("a", 1), service("b", 2)),
        watched(("ERROR", gone)),
        listed(9, service("b", 2)),
    )
    assert script.asked == ["list", "watch 5", "list", "watch 9"]
    assert known(store) == {"b": 2}


@pytest.mark.parametrize("newest", [20, 60], ids=["below what was known", "above it again"])
async def test_a_list_wins_where_versions_fell(client: Client, script: Script, newest: int) -> None:
    """As after a restore of etcd from a backup: other objects, with versions that were there before."""
    broken = {"kind": "Status", "code": 504, "reason": "Timeout", "message": "Too large resource version"}
    store = await reflect(
        client,
        script,
        listed(50, service("lost", 30), service("older", 41), service("deleted", 42)),
        watched(("DELETED", service("deleted", 51)), ("ERROR", broken)),
        listed(newest, service("older", 12), service("new", 13), service("deleted", 14)),
        watched(("MODIFIED", service("new", newest + 1))),
    )
    assert known(store) == {"older": 12, "new": newest + 1, "deleted": 14}


async def test_any_other_error_in_a_watch_lists_again(client: Client, script: Script) -> None:
    broken = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}
    await reflect(client, script, listed(5), watched(("ERROR", broken)), listed(9), status(429), listed(11))
    assert script.asked == ["list", "watch 5", "list", "watch 9", "list", "watch 11"]


TOO_LARGE = {
    "values": {"spec": {"a": [[]] * 600_000}},
    "bytes": {"spec": {"a": "x" * 17 * 2**20}},
}


@pytest.mark.parametrize("why", TOO_LARGE)
async def test_an_object_that_cannot_be_taken_keeps_no_other_of_its_kind_waiting(
    client: Client, script: Script, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    objects = [service("a", 1), service("b", 6, **TOO_LARGE[why]), service("c", 7)]

    def page(request: web.Request) -> web.Response:
        begin, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        end = begin + limit
        items = objects[begin:end]
        if "as=PartialObjectMetadataList" in request.headers["Accept"]:
            items = [{"metadata": each["metadata"]} for each in items]
        return listed(9, *items, more=str(end) if end < len(objects) else "")(request)

    pages = [page] * 11  # halved until one is alone, then the bad one alone, its name, and the rest
    broken = watched(("MODIFIED", objects[1]))
    behind = watched(("ADDED", service("d", 10)))
    store = await reflect(client, script, listed(5), broken, *pages, behind, status(410), *pages, behind)
    assert known(store) == {"a": 1, "c": 7, "d": 10}
    assert [each for each in script.asked if each.startswith("watch")] == [
        *("watch 5", "watch 9", "watch 10"),
        *("watch 9", "watch 10"),
    ]
    assert [each.message for each in caplog.records] == ["watch failed", "object is left out: it is too large"]


async def test_an_event_that_cannot_be_read_is_not_asked_for_again(client: Client, script: Script) -> None:
    odd = service("b", 6, spec=[])
    await reflect(client, script, listed(5), watched(("ADDED", odd)), listed(9))
    assert script.asked == ["list", "watch 5", "list", "watch 9"]


async def test_a_bookmark_moves_on_and_a_broken_connection_goes_on_from_there(client: Client, script: Script) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        reply = await watched(("BOOKMARK", {"kind": "Service", "metadata": {"resourceVersion": "30"}}))(request)
        assert request.transport is not None
        request.transport.abort()
        return reply  # type: ignore[no-any-return]

    await reflect(client, script, listed(5), cut)
    assert script.asked == ["list", "watch 5", "watch 30"]


async def test_a_list_that_expires_between_two_pages_begins_again(client: Client, script: Script) -> None:
    store = await reflect(
        client, script, listed(5, service("a", 1), more="page2"), status(410), listed(9, service("b", 2))
    )
    assert script.asked == ["list", "page2", "list", "watch 9"]
    assert known(store) == {"b": 2}


@pytest.mark.parametrize("code", [403, 404])
async def test_a_namespace_that_is_refused_is_told_once_and_asked_for_again(
    client: Client, script: Script, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    reported: list[tuple[str, bool]] = []
    cache_sync = CacheSync(("n", "m"), (SERVICE,), lambda namespace, is_whole: reported.append((namespace, is_whole)))
    refused = status(code)
    answers = [listed(5, service("a", 1)), refused, refused, refused, listed(9, service("b", 8))]
    store = await reflect(client, script, *answers, namespace="n", cache_sync=cache_sync)
    assert script.asked == ["list", "watch 5", "list", "list", "list", "watch 9"]
    assert reported == [("n", True), ("n", False), ("n", True)]
    assert [each.message for each in caplog.records] == ["namespace is left alone"]
    assert known(store) == {"b": 8}


async def test_where_all_namespaces_are_one_a_refusal_is_an_error_like_others(
    client: Client, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    cache_sync = CacheSync(("",), (SERVICE,))
    await reflect(client, script, listed(5), status(403), status(403), listed(9), cache_sync=cache_sync)
    assert [each.message for each in caplog.records] == ["watch failed", "watch failed"]
    assert cache_sync.unready() == ""


async def test_it_says_for_how_long_it_was_told_nothing(client: Client, script: Script) -> None:
    refused = (listed(5), status(403), status(403))
    assert (await reflector_after(client, script, *refused)).stale_s > 0
    script.over.clear()
    assert (await reflector_after(client, script, *refused, listed(9))).stale_s == 0
    script.over.clear()
    assert (await reflector_after(client, script, status(404), kind=WORKLOAD)).stale_s == 0, "it need not be there"


@pytest.mark.parametrize("namespace", ["", "n"])
async def test_a_kind_that_need_not_be_there_is_none_until_it_is(
    client: Client, script: Script, namespace: str
) -> None:
    cache_sync = CacheSync((namespace,), (WORKLOAD,))
    store = await reflect(client, script, status(404), namespace=namespace, kind=WORKLOAD, cache_sync=cache_sync)
    assert (store.is_defined, len(store), cache_sync.unready()) == (False, 0, "")
    workload = service("a", 1, apiVersion=WORKLOAD.api_version, kind=WORKLOAD.kind)
    script.over.clear()
    store = await reflect(client, script, status(404), listed(5, workload), kind=WORKLOAD, namespace=namespace)
    assert (store.is_defined, known(store)) == (True, {"a": 1})


async def test_what_has_no_namespace_is_read_by_name(client: Client, script: Script) -> None:
    flavor = {"metadata": {"name": "h100", "uid": "u"}, "spec": {"nodeLabels": {"gpu": "h100"}}}
    whole = {"apiVersion": RESOURCE_FLAVOR.api_version, "kind": RESOURCE_FLAVOR.kind, **flavor}
    script.answers = [
        lambda request: web.json_response(whole if request.path.endswith("/resourceflavors/h100") else {})
    ]
    assert await client.get(RESOURCE_FLAVOR, namespace="", name="h100") == whole
