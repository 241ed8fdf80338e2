"""Calls of programs: paths, bodies up to their bound, tokens, connections that are held."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from streamrl_pages import server as pages
from streamrl_pages.calls import HttpCall, Reply, calls
from streamrl_pages.server import PageServer

MOST_BYTES = 100
DEADLINE_S = 0.5


async def echo(call: HttpCall) -> Reply:
    body = await call.body()
    return Reply(text="too large" if body is None else f"{call.token}|{body.decode()}")


async def admitted(call: HttpCall) -> Reply:
    call.admit()
    return await echo(call)


async def wait(call: HttpCall) -> Reply:
    """Longer than a connection may last."""
    if call.token == "held":
        call.hold()
    await asyncio.sleep(DEADLINE_S * 2)
    return Reply(text="waited")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    app = calls(
        {("POST", "/echo"): echo, ("POST", "/admitted"): admitted, ("POST", "/wait"): wait},
        refused=lambda status: Reply(text=f"refused {status}", status=status),
        most_bytes=MOST_BYTES,
    )
    server = PageServer(app, timeout_s=DEADLINE_S, of_a_peer=8)
    port = await server.start(host="127.0.0.1", port=0)
    yield f"http://127.0.0.1:{port}"
    await server.close()


def pieces(count: int) -> Iterator[bytes]:
    """A body whose length is not told."""
    for _ in range(count):
        yield b"x" * 10


async def post(url: str, **options: object) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(url, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer secret", "secret"), ("bearer  secret", "secret"), ("Basic secret", ""), ("secret", ""), ("", "")],
)
async def test_the_token_is_that_of_the_header(address: str, header: str, token: str) -> None:
    assert (await post(f"{address}/echo", content=b"hi", headers={"authorization": header})).text == f"{token}|hi"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"x" * MOST_BYTES, "|" + "x" * MOST_BYTES),
        (b"x" * (MOST_BYTES + 1), "too large"),
        (b"x" * 10_000_000, "too large"),
        (b"", "|"),
    ],
)
async def test_a_body_has_a_bound(address: str, body: bytes, text: str) -> None:
    assert (await post(f"{address}/echo", content=body)).text == text


async def test_a_body_that_does_not_tell_its_length_has_the_same_bound(address: str) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for piece in pieces(count):
            yield piece

    assert (await post(f"{address}/echo", content=chunks(10))).text == "|" + "x" * 100
    assert (await post(f"{address}/echo", content=chunks(11))).text == "too large"


async def test_what_is_not_there_is_refused_in_the_callers_shape(address: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{address}/echo")).text == "refused 405"
        assert (await client.post(f"{address}/other")).text == "refused 404"


async def test_only_a_held_connection_outlasts_the_deadline(address: str) -> None:
    held = await post(f"{address}/wait", headers={"authorization": "Bearer held"})
    assert held.text == "waited"
    with pytest.raises(httpx.RemoteProtocolError):
        await post(f"{address}/wait")


async def test_a_held_connection_keeps_its_place(address: str) -> None:
    """Others that open more connections than there are places push each other out, not the one that waits by right."""
    host, port = address.removeprefix("http://").split(":")
    waiting = asyncio.create_task(post(f"{address}/wait", headers={"authorization": "Bearer held"}))
    await asyncio.sleep(0)
    strangers = [socket.create_connection((host, int(port))) for _ in range(4)]
    assert (await post(f"{address}/echo", content=b"still")).text == "|still"
    strangers += [socket.create_connection((host, int(port))) for _ in range(40)]
    assert (await waiting).text == "waited"
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(("path", "answer"), [("admitted", b"HTTP/1.1 200 OK"), ("echo", b"")])
async def test_strangers_take_no_place_of_a_known_caller(
    path: str, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = {("POST", "/echo"): echo, ("POST", "/admitted"): admitted}
    server = PageServer(calls(routes, refused=lambda status: Reply(text="", status=status), most_bytes=9), of_a_peer=8)
    monkeypatch.setattr(pages, "_TIMEOUT_S", 3600)
    port = await server.start(host="127.0.0.1", port=0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    writer.write(head.encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 "), "its handler reads the body"
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
    assert await strangers[0][0].read() == b"", "the oldest stranger goes"
    writer.write(b"it")
    assert (await reader.read(1000)).partition(b"\r\n")[0] == answer
    for _, one in (*strangers, (reader, writer)):
        one.transport.abort()
    await server.close()
