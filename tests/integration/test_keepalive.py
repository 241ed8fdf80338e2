"""A peer that is frozen (SIGSTOP) is noticed in the time that `channel.py` states: by a client of it, and by its server."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from streamrl_workers.stream import channel
from streamrl_workers.stream.channel import PEER_LOST_S, bind, keepalive_options, make_server

TOKEN, METHOD = "t", "/streamrl.test/Hang"
LATE_S = 60.0
"""gRPC's own minute for an answer: who waits for that has not set what governs."""
SCALED_S = 10.0
"""Of which half is for the answer to a ping: a peer that is only slow is not taken for lost."""
PEER = """
import asyncio, sys, grpc.aio
sys.path.insert(0, sys.argv[1])
from integration import test_keepalive as peers
asyncio.run(getattr(peers, sys.argv[2])(*sys.argv[3:]))
"""


async def hang(_requests: object, context: grpc.aio.ServicerContext) -> None:
    """Say that the call is there, then nothing; a client that is lost ends this."""
    await context.write(b"here")
    await asyncio.Event().wait()


def server_of(handler: object) -> grpc.aio.Server:
    server = make_server(TOKEN)
    service, name = METHOD.strip("/").split("/")
    method = grpc.stream_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    return server


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def be_server(*_: str) -> None:
    """A process of its own: serve, and say where."""
    server = server_of(hang)
    say(bind(server, port=0))
    await server.start()
    await server.wait_for_termination()


async def be_client(address: str) -> None:
    """A process of its own: hold a call."""
    async with channel.open_channel(address) as opened:
        call = opened.stream_stream(METHOD)(metadata=(("streamrl-token", TOKEN),))
        say((await call.read()).decode())
        await asyncio.Event().wait()


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


async def start(role: str, *arguments: str) -> "tuple[subprocess.Popen[str], str]":
    """The process, and the line that it says first."""
    command = [sys.executable, "-c", PEER, str(Path(__file__).parents[1]), role, *arguments]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, (await asyncio.to_thread(process.stdout.readline)).strip()


@pytest.mark.parametrize(
    "lost_s", [SCALED_S, pytest.param(PEER_LOST_S, marks=pytest.mark.soak)], ids=["scaled", "as stated"]
)
class TestFrozenPeer:
    """`lost_s`: of the side that notices."""

    @pytest.fixture(autouse=True)
    def scaled(self, lost_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        options = dict(channel.OPTIONS) | dict(keepalive_options(lost_s))
        monkeypatch.setattr(channel, "_CHANNEL_OPTIONS", tuple((dict(channel._CHANNEL_OPTIONS) | options).items()))
        monkeypatch.setattr(channel, "_SERVER_OPTIONS", tuple((dict(channel._SERVER_OPTIONS) | options).items()))

    async def test_a_client_notices_a_frozen_server(
        self, lost_s: float, started: "list[subprocess.Popen[str]]"
    ) -> None:
        server, address = await start("be_server")
        started.append(server)
        async with channel.open_channel(address) as opened:
            call = opened.stream_stream(METHOD)(metadata=(("streamrl-token", TOKEN),))
            assert await call.read() == b"here"
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout") as noticed:
                async with asyncio.timeout(LATE_S):
                    await call.read()
        assert noticed.value.code() == grpc.StatusCode.UNAVAILABLE

    async def test_a_server_notices_a_frozen_client(
        self, lost_s: float, started: "list[subprocess.Popen[str]]"
    ) -> None:
        noticed = asyncio.Event()

        async def hold(requests: object, context: grpc.aio.ServicerContext) -> None:
            try:
                await hang(requests, context)
            finally:
                noticed.set()

        server = server_of(hold)
        address = bind(server, port=0)
        await server.start()
        try:
            client, said = await start("be_client", address)
            started.append(client)
            assert said == "here"
            os.kill(client.pid, signal.SIGSTOP)
            async with asyncio.timeout(LATE_S):
                await noticed.wait()
        finally:
            await server.stop(None)
