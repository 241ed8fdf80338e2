"""Every page of the project stays readable while others hold connections open, trickle, or do not read."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from streamrl_operator import metrics
from streamrl_operator.metrics import OperatorMetrics
from streamrl_pages import server as pages
from streamrl_workers.metrics.signals import Signals, SignalsServer

PEER, OTHER = "127.0.0.1", "127.0.0.2"
DEADLINE_S = 120


@asynccontextmanager
async def of_a_worker() -> AsyncIterator[tuple[int, tuple[str, ...]]]:
    server = SignalsServer(Signals(metrics=lambda: b"streamrl_x 1\n", status=lambda: {"step": 1}))
    port = await server.start(host="0.0.0.0", port=0)
    yield port, ("/metrics", "/healthz", "/numbers")
    await server.close()


@asynccontextmanager
async def of_the_operator() -> AsyncIterator[tuple[int, tuple[str, ...]]]:
    async with metrics.serve_endpoints(host="0.0.0.0", port=0, metrics=OperatorMetrics(), unready=str) as port:
        yield port, ("/metrics", "/healthz", "/readyz")


SERVERS = (of_a_worker, of_the_operator)


@pytest.fixture(autouse=True)
def _nobody_is_cut_off_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are what is looked at here; a busy machine may take long to fill them."""
    monkeypatch.setattr(pages, "_TIMEOUT_S", 3600)


class Peers:
    """Connections that are held open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(PEER, self._port, local_addr=(address, 0))
        self._writers.append(writer)
        return reader, writer

    async def __aenter__(self) -> "Peers":
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


async def ask(port: int, path: str, *, address: str = PEER) -> bytes:
    """The status line of one request."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(PEER, port, local_addr=(address, 0))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        try:
            answer = await reader.read()
        except ConnectionError as error:
            answer = f"{type(error).__name__}".encode()
        writer.close()
    return answer.partition(b"\r\n")[0]


@pytest.mark.parametrize("serve", SERVERS)
@pytest.mark.parametrize("count", [64, 500])
@pytest.mark.parametrize("addresses", [1, 3, 250])
async def test_idle_connections_leave_the_port_open(serve, count: int, addresses: int) -> None:
    async with serve() as (port, paths), Peers(port) as peers:
        for number in range(count):
            await peers.connect(f"127.0.1.{1 + number % addresses}")
        for path, address in itertools.product(paths, (PEER, "127.0.1.1")):
            assert await ask(port, path, address=address) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("serve", SERVERS)
async def test_trickling_connections_leave_the_port_open(serve) -> None:
    async with serve() as (port, paths), Peers(port) as peers:
        writers = [(await peers.connect(f"127.0.1.{1 + number % 20}"))[1] for number in range(200)]
        for byte in b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-":
            for writer in writers:
                writer.write(bytes([byte]))
            assert await ask(port, paths[byte % 3]) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("serve", SERVERS)
async def test_a_peer_pushes_out_itself_alone(serve) -> None:
    async with serve() as (port, paths), Peers(port) as peers:
        reader, writer = await peers.connect(OTHER)
        for _ in range(500):
            await peers.connect(PEER)
        writer.write(f"GET {paths[0]} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("serve", SERVERS)
@pytest.mark.parametrize(("addresses", "kept"), [(1, 16), (300, 256)])
async def test_the_oldest_makes_room(serve, addresses: int, kept: int) -> None:
    async with serve() as (port, paths), Peers(port) as peers:
        held = [
            await peers.connect(f"127.{1 + number % addresses % 2}.{number % addresses // 2}.1")
            for number in range(kept + 1)
        ]
        assert await ask(port, paths[0], address=OTHER) == b"HTTP/1.1 200 OK"
        async with asyncio.timeout(DEADLINE_S):
            assert await held[0][0].read() == b""
        assert not held[-1][0].at_eof()
