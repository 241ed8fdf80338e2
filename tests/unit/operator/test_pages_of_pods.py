"""What a pod serves is its author's word: it may lie, be large without end, or send the operator elsewhere with its token."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl_operator.kube import answers
from streamrl_operator.kube.answers import UnavailableError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.kinds import SERVICE
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_operator.planning import job_status
from support.observed_jobs import page

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
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", door.answer)
    server = TestServer(application)
    await server.start_server(shutdown_timeout=0.1)
    async with Client(RestConfig(server=str(server.make_url("")).rstrip("/"), tls=None, token=TOKEN)) as made:
        yield made
    await server.close()


async def numbers(client: Client) -> object:
    """The page."""
    page = await client.read_page(namespace="n", service="s", port="signals", page="numbers", timeout_s=60.0)
    return answers.read_page(page)


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
