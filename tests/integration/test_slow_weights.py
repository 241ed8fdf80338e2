"""A link on which a version takes longer than a training step: pulls come to their end all the same."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.services import WEIGHTS, serve
from streamrl_workers.weights.hashing import TensorBytes, tensors_hash
from streamrl_workers.weights.pull import Puller, pull
from streamrl_workers.weights.server import WeightsService, WeightStore

DEADLINE_S = 240.0
CHUNK_BYTES, CHUNKS, TENSORS = 1024, 8, 4
A_STEP = 4
"""Chunks that the link carries while the trainer takes a step; a version is `CHUNKS * TENSORS` of them."""


class Link(WeightsService):
    """Carries as many chunks as the test has allowed."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self._allowed = asyncio.Semaphore(0)
        self._open = 0
        self._used = asyncio.Event()
        self.more = asyncio.Event()
        """Whether tensors after the first are sent."""
        self.more.set()

    async def Fetch(self, request: pb.FetchRequest, context) -> AsyncIterator[pb.Chunk]:  # noqa: N802 - the RPC's name
        if request.tensor != "w0":
            await self.more.wait()
        async for chunk in super().Fetch(request, context):
            await self._allowed.acquire()
            self._open -= 1
            self._used.set()
            yield chunk

    async def carry(self, chunks: int) -> None:
        """Until so many more chunks have been carried."""
        self._open += chunks
        for _ in range(chunks):
            self._allowed.release()
        async with asyncio.timeout(DEADLINE_S):
            while self._open:
                self._used.clear()
                await self._used.wait()

    def open(self) -> None:
        """No limit any more."""
        for _ in range(10_000):
            self._allowed.release()


def tensors(step: int) -> dict[str, TensorBytes]:
    data = memoryview(bytes([step % 256]) * (CHUNK_BYTES * CHUNKS))
    return {f"w{number}": TensorBytes("uint8", (len(data),), data) for number in range(TENSORS)}


class Trainer:
    """Publishes versions; the generator's puller hears of each."""

    def __init__(self, store: WeightStore, link: Link, address: str) -> None:
        self.store, self.link, self.address = store, link, address
        self.loaded: list[int] = []
        self.news = asyncio.Event()
        self.puller = Puller(self._pull, wake=self._woken, failed=lambda _, error: self.failures.append(error))
        self.failures: list[str] = []

    async def _pull(self, target: pb.WeightsAvailable) -> dict[str, TensorBytes]:
        return await pull(target, timeout_s=DEADLINE_S, chunk_bytes=CHUNK_BYTES, token="t")

    def _woken(self) -> None:
        if self.puller.ready:
            pulled = self.puller.take()
            assert tensors_hash(pulled.tensors) == pulled.version.hash
            self.loaded.append(pulled.version.step)
        self.news.set()

    def publish(self, step: int, *, attempt: int = 1) -> None:
        version = self.store.publish(attempt=attempt, step=step, tensors=tensors(step))
        self.puller.announce(pb.WeightsAvailable(version=version, address=self.address))

    async def until_loaded(self, step: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.loaded[-1:] != [step]:
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def trainer() -> AsyncIterator[Trainer]:
    store = WeightStore()
    link = Link(store)
    server = grpc.aio.server()
    serve(server, WEIGHTS, link)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = Trainer(store, link, f"127.0.0.1:{port}")
    try:
        yield running
    finally:
        await running.puller.close()
        await server.stop(None)


async def test_a_pull_that_outlasts_many_steps_comes_to_its_end() -> None:
    async with trainer() as running:
        for step in range(40):  # the link carries 5 versions in this time
            running.publish(step)
            await running.link.carry(A_STEP)
        assert len(running.loaded) >= 4
        assert running.loaded == sorted(running.loaded)
        running.link.open()
        await running.until_loaded(39)
        assert len(running.loaded) <= 7  # the newest follows the one that was on its way: nothing between
        assert running.failures == []


async def test_a_version_is_kept_between_its_tensors() -> None:
    async with trainer() as running:
        running.link.more.clear()
        running.publish(0)
        await running.link.carry(CHUNKS)  # all of the first tensor: no other is being fetched
        for step in (1, 2):
            running.publish(step)
        running.link.more.set()
        running.link.open()
        await running.until_loaded(2)
        assert running.loaded == [0, 2]
        assert running.failures == []


async def test_a_new_attempt_ends_the_old_ones_pull() -> None:
    async with trainer() as running:
        running.publish(9)
        await running.link.carry(A_STEP)
        running.publish(3, attempt=2)
        running.link.open()
        await running.until_loaded(3)
        assert running.loaded == [3]
