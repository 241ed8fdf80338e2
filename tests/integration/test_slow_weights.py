"""A link on which a version takes longer than a training step: pulls come to their end all the same."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash, tensors_hash
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.puller import Puller
from streamrl_workers.weights.store import WeightStore
from support.weight_servers import TOKEN, pull_along

DEADLINE_S = 240.0
CHUNK_BYTES, CHUNKS, TENSORS = 1024, 8, 4
A_STEP = 4
"""Chunks that the link carries while the trainer takes a step; a version is `CHUNKS * TENSORS` of them."""


class Link(HttpWeightServer):
    """Carries as many chunks as the test has allowed."""

    slice_bytes = CHUNK_BYTES

    def __init__(self, store: WeightStore) -> None:
        self._allowed = threading.Semaphore(0)
        self._used = threading.Condition()
        self._open = 0
        self.more = threading.Event()
        """Whether tensors after the first are sent."""
        self.more.set()
        super().__init__(store, token=TOKEN)

    def content(self, content_hash: bytes, *, begin: int, end: int) -> Iterator[memoryview]:
        if content_hash not in {bytes_hash(tensors(step)["w0"].data) for step in range(40)}:
            self.more.wait(DEADLINE_S)
        for chunk in super().content(content_hash, begin=begin, end=end):
            self._allowed.acquire(timeout=DEADLINE_S)
            with self._used:
                self._open -= 1
                self._used.notify_all()
            yield chunk

    async def carry(self, chunks: int) -> None:
        """Until so many more chunks have been carried."""
        with self._used:
            self._open += chunks
        self._allowed.release(chunks)
        await asyncio.to_thread(self._until_carried)

    def _until_carried(self) -> None:
        with self._used:
            assert self._used.wait_for(lambda: self._open <= 0, DEADLINE_S)

    def open(self) -> None:
        """No limit any more."""
        self._allowed.release(10_000)


def tensors(step: int) -> dict[str, TensorBytes]:
    contents = [memoryview(bytes([step % 256, number]) * (CHUNK_BYTES * CHUNKS // 2)) for number in range(TENSORS)]
    return {f"w{number}": TensorBytes("uint8", (len(data),), data) for number, data in enumerate(contents)}


class Trainer:
    """Publishes versions; the generator's puller hears of each."""

    def __init__(self, store: WeightStore, link: Link, address: str) -> None:
        self.store, self.link, self.address = store, link, address
        self.loaded: list[int] = []
        self.news = asyncio.Event()
        self.puller = Puller(self._pull, wake=self._woken, failed=lambda _, error: self.failures.append(error))
        self.failures: list[str] = []

    async def _pull(self, route: Route) -> dict[str, TensorBytes]:
        return await pull_along(route, timeout_s=DEADLINE_S)

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
    running = Trainer(store, link, link.address)
    try:
        yield running
    finally:
        await running.puller.close()
        link.open()
        link.more.set()
        await asyncio.to_thread(link.close)


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
