"""Versions in memory that an engine's processes map: where they lie, and what a pull that fails leaves alone."""

import gc
from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.pull import BadSourceError, Nearby, Route, pull
from streamrl_workers.weights.shared_memory import shared, shared_part
from streamrl_workers.weights.source import Source
from streamrl_workers.weights.store import WeightStore

NAMES = ("a", "b", "c", "d")
SIZE = 10_000


def tensors(step: int) -> dict[str, TensorBytes]:
    return {
        name: TensorBytes("uint8", (SIZE,), memoryview(bytes([step, number]) * (SIZE // 2)))
        for number, name in enumerate(NAMES)
    }


class DamagedStore(WeightStore):
    """Gives other bytes for one tensor."""

    damaged = b""

    def content(self, content_hash: bytes) -> memoryview | None:
        found = super().content(content_hash)
        return memoryview(bytes(SIZE)) if content_hash == self.damaged else found


async def test_a_pull_that_fails_in_the_middle_leaves_the_version_before_in_its_memory() -> None:
    store, nearby = DamagedStore(), Nearby()
    server = HttpWeightServer(store, token="secret")

    async def connect(target: pb.WeightsAvailable) -> Source:
        return await HttpSource.connect(target.address, tls=None, token="secret", role="trainer")

    async def pulled(step: int) -> dict[str, TensorBytes]:
        version = store.publish(attempt=1, step=step, tensors=tensors(step))
        route = Route(pb.WeightsAvailable(version=version, address=server.address))
        return await pull(route, timeout_s=240.0, connect=connect, nearby=nearby, memory=shared)

    try:
        before = await pulled(1)
        store.damaged = bytes_hash(tensors(2)["c"].data)
        with pytest.raises(BadSourceError):
            await pulled(2)
        assert {name: bytes(one.data) for name, one in before.items()} == {
            name: bytes(one.data) for name, one in tensors(1).items()
        }
        store.damaged = b""
        after = await pulled(2)
    finally:
        server.close()
    memories = [
        {id(part[0]) for one in version.values() if (part := shared_part(one.data))} for version in (before, after)
    ]
    assert [len(found) for found in memories] == [1, 1]
    assert memories[0] != memories[1]


def test_another_process_finds_a_part_where_it_is_said_to_lie() -> None:
    part = shared(1000)[64:128]
    part[:] = bytes(range(64))
    found = shared_part(part)
    assert found is not None
    memory, offset = found
    assert Path(memory.path).read_bytes()[offset : offset + 64] == bytes(range(64))


def test_other_memory_is_none_that_can_be_mapped() -> None:
    assert shared_part(memoryview(bytearray(8))) is None
    assert shared_part(shared(8).toreadonly()) is None
    assert shared_part(shared(0)) is None


def test_memory_goes_with_the_last_view_of_it() -> None:
    part = shared(1000)[:10]
    found = shared_part(part)
    assert found is not None
    file = found[0].path
    identity = Path(file).stat().st_ino
    del part, found
    gc.collect()
    assert not Path(file).exists() or Path(file).stat().st_ino != identity


def test_too_much_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="the system gives no"):
        shared(2**62)
