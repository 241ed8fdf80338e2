"""Weights services in processes of their own, for tests of the pull."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import grpc.aio

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import bind, make_server
from streamrl_workers.stream.services import WEIGHTS, serve
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash
from streamrl_workers.weights.server import WeightsService, WeightStore

TOKEN = "secret"
START_TIMEOUT_S = 240.0
SIZES = {"big": 8 * 2**20, "small": 1000, "odd": 12345, "empty": 0}
"""Bytes of each tensor of the test version."""


def make_tensors(step: int = 5) -> dict[str, TensorBytes]:
    """The same bytes in every process."""
    pattern = bytes((step + place * 7) % 251 for place in range(1009))
    return {
        name: TensorBytes("uint8", (size,), memoryview((pattern * (size // 1009 + 1))[:size]))
        for name, size in SIZES.items()
    }


class Slowed(WeightsService):
    """Serves at most `allowed` chunks of a tensor in all, then waits for its death."""

    def __init__(self, store: WeightStore, *, allowed: int, served: Connection) -> None:
        super().__init__(store)
        self._left = allowed
        self._served = served

    async def Fetch(self, request, context):  # noqa: N802
        self._served.send((request.tensor, request.offset))
        async for chunk in super().Fetch(request, context):
            if self._left == 0 and request.tensor == "big":
                self._served.send("stuck")
                await asyncio.Event().wait()
            self._left -= request.tensor == "big"
            yield chunk


class Corrupting(WeightsService):
    """Flips a bit in the last chunk of `odd`."""

    async def Fetch(self, request, context):  # noqa: N802
        async for chunk in super().Fetch(request, context):
            data = bytearray(chunk.data)
            data[-1] ^= 1 if request.tensor == "odd" else 0
            yield pb.Chunk(data=bytes(data))


class Older(WeightsService):
    """Of a release that names no algorithm."""

    async def GetManifest(self, request, context):  # noqa: N802
        async for frame in super().GetManifest(request, context):
            manifest = pb.Manifest.FromString(frame.data)
            manifest.ClearField("hash_algorithm")
            yield pb.Frame(data=manifest.SerializeToString())


class Rebased(WeightsService):
    """Names other bytes for the tensor `big` than the version's hash was formed of."""

    async def GetManifest(self, request, context):  # noqa: N802
        async for frame in super().GetManifest(request, context):
            manifest = pb.Manifest.FromString(frame.data)
            manifest.tensors[0].hash = bytes_hash(memoryview(b"another base"))
            yield pb.Frame(data=manifest.SerializeToString())


async def _serve(pipe: Connection, *, kind: str, port: int, allowed: int) -> None:
    store = WeightStore()
    store.publish(attempt=1, step=5, tensors=make_tensors())
    service = {
        "plain": lambda: WeightsService(store),
        "slowed": lambda: Slowed(store, allowed=allowed, served=pipe),
        "corrupting": lambda: Corrupting(store),
        "older": lambda: Older(store),
        "rebased": lambda: Rebased(store),
    }[kind]()
    server = make_server(TOKEN)
    serve(server, WEIGHTS, service)
    address = bind(server, port=port)
    await server.start()
    pipe.send(address)
    await asyncio.Event().wait()


def _main(pipe: Connection, kind: str, port: int, allowed: int) -> None:
    grpc.aio.init_grpc_aio()
    asyncio.run(_serve(pipe, kind=kind, port=port, allowed=allowed))


@contextmanager
def weight_server(
    kind: str = "plain", *, port: int = 0, allowed: int = 10**9
) -> Iterator[tuple[str, Connection, object]]:
    """A serving process: its address, its pipe of events, and the process itself (killed at the end)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, kind, port, allowed), daemon=True)
    process.start()
    try:
        assert ours.poll(START_TIMEOUT_S), f"waited {START_TIMEOUT_S} s for the Weights service to start"
        yield ours.recv(), ours, process
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()
