"""Pulls one version of the weights, whole and verified.

    manifest, then each tensor from the first of these that has it:

    1. held      the version before: same name, hash and shape. Where adapters are trained that is the base.
    2. cache     a directory of the pool (`cache.py`)
    3. deltas    from the held tensor to this one, where the manifest names them (`deltas.py`)
    4. address   where the version was announced: the trainer, a peer, a folder. In pieces, by several streams, over new ones if one breaks

There is one deadline for all. Whatever is wrong with a cache or a delta, the tensor is fetched as if there were none.

Does not own how bytes travel (`transports.py`), putting weights into an engine, nor which version a generator may use (the scheduler issues by the one that it is told of).

Invariants:
- What is returned hashes to `version.hash`; otherwise a `WeightsError` is raised. Each byte is hashed once, where it lies, in a thread.
- Bytes that arrived are not asked for again after a break. Cancelling `pull` ends its calls and closes its connections.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import Backoff
from streamrl_workers.weights.cache import WeightCache
from streamrl_workers.weights.deltas import DeltaChains, KeptTensor
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash, reserved
from streamrl_workers.weights.manifest import ManifestError, check_manifest
from streamrl_workers.weights.relay_store import RelayStore
from streamrl_workers.weights.source import (
    NotKeptError,
    Piece,
    Source,
    SourceBrokenError,
    SourceRefusedError,
    SourceWaitingError,
)


class WeightsError(RuntimeError):
    """A version could not be had: what was awaited, from whom, and what came instead."""


class VersionGoneError(WeightsError):
    """The server keeps the version no longer (or never had it); asking again is pointless."""


class BadSourceError(WeightsError):
    """The source gave something else than the version that was announced; another source may have it."""


_STREAMS = 4
"""At once: hides the round trip of each request on a far link, and shares the work of encryption among processors."""
_PIECE_BYTES = 64 * 2**20
"""Of a tensor, by one request: the streams share a large one, and end at nearly the same time."""
STALLED_S = 10.0
"""Without a byte for so long, another source is asked for."""
_CACHE_SHARE = 0.25
"""Of a pull's time, for which it waits for a cache; in the rest the service sends what the cache did not give."""
_ALIGNMENT_BYTES = 64
"""Of a tensor in memory."""

_T = TypeVar("_T")
Connect = Callable[[pb.WeightsAvailable], Awaitable[Source]]
"""Opens one more stream to where a version was announced. Raises SourceBrokenError."""


Arrived = Callable[[pb.WeightsAvailable, int], None]
Memory = Callable[[int], memoryview]
"""Gives bytes for a version. Raises MemoryError."""


class Route:
    """A version, and where it is pulled from at the moment."""

    def __init__(
        self, target: pb.WeightsAvailable, *, stalled: Callable[[pb.WeightsAvailable], None] = lambda _: None
    ) -> None:
        """`stalled` is told when nothing comes from there, again and again."""
        self.target = target
        self.stalled = stalled
        self.sources: set[Source] = set()

    def move(self, target: pb.WeightsAvailable) -> None:
        """Go on from somewhere else, with what has arrived."""
        self.target = target
        for source in self.sources:
            source.abort()


async def pull(
    route: Route,
    *,
    timeout_s: float,
    connect: Connect,
    arrived: Arrived = lambda *_: None,
    nearby: "Nearby | None" = None,
    memory: Memory = reserved,
) -> dict[str, TensorBytes]:
    """Fetch and verify all tensors of a version that was announced.

    Args:
        route: the version, whose hash is what is verified, and the address that has it, which may become another.
        timeout_s: for all of it.
        connect: opens a stream to an address.
        arrived: called with the source and numbers of bytes that it has sent.
        memory: where what is fetched comes to lie.
        nearby: where tensors may be that need not be fetched; behind a pull that ended well it holds this version's.

    Raises:
        VersionGoneError: the version is not kept there.
        BadSourceError: refused or corrupted.
        WeightsError: not complete after `timeout_s`, or there is no memory for it.
    """
    run = _Pull(
        route,
        connect=connect,
        arrived=arrived,
        nearby=nearby or Nearby(),
        memory=memory,
        cache_s=timeout_s * _CACHE_SHARE,
    )
    watch = asyncio.create_task(run.watch(), name="weights-watch")
    try:
        async with asyncio.timeout(timeout_s):
            await run.finish()
    except BaseException as error:
        run.failed()
        if not isinstance(error, TimeoutError):
            raise
        raise WeightsError(f"{run.named()}: not complete after {timeout_s:g} s; {run.progress()}") from None
    finally:
        watch.cancel()
    return run.result()


@dataclass(slots=True, kw_only=True)
class FetchedTensor:
    """One tensor, on its way or there."""

    entry: pb.TensorEntry
    buffer: memoryview
    missing: list[Piece] = field(init=False)
    """What has not arrived; a piece stays until it is whole."""
    verified: bool = False

    def __post_init__(self) -> None:
        size = len(self.buffer)
        self.missing = [
            Piece(hash=self.entry.hash, buffer=self.buffer, begin=begin, end=min(size, begin + _PIECE_BYTES))
            for begin in range(0, size, _PIECE_BYTES)
        ]

    @property
    def arrived_bytes(self) -> int:
        return len(self.buffer) - sum(piece.end - piece.begin for piece in self.missing)

    def have(self, verified: memoryview) -> None:
        """All of it, from somewhere else."""
        self.buffer, self.missing, self.verified = verified, [], True

    async def verify(self) -> None:
        got = await asyncio.to_thread(bytes_hash, self.buffer)
        if got != self.entry.hash:
            raise BadSourceError(f"corrupt: its bytes hash to {got.hex()}, the manifest says {self.entry.hash.hex()}")
        self.verified = True


@dataclass(slots=True, kw_only=True)
class Nearby:
    """Where tensors may be had without the service."""

    held: dict[str, FetchedTensor] = field(default_factory=dict)
    """Verified ones by name; not fetched where hash and shape are the same."""
    relay: RelayStore | None = None
    """Passes on what is verified."""
    cache: WeightCache | None = None
    """Asked for each that is not held, and given what was fetched."""
    delta_used: Callable[[int], None] = lambda _: None
    """Told of bytes that a delta has spared."""
    delta_failed: Callable[[], None] = lambda: None
    """A tensor is fetched, though its manifest named deltas from what is held."""


class _Pull:
    """One pull, over all its connections, and what has arrived."""

    def __init__(
        self, route: Route, *, connect: Connect, arrived: Arrived, nearby: Nearby, memory: Memory, cache_s: float
    ) -> None:
        self._route = route
        self._version = route.target.version
        self._connect = connect
        self._arrived = arrived
        self._nearby = nearby
        self._memory = memory
        self._cache_s = cache_s
        self._tensors: list[FetchedTensor] | None = None  # None until the manifest is there
        self._deltas = DeltaChains(used=nearby.delta_used, failed=nearby.delta_failed)
        self._source_mark = 0  # what the source has said of itself
        self._last_break = "none"
        if nearby.relay is not None:
            nearby.relay.begin(self._version, mark=self._mark)

    async def finish(self) -> None:
        """Return when all is there."""
        task, backoff = asyncio.current_task(), Backoff()
        assert task is not None
        while not await self._attempt():
            if task.cancelling():  # a break came in its place
                raise asyncio.CancelledError
            await backoff.pause()

    def failed(self) -> None:
        """Tell those who pull from us that it will not come."""
        if self._nearby.relay is not None:
            self._nearby.relay.failed()

    def result(self) -> dict[str, TensorBytes]:
        """Return all tensors; they are what is held from now on."""
        tensors = self._tensors or ()
        assert all(t.verified for t in tensors), "bytes that nobody has verified"
        self._nearby.held.clear()
        self._nearby.held.update({t.entry.name: t for t in tensors})
        return {t.entry.name: TensorBytes(t.entry.dtype, tuple(t.entry.shape), t.buffer) for t in tensors}

    async def watch(self) -> None:
        """Tell, again and again, that nothing comes."""
        while True:
            mark, target = self._mark(), self._route.target
            await asyncio.sleep(STALLED_S)
            if self._mark() == mark and self._route.target is target:
                self._route.stalled(target)

    def named(self) -> str:
        return f"weights of version ({self._version.attempt}, {self._version.step}) from {self._route.target.address}"

    def progress(self) -> str:
        if self._tensors is None:
            return f"awaited its manifest; last break: {self._last_break}"
        missing = next((t.entry.name for t in self._tensors if t.missing), "none")
        done_bytes = sum(t.arrived_bytes for t in self._tensors)
        total_bytes = sum(len(t.buffer) for t in self._tensors)
        return (
            f"awaited tensor {missing}, {done_bytes} of {total_bytes} bytes have arrived; "
            f"last break: {self._last_break}"
        )

    def _mark(self) -> int:
        """Changes when a byte comes to us, or to our source. A server's thread asks too."""
        arrived_bytes = sum(t.arrived_bytes for t in self._tensors or ())
        return arrived_bytes + self._deltas.arrived_bytes + (self._tensors is not None) + self._source_mark

    async def _attempt(self) -> bool:
        """Go on over new connections; False when one broke. The first error ends them all."""
        try:
            async with _opened(self._route, connect=self._connect, arrived=self._arrived) as streams:
                await self._over(streams)
        except SourceBrokenError as error:
            self._last_break = str(error)
            return False
        except NotKeptError as error:
            if self._route.target.peer:
                self._last_break = f"gone: {error}"
                return False  # it has not begun yet, or is further: the scheduler knows more
            raise VersionGoneError(f"{self.named()}: gone: {error}") from None
        except SourceRefusedError as error:
            raise BadSourceError(f"{self.named()}: refused: {error}") from None
        return True

    async def _over(self, streams: "_Streams") -> None:
        """Bring what is missing, some tensors at once."""
        manifest = await self._manifest(streams.first)
        self._deltas.leading(manifest)
        if self._tensors is None:
            self._tensors = self._described(manifest)
        missing = deque(t for t in self._tensors if not t.verified)
        cache, relay = self._nearby.cache, self._nearby.relay
        if cache is not None and relay is None:  # who passes tensors on takes them in the order of all
            cache.shuffle(missing)
        await _all(*(self._bring(missing, streams) for _ in range(min(_STREAMS, len(missing)))))

    async def _manifest(self, source: Source) -> pb.Manifest:
        while True:
            try:
                return await source.manifest(self._version)
            except SourceWaitingError as waiting:
                self._source_mark = waiting.mark

    def _described(self, manifest: pb.Manifest) -> list[FetchedTensor]:
        """Return the tensors of the version: those that are held, and memory for the others."""
        try:
            check_manifest(manifest, version=self._version)
        except ManifestError as error:
            raise BadSourceError(f"{self.named()}: {error}") from None
        held = [self._nearby.held[entry.name] for entry in manifest.tensors if self._is_held(entry)]
        fresh = [entry for entry in manifest.tensors if not self._is_held(entry)]
        try:
            tensors = held + _with_memory(fresh, memory=self._memory)
        except MemoryError as error:
            raise WeightsError(f"{self.named()}: {error}") from None
        if self._nearby.relay is not None:
            self._nearby.relay.described(manifest)
            for tensor in held:
                self._nearby.relay.have(tensor.entry.hash, tensor.buffer)
        if self._nearby.cache is not None:
            self._nearby.cache.begin(manifest.tensors, wait_s=self._cache_s)
        return tensors

    def _is_held(self, entry: pb.TensorEntry) -> bool:
        held = self._nearby.held.get(entry.name)
        return held is not None and held.entry == entry

    async def _bring(self, missing: deque[FetchedTensor], streams: "_Streams") -> None:
        """Take from the list until it is empty, beside others."""
        while missing:
            tensor = missing.popleft()
            try:
                await self._have(tensor, streams)
            except SourceWaitingError as waiting:
                self._source_mark = waiting.mark
                missing.append(tensor)

    async def _have(self, tensor: FetchedTensor, streams: "_Streams") -> None:
        """Bring a tensor from the first place that has it."""
        cache, relay = self._nearby.cache, self._nearby.relay
        cached = found = None
        if not tensor.arrived_bytes:
            cached = await cache.read(tensor.entry) if cache is not None else None
            found = cached if cached is not None else await self._by_deltas(tensor.entry, streams)
        if found is not None:
            tensor.have(found)
        else:
            await streams.fetch_all(tensor.missing)
            await self._verify(tensor)
        if relay is not None:
            relay.have(tensor.entry.hash, tensor.buffer)
        if cache is not None and cached is None:
            cache.write(tensor.entry, tensor.buffer)

    async def _by_deltas(self, entry: pb.TensorEntry, streams: "_Streams") -> memoryview | None:
        held = self._nearby.held.get(entry.name)
        if held is None:
            return None
        return await self._deltas.read(entry, base=KeptTensor(held.buffer, held.entry), fetch=streams.fetch)

    async def _verify(self, tensor: FetchedTensor) -> None:
        try:
            await tensor.verify()
        except BadSourceError as error:
            raise BadSourceError(f"{self.named()}: tensor {tensor.entry.name}: {error}") from None


def _with_memory(entries: list[pb.TensorEntry], *, memory: Memory) -> list[FetchedTensor]:
    """Return tensors that have not arrived, in one piece of memory. Raises MemoryError."""
    places = [0]
    for entry in entries:
        places.append(places[-1] + -(-entry.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    whole = memory(places[-1])
    return [
        FetchedTensor(entry=entry, buffer=whole[begin : begin + entry.size_bytes])
        for begin, entry in zip(places, entries, strict=False)
    ]


class _Streams:
    """The streams of one attempt, each for one call at a time; made by `_opened`."""

    def __init__(
        self, first: Source, *, open_one: Callable[[], Awaitable[Source]], arrived: Callable[[int], None]
    ) -> None:
        """`first` stays open until the end: the version is not dropped between two tensors."""
        self.first = first
        self._open_one = open_one
        self._arrived = arrived
        self._free = asyncio.LifoQueue[Source | None]()  # None: one that may be opened, where all that are open work
        for source in (*[None] * (_STREAMS - 1), first):
            self._free.put_nowait(source)

    async def fetch(self, piece: Piece) -> None:
        """What has not arrived of it. Raises as `Source.fetch`."""
        if piece.begin == piece.end:
            return  # it arrived while another stream broke
        source = await self._free_one()
        try:
            await source.fetch(piece, arrived=self._arrived)
        finally:
            self._free.put_nowait(source)

    async def fetch_all(self, pieces: list[Piece]) -> None:
        """What has not arrived of these; a piece goes from the list when it is whole. Raises as `Source.fetch`, of a source that waits at the end."""

        async def one(piece: Piece) -> SourceWaitingError | None:
            try:
                await self.fetch(piece)
            except SourceWaitingError as waiting:
                return waiting
            pieces.remove(piece)
            return None

        for waiting in await _all(*map(one, list(pieces))):
            if waiting is not None:
                raise waiting

    async def _free_one(self) -> Source:
        """Open one only when it is used: one that waits without a request is closed by the other side."""
        while True:
            source = await self._free.get()
            if source is not None:
                return source
            try:
                return await self._open_one()
            except SourceBrokenError:
                continue  # the others have its work


@asynccontextmanager
async def _opened(route: Route, *, connect: Connect, arrived: Arrived) -> AsyncIterator[_Streams]:
    """Streams to where a version is pulled from now, closed at the end."""
    target = route.target
    opened: list[Source] = []

    async def open_one() -> Source:
        source = await connect(target)
        opened.append(source)
        route.sources.add(source)
        if target is not route.target:
            source.abort()
        return source

    try:
        yield _Streams(await open_one(), open_one=open_one, arrived=partial(arrived, target))
    finally:
        for source in opened:
            route.sources.discard(source)
            await source.close()


async def _all(*parts: Coroutine[Any, Any, _T]) -> list[_T]:
    """Return their results; the first error ends them all, and none of them continues after it."""
    tasks = [asyncio.create_task(part, name=f"weights-{number}") for number, part in enumerate(parts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
