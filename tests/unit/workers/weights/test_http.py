"""Connections between a puller and a server of weights over HTTP: what ends them, and who waits for whom."""

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights import http_server
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer, versions_path
from streamrl_workers.weights.source import SourceBrokenError
from streamrl_workers.weights.store import WeightStore

MOST = 4
DEADLINE_S = 60.0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, pb.VersionName]]:
    monkeypatch.setattr(http_server, "_MOST_CONNECTIONS", MOST)
    monkeypatch.setattr(http_server, "_MOST_STRANGERS", MOST)
    monkeypatch.setattr(http_server, "_FIRST_REQUEST_S", 10 * DEADLINE_S)
    store = WeightStore()
    tensors = {"w": TensorBytes("uint8", (1,), memoryview(b"w"))}
    version = store.publish(attempt=1, step=1, tensors=tensors)
    server = HttpWeightServer(store, token="secret")
    yield server.address, version
    server.close()


async def opened(address: str) -> HttpSource:
    return await HttpSource.connect(address, tls=None, token="secret", role="trainer")


async def test_strangers_take_no_place_from_those_who_are_let_in(served: tuple[str, pb.VersionName]) -> None:
    address, version = served
    with ExitStack() as strangers:
        silent = [strangers.enter_context(stranger(address)) for _ in range(2 * MOST)]
        sources = [await opened(address) for _ in range(MOST)]
        for source in sources:
            assert (await source.manifest(version)).version == version
        assert await asyncio.to_thread(silent[0].recv, 1) == b"", "the oldest stranger goes"
        sources.append(await opened(address))
        with pytest.raises(SourceBrokenError):
            await sources[-1].manifest(version)
        for source in sources:
            await source.close()


async def test_strangers_of_one_address_take_no_place_from_another(served: tuple[str, pb.VersionName]) -> None:
    address, version = served
    with ExitStack() as strangers:
        other = strangers.enter_context(stranger(address, by="127.0.0.2"))
        silent = [strangers.enter_context(stranger(address)) for _ in range(2 * MOST)]
        assert await asyncio.to_thread(silent[0].recv, 1) == b""
        other.sendall(f"GET {versions_path(version)} HTTP/1.1\r\n\r\n".encode())
        assert (await asyncio.to_thread(other.recv, 100)).startswith(b"HTTP/1.1 401 ")


async def test_a_cancelled_call_ends_its_thread_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = await opened(f"127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        with connection:
            asking = asyncio.create_task(source.manifest(pb.VersionName()))
            assert await asyncio.to_thread(connection.recv, 1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await source.close()
    del asking, source
    for _ in range(10):  # callbacks of the loop hold them as well
        await asyncio.sleep(0)
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize(
    ("begin", "answer"),
    [
        (b"GET /weights/v1/", b"HTTP/1.1 414 "),
        (b"GET /weights/v1/ HTTP/1.1\r\nX: ", b"HTTP/1.1 431 "),
        (b"GET /weights/v1/ HTTP/1.1\r\n" + 40 * b"X: y\r\n", b"HTTP/1.1 431 "),
    ],
    ids=["line", "header", "headers"],
)
def test_a_head_is_refused_at_its_bound(served: tuple[str, pb.VersionName], begin: bytes, answer: bytes) -> None:
    """It is not waited for, and no more of it is read."""
    with stranger(served[0]) as one:
        one.sendall(begin.ljust(http_server._HEAD_BYTES + 1, b"x"))
        assert one.recv(len(answer)) == answer


def stranger(address: str, *, by: str = "127.0.0.1") -> socket.socket:
    """Connect from a loopback address."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), DEADLINE_S, source_address=(by, 0))


def test_other_clusters_share_the_uplink_and_each_has_its_own_bound() -> None:
    server = HttpWeightServer(WeightStore(), token="", remote_bytes_per_s=25.0, uplink_bytes_per_s=100.0)
    try:
        east, west = server.links("east"), server.links("west")
        assert [[link.bytes_per_s for link in links] for links in (east, west)] == [[100.0, 25.0], [100.0, 25.0]]
        assert east[0] is west[0]
        assert east[1] is not west[1]
        assert east[1] is server.links("east")[1]
        assert not server.links("")
    finally:
        server.close()


class Unusable:
    """Certificates that are just being replaced."""

    server_name = "there"

    def ssl_context(self, *, server: bool) -> None:
        raise ValueError("half of a certificate")


async def test_a_connection_that_cannot_be_used_is_a_break(served: tuple[str, pb.VersionName]) -> None:
    with pytest.raises(SourceBrokenError, match="half of a certificate"):
        await HttpSource.connect(served[0], tls=Unusable(), token="", role="trainer")
