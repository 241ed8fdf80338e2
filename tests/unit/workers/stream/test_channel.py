"""What a gRPC server of ours does before it knows who calls."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream import channel
from streamrl_workers.stream.auth import call_metadata
from streamrl_workers.stream.channel import SCHEDULER, bind, client, make_server, open_channel, serve

DEADLINE_S = 60.0


class Models:
    """Answers with one part."""

    async def GetModel(self, request: bytes, context: object) -> AsyncIterator[pb.ModelFile]:  # noqa: N802 - as the protocol has it
        del request, context
        yield pb.ModelFile(name="config.json")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = make_server("secret")
    serve(server, SCHEDULER, Models())
    bound = bind(server, port=0)
    await server.start()
    yield bound
    await server.stop(None)


async def test_a_call_without_a_token_is_refused_before_its_message(address: str) -> None:
    async with open_channel(address) as opened:
        call = opened.stream_stream("/streamrl.v1alpha1.Scheduler/GetModel")()
        assert await asyncio.wait_for(call.code(), DEADLINE_S) == grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_with_the_token_is_answered(address: str) -> None:
    async with open_channel(address) as opened:
        call = client(opened, SCHEDULER).GetModel(pb.ModelRequest(), metadata=call_metadata("secret"))
        assert [part.name async for part in call] == ["config.json"]


async def test_connections_are_bounded_below_the_files_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "_MAX_CALLS", 2)
    server = make_server("secret")
    host, _, port = bind(server, port=0).rpartition(":")
    await server.start()
    try:
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        read = [asyncio.create_task(reader.read()) for reader, _ in opened]
        done, _ = await asyncio.wait(read, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE_S)
        assert len(done) == 1
        for _, writer in opened:
            writer.transport.abort()
        await asyncio.gather(*read, return_exceptions=True)
    finally:
        await server.stop(None)


FEW_FILES = """
import asyncio, resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from streamrl_workers.stream.channel import bind, make_server

async def main():
    server = make_server("secret")
    host, _, port = bind(server, port=0).rpartition(":")
    await server.start()
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(80)]
    settings = [asyncio.create_task(reader.readexactly(9)) for reader, _ in opened]  # gRPC's first frame
    await asyncio.wait_for(asyncio.gather(*settings), float(DEADLINE_S))

asyncio.run(main())
"""


def test_a_shell_with_few_files_bounds_no_connections() -> None:
    """1,024 is what many have by default; the system gives more to those who ask."""
    program = FEW_FILES.replace("DEADLINE_S", str(DEADLINE_S))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * DEADLINE_S)
