"""The pages' HTTP port: whatever a peer sends on its connection, it gets one answer or none, and the next peer gets its page."""

import asyncio
import contextlib
import logging
import re
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fuzz.harness import Door, Enter
from streamrl_pages import server as pages
from streamrl_pages.server import EndpointServer, health_response, json_response, metrics_response

HOST = "127.0.0.1"
DEADLINE_S = 100.0
"""For one that waits; a busy machine does not."""
ANSWERS = {b"200", b"400", b"404", b"405", b"503"}
PAGE = b'{"step": 7}'


@contextmanager
def opened() -> Iterator[Enter]:
    """A server with a worker's pages."""
    told: list[str] = []
    with asyncio.Runner() as runner, _heard(told):
        runner.get_loop().set_exception_handler(lambda _, context: told.append(str(context)))
        server = EndpointServer(
            {
                "/metrics": lambda: metrics_response(b"streamrl_x 1\n"),
                "/healthz": lambda: health_response("loading"),
                "/numbers": lambda: json_response({"step": 7}),
            }
        )
        port = runner.run(server.start(host=HOST, port=0))

        def enter(data: bytes) -> str:
            told.clear()
            answer = runner.run(_visit(port, data))
            outcome = _checked(answer)
            assert _checked(runner.run(_visit(port, b"GET /numbers HTTP/1.1\r\nHost: x\r\n\r\n"))).startswith("200")
            assert not told, told
            return outcome

        yield enter
        runner.run(server.close())


@contextmanager
def _heard(told: list[str]) -> Iterator[None]:
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


async def _visit(port: int, data: bytes) -> bytes:
    """What is answered to `data`, which goes in pieces that follow from it."""
    loop, answer = asyncio.get_running_loop(), bytearray()
    step = max(1 + zlib.crc32(data) % 4096, len(data) // 32)
    with socket.socket() as peer:
        peer.setblocking(False)
        async with asyncio.timeout(DEADLINE_S):
            await loop.sock_connect(peer, (HOST, port))
            with contextlib.suppress(OSError):  # the server need not wait for all of it
                for start in range(0, len(data), step):
                    await loop.sock_sendall(peer, memoryview(data)[start : start + step])
                    await asyncio.sleep(0)
                peer.shutdown(socket.SHUT_WR)  # else nothing would come of half a request until its deadline
            with contextlib.suppress(ConnectionError):
                while part := await loop.sock_recv(peer, 65536):
                    answer += part
    return bytes(answer)


def _checked(answer: bytes) -> str:
    """One whole answer, of a kind that we give."""
    if not answer:
        return "nothing"
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head[:9] == b"HTTP/1.1 " and head[9:12] in ANSWERS, head
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    assert length is None or len(body) in (0, int(length[1])), (head, body)
    return f"{head[9:12].decode()} {'' if length is None else len(body)}"


def plant(patch: pytest.MonkeyPatch) -> None:
    """Headers without a bound."""
    patch.setattr(pages, "_HEADER_BYTES", 1 << 40)


DOOR = Door(
    name="signals_port",
    opened=opened,
    honest=[
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nUser-Agent: Prometheus/3.0\r\nAccept: text/plain;q=0.5,*/*;q=0.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 10.0.0.1:8080\r\nConnection: close\r\n\r\n",
        b"HEAD /numbers?a=b HTTP/1.0\r\n\r\n",
        b"POST /numbers HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
        b"POST /numbers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET /numbers HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET http://x/numbers HTTP/1.1\r\nHost: x\r\nRange: bytes=0-1\r\nIf-None-Match: *\r\n\r\n",
    ],
    words=[
        *(
            b"GET ",
            b"OPTIONS * ",
            b"CONNECT x:1 ",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"HTTP/1.1",
            b"HTTP/9.9",
            b"Host: ",
        ),
        *(
            b"Content-Length: ",
            b"Transfer-Encoding: chunked\r\n",
            b"Connection: keep-alive\r\n",
            b"%00",
            b"%2e%2e/",
            b"//",
        ),
        *(b"\r\n X: folded", b"X-A: b\r\n", b"ffffffff\r\n", b"?", b"#", b"\x16\x03\x01\x02\x00"),
    ],
    most_input=6 << 20,
    most_held=3 << 20,
    plant=plant,
)
