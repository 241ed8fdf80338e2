"""The signals port over real sockets: routes, methods, limits."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from streamrl.errors import UserError
from streamrl_workers.metrics import signals
from streamrl_workers.metrics.signals import Pages, SignalsServer

HOST = "127.0.0.1"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[SignalsServer, int, list[str]]]:
    fault = [""]
    pages = Pages(metrics=lambda: b"streamrl_x 1\n", numbers=lambda: {"tokens": 3}, fault=lambda: fault[0])
    server = SignalsServer(pages)
    port = await server.start(host=HOST, port=0)
    yield server, port, fault
    await server.close()


async def ask(port: int, request: bytes) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body.decode()


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        ("GET /metrics", 200, "streamrl_x 1\n"),
        ("GET /healthz", 200, "ok\n"),
        ("GET /numbers?x=1", 200, '{"tokens": 3}'),
        ("GET /", 404, "Not Found\n"),
        ("GET /../etc/passwd", 404, "Not Found\n"),
        ("POST /metrics", 405, "Method Not Allowed\n"),
        ("DELETE /numbers", 405, "Method Not Allowed\n"),
        ("PUT /elsewhere", 404, "Not Found\n"),
    ],
)
async def test_routes(server, request_line, status, body):
    _, port, _ = server
    assert await ask(port, f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) == (status, body)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics SPDY/9\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n", 431),
        (b"\xff\xfe\x00\r\n\r\n", 400),
    ],
)
async def test_bad_requests(server, request_bytes, status):
    _, port, _ = server
    assert (await ask(port, request_bytes))[0] == status


async def test_a_fault_is_told(server):
    _, port, fault = server
    fault[0] = "no scheduler"
    assert await ask(port, b"GET /healthz HTTP/1.1\r\n\r\n") == (503, "no scheduler\n")


async def test_a_silent_client_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(signals, "_REQUEST_TIMEOUT_S", 0.05)
    _, port, _ = server
    reader, writer = await asyncio.open_connection(HOST, port)
    async with asyncio.timeout(20):
        with pytest.raises(ConnectionResetError):
            if await reader.read() == b"":
                raise ConnectionResetError
    writer.close()


async def test_a_port_in_use_is_the_users_error(server):
    _, port, _ = server
    with pytest.raises(UserError, match=f"STREAMRL_SIGNALS_PORT: port {port} is in use; choose another port"):
        await SignalsServer(Pages(metrics=bytes, numbers=dict)).start(host=HOST, port=port)


async def test_numbers_are_json(server):
    _, port, _ = server
    _, body = await ask(port, b"GET /numbers HTTP/1.0\r\n\r\n")
    assert json.loads(body) == {"tokens": 3}
