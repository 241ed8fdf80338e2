"""Whatever an API server or a pod behind its proxy answers: bounded memory, and one of our errors."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from streamrl_operator.kube import answers
from streamrl_operator.kube.answers import (
    KubeError,
    TooLargeError,
    UnavailableError,
)
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.kinds import LEASE, RLJOB, SERVICE
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_operator.planning import job_status
from support import hostile_server as hostile
from support.api_server import client_of
from support.observed_jobs import page

MOST_MIB = 200
"""Of memory that an answer may take; endless ones are cut off long before the limit of the process."""
READER = """
import asyncio, resource, sys
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.answers import KubeError
from streamrl_operator.kube.kinds import SERVICE

resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

async def ask(client, how):
    if how == "page":
        await client.read_page(namespace="n", service="s", port="signals", page="numbers", timeout_s=5.0)
    elif how == "get":
        await client.get(SERVICE, namespace="n", name="s")
    elif how == "list":
        async for _ in client.list(SERVICE): pass
    else:
        async for _ in client.watch(SERVICE, version="1", duration_s=5): pass

async def main(server):
    async with Client(RestConfig(server=server, tls=None), timeout_s=5.0) as client:
        for how in ("page", "get", "list", "watch"):
            try:
                await ask(client, how)
                print("no error")
            except KubeError as error:
                print(type(error).__name__, str(error)[:2000])

asyncio.run(main(*sys.argv[1:]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
ENDLESS: dict[str, Callable[[asyncio.StreamWriter], object]] = {
    "error": lambda writer: hostile.endless(writer, 500),
    "refusal": lambda writer: hostile.endless(writer, 404),
    "redirect": lambda writer: hostile.endless(writer, 302),
    "success": lambda writer: hostile.endless(writer, 200, begin=b'{"a": "'),
    "values": lambda writer: hostile.endless(writer, 200, begin=b'{"a": [', part=b"[]," * 20_000),
    "gzip": lambda writer: hostile.bomb(writer, 200, encoding="gzip"),
    "deflated error": lambda writer: hostile.bomb(writer, 503, encoding="deflate"),
    "headers": hostile.endless_headers,
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_answer_without_end_takes_no_memory(kind: str) -> None:
    async with hostile.serve(lambda _, writer: ENDLESS[kind](writer)) as server:
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, server, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(reader.communicate(), 300)
    assert reader.returncode == 0, err.decode()[-2000:]
    *reported, grown_mib = out.decode().splitlines()
    assert len(reported) == 4
    assert {line.partition(" ")[0] for line in reported} <= {
        "UnavailableError",
        "UnusableError",
        "TooLargeError",
        "RequestRefusedError",
        "NotFoundError",
    }
    assert max(map(len, reported)) < 1000
    assert int(grown_mib) < MOST_MIB, reported


async def test_many_small_values_are_refused_before_they_are_made() -> None:
    body = b'{"a": [' + b"[]," * 300_000 + b"[]]}"
    async with hostile.serve(lambda _, writer: writer.write(hostile.whole(200, body))) as server:
        with pytest.raises(KubeError, match="values"):
            await _page(server)


@pytest.mark.parametrize(
    "text",
    ["," * 1_000_001, '",\\"[' * 400_000, "\\" * 2_000_001 + "{[," * 400_000, '\\",' * 900_000],
    ids=["commas", "quotes", "backslashes", "an odd end"],
)
async def test_text_is_one_value_whatever_stands_in_it(text: str) -> None:
    obj = {"apiVersion": "v1", "kind": "Service", "metadata": METADATA, "data": {"a": text}}
    async with _client(hostile.whole(200, json.dumps(obj).encode())) as client:
        assert await client.get(SERVICE, namespace="n", name="s") == obj


@pytest.mark.parametrize(
    "body",
    [b'{"a": ["' + b'\\"' * 7_000_000 + b'"' + b",[]" * 600_000, b'{"a": [' + b'",",' * 3_000_000 + b"[]]}"],
    ids=["a long string", "many strings"],
)
async def test_values_between_strings_are_counted(body: bytes) -> None:
    async with _client(hostile.whole(200, body)) as client:
        with pytest.raises(TooLargeError, match="values"):
            await client.get(SERVICE, namespace="n", name="s")


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_a_slow_drip_has_a_deadline(status: int) -> None:
    async with (
        hostile.serve(lambda _, writer: hostile.drip(writer, status)) as server,
        Client(RestConfig(server=server, tls=None), timeout_s=0.5) as client,
    ):
        with pytest.raises(KubeError, match=r"within 0\.5 s"):
            await client.get(SERVICE, namespace="n", name="s")


ODD: list[Any] = [None, [], {}, "x", 7, 1.5, True, [None], {"a": {"b": []}}, "9" * 5000, "\ud800"]
STATUSES = [{key: odd} for key in ("message", "reason", "code", "details", "kind") for odd in ODD]
STATUSES += [{"details": {"retryAfterSeconds": odd}} for odd in ODD] + ODD  # type: ignore[list-item]


@pytest.mark.parametrize("code", [301, 401, 403, 404, 409, 410, 422, 429, 500, 503])
async def test_odd_refusals_are_errors_of_ours(code: int) -> None:
    bodies = [json.dumps(each).encode() for each in STATUSES]
    bodies += [b"", b"{", b"\xff\xfe", b"[" * 60_000, b"9" * 60_000, b"\x00" * 10]
    for header in ("", "Retry-After: ²\r\n", f"Retry-After: {'9' * 400}\r\n", "Retry-After: Wed\r\n"):
        for body in bodies if not header else bodies[:1]:
            error = await _refused(hostile.whole(code, body, more=header))
            assert error.status == code
            assert len(str(error)) < 1000
            assert error.retry_after_s is None or 0 <= error.retry_after_s <= 3600


@pytest.mark.parametrize("charset", ["hex", "utf-16", "no-such", "idna", "unicode_escape"])
async def test_a_refusal_in_an_odd_charset(charset: str) -> None:
    head = f"HTTP/1.1 500 No\r\nContent-Type: text/plain; charset={charset}\r\nContent-Length: 3\r\n\r\n".encode()
    assert (await _refused(head + b"\xff\xfe\\")).status == 500


METADATA = {"name": "s", "namespace": "n", "uid": "u", "resourceVersion": "5"}
"""Of an object as it should be."""
OBJECTS = [
    *ODD,
    {"metadata": None},
    *({"metadata": METADATA | {"resourceVersion": odd}} for odd in (*ODD, "x", "-1")),
    *({"metadata": METADATA | {"labels": odd}} for odd in ([1], "x", {"a": []})),
    *({"metadata": METADATA | {"ownerReferences": odd}} for odd in ({}, ["x"], [{"kind": []}])),
    *({"metadata": METADATA | {"name": odd}} for odd in ([], None, {}, 7)),
    *({"metadata": METADATA, "spec": odd} for odd in ([], "x", 7)),
    *({"metadata": METADATA, "status": odd} for odd in ([], "x", 7)),
]


@pytest.mark.parametrize("odd", OBJECTS, ids=lambda odd: json.dumps(odd)[:40])
async def test_odd_objects_are_errors_of_ours(odd: Any) -> None:
    stamped = odd | {"apiVersion": "v1", "kind": "Service"} if isinstance(odd, dict) else odd
    listed = {"metadata": {"resourceVersion": "5"}, "items": [odd]}
    watched = json.dumps({"type": "ADDED", "object": stamped}).encode() + b"\n"

    def answer(line: str, writer: asyncio.StreamWriter) -> None:
        path = line.split(" ")[1].partition("?")[0]
        one = json.dumps(stamped if path.endswith("/s") else listed).encode()
        writer.write(hostile.whole(200, watched if "watch=" in line else one))

    async with hostile.serve(answer) as server, Client(RestConfig(server=server, tls=None), timeout_s=60.0) as client:
        with pytest.raises(KubeError):
            await client.get(SERVICE, namespace="n", name="s")
        with pytest.raises(KubeError):
            await client.delete(SERVICE, namespace="n", name="s", uid="u")
        with pytest.raises(KubeError):
            assert [page async for page in client.list(SERVICE)] == "unreached"
        with pytest.raises(KubeError):
            assert [one async for one in client.watch(SERVICE, version="1", duration_s=5)] == "unreached"


@pytest.mark.parametrize("items", [{}, "x", 7, [7]])
async def test_odd_lists_are_errors_of_ours(items: object) -> None:
    for body in ({"metadata": {"resourceVersion": "5"}, "items": items}, {"metadata": items, "items": []}):
        async with _client(hostile.whole(200, json.dumps(body).encode())) as client:
            with pytest.raises(KubeError):
                assert [page async for page in client.list(RLJOB)] == "unreached"


async def test_a_list_without_items_is_empty() -> None:
    body = {"metadata": {"resourceVersion": "5"}, "items": None}
    async with _client(hostile.whole(200, json.dumps(body).encode())) as client:
        assert [items async for items, _ in client.list(RLJOB)] == [[]]


@pytest.mark.parametrize("spec", [[], {"holderIdentity": []}, {"leaseDurationSeconds": "x"}, {"leaseTransitions": {}}])
async def test_odd_leases_are_errors_of_ours(spec: object) -> None:
    lease = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": METADATA, "spec": spec}
    async with _client(hostile.whole(200, json.dumps(lease).encode())) as client:
        with pytest.raises(KubeError):
            await client.get(LEASE, namespace="n", name="s")


async def test_pages_that_are_too_large_are_asked_for_in_smaller_parts() -> None:
    """Objects of 1 MiB are nothing wrong: whoever has written them may."""
    names, limits = [f"s{number}" for number in range(40)], []

    def answer(line: str, writer: asyncio.StreamWriter) -> None:
        query = dict(part.split("=") for part in line.split(" ")[1].partition("?")[2].split("&"))
        begin, limit = int(query.get("continue", 0)), int(query["limit"])
        limits.append(limit)
        items = [
            {"metadata": METADATA | {"name": name}, "data": {"x": "y" * 2**20}} for name in names[begin : begin + limit]
        ]
        more = str(begin + limit) if begin + limit < len(names) else ""
        body = {"metadata": {"resourceVersion": "5", "continue": more}, "items": items}
        writer.write(hostile.whole(200, json.dumps(body).encode()))

    async with hostile.serve(answer) as server, Client(RestConfig(server=server, tls=None)) as client:
        found = [item["metadata"]["name"] async for items, _ in client.list(SERVICE) for item in items]
    assert found == names
    assert limits[0] > limits[-1]


async def test_no_cookie_of_a_pod_is_kept() -> None:
    """It would go with every request, until the API server refuses headers of that length."""
    asked: list[str] = []

    async def remember(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(hostile.whole(200, b'{"a": 1}', more=f"Set-Cookie: a={'x' * 4000}; Path=/\r\n"))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(remember, "localhost", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        await _page(f"http://localhost:{port}", times=2)
    assert "cookie" not in asked[1].lower()


@asynccontextmanager
async def _client(answer: bytes) -> AsyncIterator[Client]:
    async with (
        hostile.serve(lambda _, writer: writer.write(answer)) as server,
        Client(RestConfig(server=server, tls=None), timeout_s=60.0) as client,
    ):
        yield client


async def _refused(answer: bytes) -> KubeError:
    async with _client(answer) as client:
        with pytest.raises(KubeError) as caught:
            await client.get(SERVICE, namespace="n", name="s")
    return caught.value


async def _page(server: str, *, times: int = 1) -> None:
    async with Client(RestConfig(server=server, tls=None)) as client:
        for _ in range(times):
            await client.read_page(namespace="n", service="s", port="signals", page="numbers", timeout_s=60.0)


# ---- what a pod serves: its author's word, which may lie, be large without end, or send the operator elsewhere with its token

TOKEN = "of the operator"
PROXY = "/api/v1/namespaces/n/services/http:s:signals/proxy/numbers"
Serve = Callable[[web.Request], web.Response]


class Door:
    """An API server with one service behind its proxy; it keeps what else it is asked for."""

    def __init__(self) -> None:
        self.serve: Serve = lambda _: web.json_response({})
        self.asked: list[str] = []
        self.is_silent = False
        self.waiting = asyncio.Semaphore(0)
        """Released for each page that is asked for while it is silent."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == PROXY and self.is_silent:
            self.waiting.release()
            await asyncio.Event().wait()
        if request.path == PROXY:
            return self.serve(request)
        self.asked.append(request.path)
        metadata = {"name": "other", "namespace": "n", "uid": "u", "resourceVersion": "1"}
        return web.json_response({"apiVersion": "v1", "kind": "Service", "metadata": metadata})


@pytest.fixture
async def door() -> Door:
    return Door()


@pytest.fixture
async def client(door: Door) -> AsyncIterator[Client]:
    async with client_of(door.answer, token=TOKEN) as made:
        yield made


async def numbers(client: Client) -> object:
    """The page."""
    page = await client.read_page(namespace="n", service="s", port="signals", page="numbers", timeout_s=60.0)
    return answers.read_page(page)


async def test_a_connection_that_was_ended_answers_nobody(door: Door) -> None:
    """A member's is, when its credentials are renewed."""
    async with client_of(door.answer) as client:
        pass
    with pytest.raises(UnavailableError, match="the connection was ended"):
        await numbers(client)


async def test_a_page(client: Client, door: Door) -> None:
    door.serve = lambda _: web.json_response({"step": 1})
    assert await numbers(client) == {"step": 1}


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("place", ["../../../secrets/other-ca", "/api/v1/secrets"])
async def test_it_goes_nowhere_that_a_pod_sends_it(client: Client, door: Door, code: int, place: str) -> None:
    door.serve = lambda _: web.Response(status=code, headers={"Location": place})
    with pytest.raises(Exception, match=f"{code} "):
        await numbers(client)
    assert door.asked == []


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "9" * 10_000, "<html>", json.dumps({"x": "y" * 2**20})],
    ids=["deep", "wide", "html", "large"],
)
async def test_a_page_that_cannot_be_read(client: Client, door: Door, text: str) -> None:
    door.serve = lambda _: web.Response(text=text, content_type="application/json")
    with pytest.raises(UnavailableError, match=r"BadAnswer|TooLarge"):
        await numbers(client)


async def test_a_pods_words_of_refusal_are_not_ours(client: Client, door: Door) -> None:
    door.serve = lambda _: web.Response(status=503, text="call 555-0199 for your GPUs")
    with pytest.raises(UnavailableError) as caught:
        await numbers(client)
    assert "503" in str(caught.value)
    assert "555-0199" not in str(caught.value)


async def test_a_service_that_is_asked_directly_sees_no_token(client: Client) -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"step": 2})

    async with client_of(answer) as other:
        address = other.access.server.removeprefix("http://")
        page = await client.read_page(
            namespace="n", service="s", port="signals", page="numbers", timeout_s=60.0, address=address
        )
    assert (answers.read_page(page), seen) == ({"step": 2}, [None])


def test_the_token_is_in_no_text_of_its_holder() -> None:
    assert TOKEN not in repr(RestConfig(server="https://x", tls=None, token=TOKEN))


@pytest.mark.parametrize("step", [10**400, 10**30, float("inf"), float("nan"), -1, True, "3"])
def test_numbers_that_no_status_can_hold_are_left_out(step: object) -> None:
    assert job_status.whole_number(page(step=step)["step"]) is None  # type: ignore[arg-type]


async def test_pods_that_keep_silent_hold_up_no_other_request(client: Client, door: Door) -> None:
    door.is_silent, pages = True, 64
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(numbers(client)) for _ in range(pages)]
        for _ in range(pages):
            await door.waiting.acquire()
        assert (await client.get(SERVICE, namespace="n", name="other"))["kind"] == "Service"
        for read in reads:
            read.cancel()
