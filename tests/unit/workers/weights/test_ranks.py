"""Versions whose slices several ranks hold, each with a server of its own: what a pull fetches from whom."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.address import BadSourceError, Route
from streamrl_workers.weights.cache import WeightCache
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.hashing import SliceBytes, TensorBytes
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.pull import Nearby, VersionGoneError, pull
from streamrl_workers.weights.store import RelayStore, WeightStore
from support.runs import wait_for

DEADLINE_S = 120.0
TOKEN = "secret"
ROWS, ROW_BYTES = 30, 1000
SHARDED = ("w1", "w2")


def tensors(step: int) -> dict[str, TensorBytes]:
    """A few bytes of each row are the step's own; of `w2` only in its last row; `bias` never changes."""
    found = {"bias": TensorBytes("uint8", (), memoryview(b"b"))}
    for name in SHARDED:
        data = bytearray(random.Random(name).randbytes(ROWS * ROW_BYTES))
        for row in range(ROWS) if name == "w1" else (ROWS - 1,):
            data[row * ROW_BYTES] = step
        found[name] = TensorBytes("uint8", (ROWS, ROW_BYTES), memoryview(bytes(data)))
    return found


class Server(HttpWeightServer):
    """Knows what it was asked for; `piece` may change what is sent."""

    slice_bytes = 1000

    def __init__(self, store, *, port: int = 0) -> None:
        self.asked: list[tuple[int, int]] = []
        self.piece: Callable[[memoryview], memoryview] = lambda data: data
        super().__init__(store, token=TOKEN, port=port)

    def content(self, content_hash, *, begin, end):
        self.asked.append((begin, end))
        for piece in super().content(content_hash, begin=begin, end=end):
            yield self.piece(piece)


class Ranks:
    """A trainer's ranks, each with its store and server."""

    def __init__(self, count: int, *, deltas: bool = False) -> None:
        self.stores = [WeightStore(deltas=DeltaStore() if deltas else None) for _ in range(count)]
        self.servers = [Server(store) for store in self.stores]

    def publish(self, step: int, *, attempt: int = 1) -> pb.WeightsAvailable:
        rows = ROWS // len(self.stores)
        given = tensors(step)
        parts = {}
        for rank, store in reversed([*enumerate(self.stores)]):
            slices = [_rows(name, given[name], rank * rows, (rank + 1) * rows) for name in SHARDED]
            if rank:
                with store.pulling(store.publish_part(attempt=attempt, step=step, slices=slices)) as part:
                    parts[self.servers[rank].address] = part
        whole = {"bias": given["bias"]}
        version = self.stores[0].publish(attempt=attempt, step=step, tensors=whole, slices=slices, parts=lambda: parts)
        return pb.WeightsAvailable(version=version, address=self.servers[0].address)

    def asked_bytes(self) -> list[int]:
        """Of each rank, since the last time."""
        found = [sum(end - begin for begin, end in server.asked) for server in self.servers]
        for server in self.servers:
            server.asked.clear()
        return found

    def close(self) -> None:
        for server in self.servers:
            server.close()


def _rows(name: str, tensor: TensorBytes, first: int, end: int) -> SliceBytes:
    return SliceBytes(name, tensor.dtype, tensor.shape, first, tensor.data[first * ROW_BYTES : end * ROW_BYTES])


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3, deltas=True)
    yield made
    made.close()


async def pulled(
    target: pb.WeightsAvailable,
    *,
    nearby: Nearby | None = None,
    arrived: Callable[[int], None] = lambda _: None,
    dials_ranks: bool = True,
) -> Route:
    """Pull all of step `target.version.step`."""

    async def connect(to: pb.WeightsAvailable) -> HttpSource:
        role = "generator" if to.peer else "trainer"
        return await HttpSource.connect(to.address, tls=None, token=TOKEN, role=role)

    route = Route(target)
    found = await pull(
        route,
        timeout_s=DEADLINE_S,
        connect=connect,
        arrived=lambda _, size: arrived(size),
        nearby=nearby,
        dials_ranks=dials_ranks,
    )
    assert found == tensors(target.version.step)
    return route


SHARE = len(SHARDED) * ROWS * ROW_BYTES // 3
"""Bytes that each of three ranks holds, without the bias."""


async def test_each_slice_comes_from_the_rank_that_holds_it(ranks: Ranks) -> None:
    nearby = Nearby()
    route = await pulled(ranks.publish(1), nearby=nearby)
    assert ranks.asked_bytes() == [SHARE + 1, SHARE, SHARE]
    assert len({id(tensor.buffer.obj) for tensor in nearby.held.values()}) == 1, "one piece of memory"
    seconds = route.times.seconds()
    assert all(seconds[part] > 0 for part in ("manifest", "fetch", "verify"))
    assert seconds["deltas"] == seconds["cache"] == 0


async def test_what_did_not_change_is_not_fetched(ranks: Ranks) -> None:
    """The bias is shared with the version before; of `w2` the slices of two ranks are copied; the rest comes as deltas."""
    spared = list[int]()
    nearby = Nearby(delta_used=spared.append)
    await pulled(ranks.publish(1), nearby=nearby)
    ranks.asked_bytes()
    before = dict(nearby.held)
    bytes_before = {name: bytes(tensor.buffer) for name, tensor in before.items()}
    route = await pulled(ranks.publish(2), nearby=nearby)
    asked = ranks.asked_bytes()
    assert 0 < sum(asked) < SHARE / 10
    assert (len(spared), sum(spared) + sum(asked)) == (4, 4 * SHARE // 2)
    assert route.times.deltas.seconds > 0
    assert nearby.held["bias"].buffer is before["bias"].buffer
    assert {name: bytes(tensor.buffer) for name, tensor in before.items()} == bytes_before, "a base was written to"


async def test_other_boundaries_are_another_version(ranks: Ranks) -> None:
    """After a restart with two ranks what fits is taken of what is held, and nothing is taken wrongly."""
    nearby = Nearby()
    first = ranks.publish(1)
    await pulled(first, nearby=nearby)
    restarted = Ranks(2, deltas=True)
    try:
        again = restarted.publish(1, attempt=2)
        assert again.version.hash != first.version.hash
        await pulled(again, nearby=nearby)
        assert sum(restarted.asked_bytes()) == 3 * SHARE, "all but the bias"
        await pulled(restarted.publish(2, attempt=2), nearby=nearby)
        assert sum(restarted.asked_bytes()) < SHARE / 10
    finally:
        restarted.close()


async def test_a_rank_that_is_not_reached_holds_up_no_slice_of_another(ranks: Ranks) -> None:
    target = ranks.publish(1)
    absent, arrived_bytes = ranks.servers[1], 0
    await asyncio.to_thread(absent.close)

    def arrived(size: int) -> None:
        nonlocal arrived_bytes
        arrived_bytes += size

    pulling = asyncio.create_task(pulled(target, arrived=arrived))
    await asyncio.to_thread(wait_for, lambda: arrived_bytes == 2 * SHARE + 1, what="the slices of the other ranks")
    ranks.servers[1] = Server(ranks.stores[1], port=int(absent.address.rpartition(":")[2]))
    await pulling
    assert ranks.asked_bytes() == [SHARE + 1, SHARE, SHARE]


async def test_a_rank_that_dies_is_asked_for_what_it_has_not_sent(ranks: Ranks) -> None:
    target = ranks.publish(1)
    dying, store = ranks.servers[1], ranks.stores[1]
    total, arrived_bytes = 3 * SHARE + 1, 0
    has_begun, may_die = threading.Semaphore(0), threading.Event()

    def die(data: memoryview) -> memoryview:
        """Of each slice one piece is sent."""
        if threading.current_thread() in sent_by:
            has_begun.release()
            assert may_die.wait(DEADLINE_S)
            raise ConnectionResetError
        sent_by.add(threading.current_thread())
        return data

    def arrived(size: int) -> None:
        nonlocal arrived_bytes
        arrived_bytes += size

    sent_by = set[threading.Thread]()
    dying.piece = die
    pulling = asyncio.create_task(pulled(target, arrived=arrived))
    for _ in SHARDED:
        assert await asyncio.to_thread(has_begun.acquire, timeout=DEADLINE_S)
    await asyncio.to_thread(wait_for, lambda: arrived_bytes == total - SHARE, what="the slices of the other ranks")
    may_die.set()
    port = int(dying.address.rpartition(":")[2])
    await asyncio.to_thread(dying.close)
    ranks.servers[1] = Server(store, port=port)
    await pulling
    assert arrived_bytes == total
    assert dying.asked == [(0, SHARE // 2)] * 2
    assert ranks.servers[1].asked == [(ROW_BYTES, SHARE // 2)] * 2, "what had arrived is not asked for again"
    assert ranks.asked_bytes() == [SHARE + 1, SHARE - 2 * ROW_BYTES, SHARE]


async def test_a_slice_that_a_rank_has_damaged_names_it(ranks: Ranks) -> None:
    def damaged(data: memoryview) -> memoryview:
        return memoryview(bytes([data[0] ^ 1])) if len(data) == 1 else memoryview(bytes(data[:-1]) + b"x")

    ranks.servers[2].piece = damaged
    rank = ranks.servers[2].address
    with pytest.raises(BadSourceError, match=rf"tensor w\d, of rank {rank}: corrupt: its bytes hash to"):
        await pulled(ranks.publish(1))


async def test_a_rank_that_keeps_the_version_no_longer(ranks: Ranks) -> None:
    target = ranks.publish(1)
    for step in (2, 3):
        ranks.stores[2].publish_part(attempt=1, step=step, slices=[])
    with pytest.raises(VersionGoneError, match=r"version \(1, 1\) is not kept"):
        await pulled(target)


async def test_a_peer_passes_on_a_version_of_several_ranks(ranks: Ranks) -> None:
    relay = RelayStore()
    peer = Server(relay)
    try:
        target = ranks.publish(1)
        await pulled(target, nearby=Nearby(relay=relay))
        ranks.asked_bytes()
        await pulled(pb.WeightsAvailable(version=target.version, address=peer.address, peer=True))
        assert sum(end - begin for begin, end in peer.asked) == 3 * SHARE + 1
        assert ranks.asked_bytes() == [0, 0, 0]
    finally:
        peer.close()


class PassingOn(WeightStore):
    """Rank 0's, which gives the others' slices too."""

    ranks: "Ranks"

    def content(self, content_hash: bytes) -> memoryview | None:
        found = (WeightStore.content(store, content_hash) for store in self.ranks.stores)
        return next((data for data in found if data is not None), None)


async def test_ranks_that_cannot_be_dialled_from_here_are_not(ranks: Ranks) -> None:
    store = PassingOn()
    store.ranks, ranks.stores[0], ranks.servers[0].store = ranks, store, store
    await pulled(ranks.publish(1), dials_ranks=False)
    assert ranks.asked_bytes() == [3 * SHARE + 1, 0, 0]


async def test_a_cache_keeps_slices(ranks: Ranks, tmp_path: Path) -> None:
    read = list[int]()
    nearby = Nearby(cache=WeightCache(tmp_path, most_bytes=10**9, name="a", was_read=read.append))
    files = tmp_path / "blake3"

    target = ranks.publish(1)
    await pulled(target, nearby=nearby)
    slices = 3 * len(SHARDED) + 1
    await asyncio.to_thread(wait_for, lambda: len([*files.glob("[!.]*")]) == slices, what="the slices")
    ranks.asked_bytes()
    nearby.held.clear()
    route = await pulled(target, nearby=nearby)
    assert sum(ranks.asked_bytes()) == 0
    assert sum(read) == 3 * SHARE + 1
    assert route.times.cache.seconds > 0
    damaged = next(path for path in files.iterdir() if path.stat().st_size == SHARE // 2)
    damaged.write_bytes(b"x" * (SHARE // 2))
    nearby.held.clear()
    await pulled(target, nearby=nearby)
    assert sorted(ranks.asked_bytes()) == [0, 0, SHARE // 2]
    nearby.cache.close()
