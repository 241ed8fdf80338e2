"""The pages' server over real sockets: methods, paths, what is refused, and what ends a connection."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from streamrl.errors import UserError
from streamrl_pages import server as pages
from streamrl_pages.server import EndpointServer, health_response, json_response, metrics_response

HOST = "127.0.0.1"
DEADLINE_S = 120
LARGE = 64 << 20
"""More than the kernel keeps for a reader that does not read."""


@pytest.fixture(autouse=True)
def _nobody_is_cut_off_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a test says so."""
    monkeypatch.setattr(pages, "_TIMEOUT_S", 3600)


def broken() -> None:
    raise ArithmeticError("the page cannot be made")


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    server = EndpointServer(
        {
            "/metrics": lambda: metrics_response(b"streamrl_x 1\n"),
            "/healthz": lambda: health_response("no scheduler"),
            "/numbers": lambda: json_response({"tokens": 3}),
            "/large": lambda: metrics_response(b"x" * LARGE),
            "/broken": broken,
        }
    )
    yield await server.start(host=HOST, port=0)
    await server.close()


async def ask(port: int, *parts: bytes) -> tuple[bytes, bytes]:
    """(head, body) of what is answered until the server closes; empty if it broke off."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        finally:
            writer.transport.abort()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


async def get(port: int, path: str, *, method: str = "GET") -> tuple[int, bytes, bytes]:
    """(status, head, body)"""
    head, body = await ask(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return int(head.split()[1]), head, body


@pytest.mark.parametrize(
    ("path", "status", "content_type", "body"),
    [
        ("/metrics", 200, b"text/plain; version=0.0.4; charset=utf-8", b"streamrl_x 1\n"),
        ("/healthz", 503, b"text/plain; charset=utf-8", b"no scheduler\n"),
        ("/numbers?x=1", 200, b"application/json", b'{"tokens": 3}'),
        ("/", 404, b"text/plain; charset=utf-8", b"Not Found"),
        ("/metrics/", 404, b"text/plain; charset=utf-8", b"Not Found"),
        ("/../etc/passwd", 404, b"text/plain; charset=utf-8", b"Not Found"),
    ],
)
async def test_paths(port: int, path: str, status: int, content_type: bytes, body: bytes) -> None:
    got, head, text = await get(port, path)
    assert (got, text) == (status, body)
    lines = head.split(b"\r\n")
    assert {b"content-type: " + content_type, b"content-length: %d" % len(body)} <= set(lines)
    assert {b"connection: close", b"cache-control: no-store"} <= set(lines)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("HEAD", "/metrics", 200), ("POST", "/metrics", 405), ("DELETE", "/numbers", 405), ("PUT", "/elsewhere", 404)],
)
async def test_nothing_but_reading(port: int, method: str, path: str, status: int) -> None:
    got, _, body = await get(port, path, method=method)
    assert got == status
    assert method != "HEAD" or not body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /metrics SPDY/9\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 20_000,
        b"\xff\xfe\x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused_in_silence(port: int, request_bytes: bytes, caplog) -> None:
    head, _ = await ask(port, request_bytes)
    assert head.startswith(b"http/1.1 400 bad request")
    assert caplog.records == []


async def test_an_upgrade_is_a_request_like_others(port: int, caplog) -> None:
    upgrade = b"GET /numbers HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert (await ask(port, upgrade))[1] == b'{"tokens": 3}'
    assert caplog.records == []


async def test_a_second_request_on_a_connection_is_not_read(port: int) -> None:
    head, body = await ask(port, b"GET /numbers HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
    assert head.startswith(b"http/1.1 200 ok") and body == b'{"tokens": 3}'


async def test_a_body_is_not_read(port: int) -> None:
    chunk = b"x" * 65536
    request = b"POST /numbers HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LARGE
    head, _ = await ask(port, request, *[chunk] * (LARGE // len(chunk)))
    assert head == b"" or head.startswith(b"http/1.1 405 method not allowed")


@pytest.mark.parametrize(
    "body", [b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"Content-Length: 1\r\n\r\n" + b"x" * 20_000]
)
async def test_a_body_that_is_wrong_is_no_news(port: int, body: bytes, caplog) -> None:
    head, _ = await ask(port, b"POST /numbers HTTP/1.1\r\nHost: x\r\n" + body)
    assert head.startswith(b"http/1.1 405 method not allowed")
    assert (await get(port, "/numbers"))[0] == 200
    assert caplog.records == []


async def test_a_page_that_fails_is_told_and_the_others_stay(port: int, caplog) -> None:
    assert (await get(port, "/broken"))[0] == 500
    assert "the page cannot be made" in caplog.text
    assert (await get(port, "/numbers"))[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /numb", b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_who_does_not_finish_is_cut_off(port: int, sent: bytes, monkeypatch) -> None:
    monkeypatch.setattr(pages, "_TIMEOUT_S", 0.05)
    async with asyncio.timeout(DEADLINE_S):
        first_reader, first = await asyncio.open_connection(HOST, port)
        first.write(sent)
        second_reader, second = await asyncio.open_connection(HOST, port)
        first.write(b"x")  # what is sent puts nothing off
        assert await end_of(second_reader) == b""
        assert len(await end_of(first_reader)) < LARGE
    first.transport.abort()
    second.transport.abort()


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server breaks off."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_connections_end_with_the_server() -> None:
    server = EndpointServer({"/large": lambda: metrics_response(b"x" * LARGE)})
    port = await server.start(host=HOST, port=0)
    async with asyncio.timeout(DEADLINE_S):
        readers = [await asyncio.open_connection(HOST, port) for _ in range(3)]
        readers[0][1].write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await readers[0][0].readline() == b"HTTP/1.1 200 OK\r\n"
        await server.close()
        for reader, writer in readers:
            assert len(await end_of(reader)) < LARGE
            writer.transport.abort()


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_was_just_made_ends_with_the_server(turns: int) -> None:
    """It may be accepted and not yet known to the server; none is left when `close` returns."""
    server = EndpointServer({})
    port = await server.start(host=HOST, port=0)
    peer = socket.create_connection((HOST, port), DEADLINE_S)
    with peer:
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        peer.setblocking(False)
        with contextlib.suppress(ConnectionError):
            assert peer.recv(1) == b""


async def test_a_port_in_use_is_the_users_error(port: int) -> None:
    with pytest.raises(UserError, match=f"STREAMRL_SIGNALS_PORT: port {port} is in use; choose another port"):
        await EndpointServer({}).start(host=HOST, port=port)
