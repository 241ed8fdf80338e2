"""The signals port of a worker over real sockets: which pages there are."""

import json
import math
import urllib.error
import urllib.request
from asyncio import to_thread
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from streamrl_workers.metrics.signals import Signals, SignalsServer

HOST = "127.0.0.1"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[int, list[str]]]:
    fault = [""]
    pages = Signals(metrics=lambda: b"streamrl_x 1\n", status=lambda: {"tokens": 3}, fault=lambda: fault[0])
    server = SignalsServer(pages)
    yield await server.start(host=HOST, port=0), fault
    await server.close()


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(("path", "body"), [("/metrics", "streamrl_x 1\n"), ("/healthz", "ok\n")])
async def test_pages(server, path: str, body: str) -> None:
    port, _ = server
    assert await to_thread(ask, port, path) == (200, body)


async def test_a_fault_is_told(server) -> None:
    port, fault = server
    fault[0] = "no scheduler"
    assert await to_thread(ask, port, "/healthz") == (503, "no scheduler\n")


async def test_curves_are_there_where_a_process_has_some(server) -> None:
    port, _ = server
    assert (await to_thread(ask, port, "/curves"))[0] == 404
    curves = {"steps": [{"step": 0, "reward_mean": math.nan}]}
    scheduler = SignalsServer(Signals(metrics=bytes, status=dict, curves=lambda: curves))
    status, body = await to_thread(ask, await scheduler.start(host=HOST, port=0), "/curves")
    assert (status, json.loads(body)) == (200, {"steps": [{"step": 0, "reward_mean": None}]})
    await scheduler.close()


async def test_numbers_are_json(server) -> None:
    port, _ = server
    status, body = await to_thread(ask, port, "/numbers")
    assert (status, json.loads(body)) == (200, {"tokens": 3})
