"""How the streams of a pull share its work, and what one of them that breaks costs."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.address import BadSourceError, Route, WeightsError
from streamrl_workers.weights.delta import encode
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.hashing import (
    HASH_ALGORITHM,
    SliceBytes,
    TensorBytes,
    bytes_hash,
    entry_of,
    manifest_hash,
)
from streamrl_workers.weights.pull import HeldTensor, Nearby, pull
from streamrl_workers.weights.source import (
    BusyTime,
    NotKeptError,
    Piece,
    SourceBrokenError,
    SourceRefusedError,
    WantedSlice,
    in_thread,
)
from streamrl_workers.weights.store import WeightStore

SIZE = 10_000
NAMES = ("a", "b", "c", "d")
DEADLINE_S = 240.0


def tensors(step: int, *, names: tuple[str, ...] = NAMES, shared: bool = False) -> dict[str, TensorBytes]:
    return {
        name: TensorBytes("uint8", (SIZE,), memoryview(bytes([step, 0 if shared else number]) * (SIZE // 2)))
        for number, name in enumerate(names)
    }


class Server:
    """A store; its streams are numbered as they are opened, and do what a test says before each piece."""

    def __init__(self) -> None:
        self.store = WeightStore(deltas=DeltaStore())
        self.opened = 0
        self.fetched: list[tuple[bytes, int]] = []
        """Hash and beginning of each piece that was asked for."""
        self.all_ask = asyncio.Event()
        """Four were."""

    def manifest(self, version: pb.VersionName) -> pb.Manifest:
        """What a stream gives."""
        with self.store.pulling(version) as manifest:
            assert manifest is not None
            return pb.Manifest.FromString(manifest.SerializeToString())

    async def open(self, number: int) -> None:
        """Before a stream is there."""

    async def before(self, number: int, piece: Piece) -> None:
        """Before a piece is filled."""

    async def connect(self, target: pb.WeightsAvailable) -> "Stream":
        self.opened += 1
        number = self.opened
        await self.open(number)
        return Stream(self, number)

    def publish(self, step: int, **options) -> Route:
        version = self.store.publish(attempt=1, step=step, tensors=tensors(step, **options))
        return Route(pb.WeightsAvailable(version=version, address="there"))

    async def pull(self, route: Route, *, nearby: Nearby | None = None) -> dict[str, TensorBytes]:
        return await pull(route, timeout_s=DEADLINE_S, connect=self.connect, nearby=nearby)


class Stream:
    def __init__(self, server: Server, number: int) -> None:
        self.server, self.number = server, number

    async def manifest(self, version: pb.VersionName) -> pb.Manifest:
        return self.server.manifest(version)

    async def fetch(self, piece: Piece, *, arrived: Callable[[int], None]) -> None:
        assert piece.begin < piece.end, "no such range"
        self.server.fetched.append((piece.hash, piece.begin))
        if len(self.server.fetched) == len(NAMES):
            self.server.all_ask.set()
        await self.server.before(self.number, piece)
        self.fill(piece)

    def fill(self, piece: Piece) -> None:
        data = self.server.store.content(piece.hash)
        if data is None:
            raise NotKeptError("it is not there")
        if len(data) != len(piece.buffer):
            raise SourceRefusedError("it has another size")
        piece.buffer[piece.begin : piece.end] = data[piece.begin : piece.end]
        piece.begin = piece.end

    def abort(self) -> None:
        pass

    async def close(self) -> None:
        pass


def held(step: int, **options) -> Iterator[tuple[str, HeldTensor]]:
    for name, tensor in tensors(step, **options).items():
        yield name, HeldTensor(entry_of(name, tensor), tensor.data)


async def test_a_piece_that_arrived_while_another_stream_broke_is_not_asked_for_again():
    class Breaking(Server):
        async def before(self, number: int, piece: Piece) -> None:
            if number == 1 and self.opened < 5:
                await self.all_ask.wait()
                raise SourceBrokenError("broken")
            if self.opened < 5:
                try:
                    await asyncio.Event().wait()
                finally:
                    Stream(self, number).fill(piece)  # its thread comes to the end all the same

    server = Breaking()
    assert await server.pull(server.publish(1)) == tensors(1)
    assert len(server.fetched) == 5


async def test_names_that_share_a_delta_fetch_it_once():
    class Slow(Server):
        async def before(self, number: int, piece: Piece) -> None:
            for _ in range(100):
                await asyncio.sleep(0)

    server = Slow()
    server.publish(1, shared=True)
    route = server.publish(2, shared=True)
    nearby = Nearby(held=dict(held(1, shared=True)))
    assert await server.pull(route, nearby=nearby) == tensors(2, shared=True)
    assert len(server.fetched) == 1


class Alone(Server):
    """Takes one stream, which works until others were tried."""

    def __init__(self) -> None:
        super().__init__()
        self.all_tried = asyncio.Event()

    async def open(self, number: int) -> None:
        await asyncio.sleep(0)
        if number == 4:
            self.all_tried.set()
        if number > 1:
            raise SourceBrokenError("too many")

    async def before(self, number: int, piece: Piece) -> None:
        await self.all_tried.wait()


@pytest.mark.parametrize("holds", [False, True])
async def test_streams_that_cannot_be_opened_leave_all_to_the_first(holds: bool):
    server = Alone()
    server.publish(1)
    route = server.publish(2)
    assert await server.pull(route, nearby=Nearby(held=dict(held(1)) if holds else {})) == tensors(2)
    assert server.opened == 4, "in one attempt"
    assert len(server.fetched) == 4


async def test_a_cache_that_has_all_leaves_nothing_to_fetch_or_to_write():
    class Cache:
        def begin(self, entries, *, wait_s: float) -> BusyTime:
            return BusyTime()

        def shuffle(self, found) -> None:
            pass

        def write(self, entry, data) -> None:
            raise AssertionError("it is there")

        async def fill(self, wanted: WantedSlice) -> bool:
            await asyncio.sleep(0)
            wanted.buffer[:] = next(t.data for t in tensors(1).values() if bytes_hash(t.data) == wanted.entry.hash)
            return True

        def accept(self, wanted: WantedSlice) -> None:
            pass

    server = Server()
    assert await server.pull(server.publish(1), nearby=Nearby(cache=Cache())) == tensors(1)
    assert server.opened == 1


async def test_a_source_that_cuts_slices_elsewhere_than_the_one_before_is_refused():
    """A version's hash has no sizes: a peer may lie of them."""

    class Lying(Server):
        def manifest(self, version: pb.VersionName) -> pb.Manifest:
            found = super().manifest(version)
            if self.opened == 1:
                first, second = found.tensors[0].slices
                first.size_bytes, second.size_bytes, second.first_row = SIZE // 4, 3 * SIZE // 4, SIZE // 4
            return found

        async def before(self, number: int, piece: Piece) -> None:
            if number == 1:
                raise SourceBrokenError("broken")

    server, data = Lying(), memoryview(bytes(SIZE))
    halves = [SliceBytes("w", "uint8", (SIZE,), begin, data[begin : begin + SIZE // 2]) for begin in (0, SIZE // 2)]
    version = server.store.publish(attempt=1, step=0, slices=halves)
    with pytest.raises(BadSourceError, match="other slices"):
        await server.pull(Route(pb.WeightsAvailable(version=version, address="there")))


async def test_tensors_that_seldom_change_keep_no_old_versions_in_memory():
    """Each of them was fetched last with another version, in whose memory it lies."""
    server, nearby, names = Server(), Nearby(), [f"w{number}" for number in range(8)]
    for step in range(len(names)):
        given = {
            name: TensorBytes("uint8", (SIZE,), memoryview(bytes([number, min(number, step)]) * (SIZE // 2)))
            for number, name in enumerate(names)
        }
        version = server.store.publish(attempt=1, step=step, tensors=given)
        route = Route(pb.WeightsAvailable(version=version, address="there"))
        assert await server.pull(route, nearby=nearby) == given
        pieces = {id(tensor.buffer.obj): len(tensor.buffer.obj) for tensor in nearby.held.values()}
        assert sum(pieces.values()) <= 2 * len(names) * (SIZE + 64)


async def test_what_is_fetched_one_after_the_other_needs_one_stream():
    server = Server()
    for step in (1, 2):
        server.publish(step, names=("a",))
    route = server.publish(3, names=("a",))
    assert await server.pull(route, nearby=Nearby(held=dict(held(1, names=("a",))))) == tensors(3, names=("a",))
    assert (len(server.fetched), server.opened) == (2, 1)


async def test_a_cancellation_between_a_break_and_its_siblings_end_is_kept():
    class Breaking(Server):
        task: asyncio.Task[dict[str, TensorBytes]]

        async def before(self, number: int, piece: Piece) -> None:
            if number == 1:
                await self.all_ask.wait()
                raise SourceBrokenError("broken")
            try:
                await asyncio.Event().wait()
            finally:
                self.task.cancel()
                for _ in range(10):
                    await asyncio.sleep(0)

    server = Breaking()
    server.task = asyncio.create_task(server.pull(server.publish(1)))
    with pytest.raises(asyncio.CancelledError):
        await server.task
    assert server.opened == 4


async def test_a_thread_that_writes_has_ended_when_its_task_has_however_often_that_is_cancelled():
    begun, go = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        assert go.wait(DEADLINE_S)

    task = asyncio.create_task(in_thread(write))
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    for _ in range(3):
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
async def test_what_cannot_be_made_of_a_delta_is_fetched_whole(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("streamrl_workers.weights.deltas._apply", failing)
    server = Server()
    server.publish(1)
    route = server.publish(2)
    assert await server.pull(route, nearby=Nearby(held=dict(held(1)))) == tensors(2)
    assert len(server.fetched) == 2 * len(NAMES)


async def test_a_delta_that_makes_other_bytes_costs_only_the_delta(monkeypatch: pytest.MonkeyPatch):
    """It is whole and names what is wanted, so only the bytes that it makes show it."""

    def lying(base: memoryview, new: memoryview, **names: object) -> bytes | None:
        return encode(base, memoryview(bytes(new[:-1]) + b"x"), **names)

    monkeypatch.setattr("streamrl_workers.weights.delta.encode", lying)
    failures, server = list[int](), Server()
    server.publish(1)
    route = server.publish(2)
    nearby = Nearby(held=dict(held(1)), delta_failed=lambda: failures.append(1))
    assert await server.pull(route, nearby=nearby) == tensors(2)
    assert (len(server.fetched), len(failures)) == (2 * len(NAMES), len(NAMES))


@pytest.mark.parametrize("size_bytes", [0, SIZE - 1, SIZE + 1, 2**50, 2**63, 2**64 - 1])
async def test_a_size_beside_the_hash_is_held_against_dtype_and_shape(size_bytes: int):
    class Foreign(Server):
        def manifest(self, version: pb.VersionName) -> pb.Manifest:
            manifest = super().manifest(version)
            manifest.tensors[0].slices[0].size_bytes = size_bytes
            return manifest

    server = Foreign()
    told = (
        "a slice has 0 bytes from row 0"
        if not size_bytes
        else rf"have {size_bytes} bytes, uint8 \[{SIZE}\] has {SIZE} bytes"
    )
    with pytest.raises(BadSourceError, match=told):
        await server.pull(server.publish(1))
    assert not server.fetched


@pytest.mark.parametrize("elements", [2**60, 2**63, 2**64 - 1])
async def test_a_version_for_which_there_is_no_memory_is_a_line(elements: int):
    entry = pb.TensorEntry(
        name="a", dtype="uint8", shape=[elements], slices=[pb.TensorSlice(size_bytes=elements, hash=bytes(32))]
    )

    class Large(Server):
        def manifest(self, version: pb.VersionName) -> pb.Manifest:
            return pb.Manifest(version=version, tensors=[entry], hash_algorithm=HASH_ALGORITHM)

    server = Large()
    route = Route(pb.WeightsAvailable(version=pb.VersionName(attempt=1, step=1, hash=manifest_hash([entry]))))
    with pytest.raises(WeightsError, match=r"the system gives no \d+ bytes of memory") as told:
        await server.pull(route)
    assert not isinstance(told.value, BadSourceError), "another source has it as large"


@pytest.mark.parametrize("field", ["size_bytes", "hash", "base_hash", "new_hash"])
@pytest.mark.parametrize("to_most", [True, False])
async def test_a_delta_that_is_described_wrong_costs_only_the_delta(field: str, to_most: bool):
    class Foreign(Server):
        def manifest(self, version: pb.VersionName) -> pb.Manifest:
            manifest = super().manifest(version)
            for delta in manifest.deltas:
                if field == "size_bytes":
                    delta.size_bytes = 2**64 - 1 if to_most else 0
                else:
                    setattr(delta, field, b"\1" * 32 if to_most else b"")
            return manifest

    server = Foreign()
    server.publish(1)
    assert await server.pull(server.publish(2), nearby=Nearby(held=dict(held(1)))) == tensors(2)
