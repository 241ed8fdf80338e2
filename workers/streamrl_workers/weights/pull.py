"""Pulls one version of the weights, whole and verified.

    manifest, then each slice from the first of these that has it:

    1. held      the version before. A tensor whose slices are all held is not even copied; where adapters are trained that is the base
    2. cache     a directory of the pool (`cache.py`)
    3. deltas    from a held slice to this one, where the manifest names them (`deltas.py`)
    4. address   where the version was announced, and the ranks that hold the rest (`address.py`). Over new streams if one breaks

Each fills in the slice where it stays; it is verified there, once, whichever it was. There is one deadline for all. Whatever is wrong with a cache
or a delta, the slice is fetched as if there were none.

Does not own how bytes travel (`transports.py`), putting weights into an engine, nor which version a generator may use (the scheduler issues by the
one that it is told of).

Invariants:
- What is returned hashes to `version.hash`; otherwise a `WeightsError` is raised. Each byte is hashed once, where it lies, in a thread.
- The memory of a version is one piece, tensors in it contiguous, without those that are held. What is held keeps no more memory than another version.
- Bytes that arrived are not asked for again after a break. Cancelling `pull` ends its calls and closes its connections.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import Backoff
from streamrl_workers.weights.address import Address, Arrived, BadSourceError, Connect, Route, WeightsError, run_all
from streamrl_workers.weights.cache import WeightCache
from streamrl_workers.weights.deltas import DeltaChains
from streamrl_workers.weights.hashing import (
    ManifestError,
    TensorBytes,
    bytes_hash,
    check_manifest,
    reserved,
    size_bytes,
)
from streamrl_workers.weights.source import (
    NotKeptError,
    NotYetError,
    SliceSource,
    SourceBrokenError,
    SourceRefusedError,
    WantedSlice,
    in_thread,
)
from streamrl_workers.weights.store import RelayStore

STALLED_S = 10.0
"""Without a byte for so long, another source is asked for."""
_CACHE_SHARE = 0.25
"""Of a pull's time, for which it waits for a cache; in the rest the service sends what the cache did not give."""
_ALIGNMENT_BYTES = 64
"""Of a tensor in memory."""
_COPY_BYTES = 16 * 2**20
"""Copied at once: Python's other threads stand still for it."""


Memory = Callable[[int], memoryview]
"""Gives bytes for a version. Raises MemoryError."""


class VersionGoneError(WeightsError):
    """The server keeps the version no longer (or never had it); asking again is pointless."""


class HeldTensor(NamedTuple):
    """A verified tensor of a version that was pulled."""

    entry: pb.TensorEntry
    buffer: memoryview

    def slices(self) -> Iterator[tuple[pb.TensorSlice, memoryview]]:
        """Yield its slices and their bytes."""
        begin = 0
        for one in self.entry.slices:
            yield one, self.buffer[begin : begin + one.size_bytes]
            begin += one.size_bytes

    def has(self, entry: pb.TensorEntry) -> bool:
        """Return whether it is the same tensor, whoever serves it."""
        mine = [one.hash for one in self.entry.slices]
        return (self.entry.dtype, self.entry.shape, mine) == (entry.dtype, entry.shape, [s.hash for s in entry.slices])


@dataclass(slots=True, kw_only=True)
class Nearby:
    """Where slices may be had without the service."""

    held: dict[str, HeldTensor] = field(default_factory=dict)
    """Tensors by name."""
    relay: RelayStore | None = None
    """Passes on what is verified."""
    cache: WeightCache | None = None
    """Asked for each slice that is not held, and given what was fetched."""
    delta_used: Callable[[int], None] = lambda _: None
    """Called with bytes that a delta has spared."""
    delta_failed: Callable[[], None] = lambda: None
    """Called when a slice is fetched, though its manifest named deltas from what is held."""


class _HeldSlices(SliceSource):
    """A `SliceSource`: slices of tensors of which others have changed."""

    def __init__(self, contents: Mapping[bytes, memoryview]) -> None:
        self._contents = contents

    async def fill(self, wanted: WantedSlice) -> bool:
        found = self._contents.get(wanted.entry.hash)
        if found is None or len(found) != len(wanted.buffer):
            return False
        await in_thread(partial(_copy, found, wanted.buffer))
        return True

    def refute(self, wanted: WantedSlice, *, got: bytes) -> None:
        raise AssertionError(f"held bytes of {wanted.tensor} have changed: they hash to {got.hex()}")


def _copy(source: memoryview, target: memoryview) -> None:
    for begin in range(0, len(source), _COPY_BYTES):
        target[begin : begin + _COPY_BYTES] = source[begin : begin + _COPY_BYTES]


async def pull(
    route: Route,
    *,
    timeout_s: float,
    connect: Connect,
    arrived: Arrived = lambda *_: None,
    nearby: Nearby | None = None,
    dials_ranks: bool = True,
    memory: Memory = reserved,
) -> dict[str, TensorBytes]:
    """Fetch and verify all tensors of a version that was announced.

    Args:
        route: the version, whose hash is what is verified, and the address that has it, which may become another. Its `times` are written.
        timeout_s: for all of it.
        connect: opens a stream to an address.
        arrived: called with the source and numbers of bytes that it has sent.
        memory: where what is fetched comes to lie.
        nearby: where slices may be that need not be fetched; after a pull that ended well it holds this version's tensors.
        dials_ranks: whether the addresses of a trainer's ranks lead there from here; otherwise all comes from the route's.

    Raises:
        VersionGoneError: the version is not kept there.
        BadSourceError: refused or corrupted.
        WeightsError: not complete after `timeout_s`, or there is no memory for it.
    """
    address = Address(route, connect=connect, arrived=arrived, dials_ranks=dials_ranks)
    run = _Pull(route, address=address, nearby=nearby or Nearby(), memory=memory, cache_s=timeout_s * _CACHE_SHARE)
    watch = asyncio.create_task(run.watch(), name="weights-watch")
    try:
        async with asyncio.timeout(timeout_s):
            await run.finish()
    except BaseException as error:
        run.failed()
        if not isinstance(error, TimeoutError):
            raise
        raise WeightsError(f"{route}: not complete after {timeout_s:g} s; {run.progress()}") from None
    finally:
        watch.cancel()
    return run.result()


class _Pull:
    """One pull, over all its connections, and what has arrived."""

    def __init__(self, route: Route, *, address: Address, nearby: Nearby, memory: Memory, cache_s: float) -> None:
        self._route = route
        self._version = route.target.version
        self._nearby = nearby
        self._memory = memory
        self._cache_s = cache_s
        self._tensors: list[HeldTensor] = []
        self._slices: list[WantedSlice] | None = None  # None until the manifest is there
        self._last_break = "none"
        held = {one.hash: data for tensor in nearby.held.values() for one, data in tensor.slices()}
        self._held = _HeldSlices(held)
        self._address = address
        self._deltas = DeltaChains(
            held=held,
            fetch=address.fetch,
            applying=route.times.deltas,
            used=nearby.delta_used,
            failed=nearby.delta_failed,
        )
        cache = () if nearby.cache is None else (nearby.cache,)
        self._nearest: tuple[SliceSource, ...] = (self._held, *cache, self._deltas)
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
        assert all(one.is_verified for one in self._slices or ()), "bytes that were not verified"
        self._nearby.held.clear()
        self._nearby.held.update({tensor.entry.name: tensor for tensor in self._tensors})
        return {entry.name: TensorBytes(entry.dtype, tuple(entry.shape), buffer) for entry, buffer in self._tensors}

    async def watch(self) -> None:
        """Tell, again and again, that nothing comes."""
        while True:
            mark, target = self._mark(), self._route.target
            await asyncio.sleep(STALLED_S)
            if self._mark() == mark and self._route.target is target:
                self._route.stalled(target)

    def progress(self) -> str:
        """Return what is missing."""
        if self._slices is None:
            return f"awaited its manifest; last break: {self._last_break}"
        missing = next((one.tensor for one in self._slices if one.missing), "none")
        done_bytes = sum(one.arrived_bytes for one in self._slices)
        total_bytes = sum(len(one.buffer) for one in self._slices)
        return (
            f"awaited tensor {missing}, {done_bytes} of {total_bytes} bytes have arrived; "
            f"last break: {self._last_break}"
        )

    def _mark(self) -> int:
        """Changes when a byte comes to us, or to our source. A server's thread asks too."""
        arrived_bytes = sum(one.arrived_bytes for one in self._slices or ())
        return arrived_bytes + self._deltas.arrived_bytes + (self._slices is not None) + self._address.mark

    async def _attempt(self) -> bool:
        """Continue over new connections; False when one broke. The first error ends them all."""
        try:
            async with self._address.opened():
                await self._bring_all()
        except SourceBrokenError as error:
            self._last_break = str(error)
            return False
        except NotKeptError as error:
            if self._route.target.peer:
                self._last_break = f"gone: {error}"
                return False  # it has not begun yet, or is further: the scheduler knows more
            raise VersionGoneError(f"{self._route}: gone: {error}") from None
        except SourceRefusedError as error:
            raise BadSourceError(f"{self._route}: refused: {error}") from None
        return True

    async def _bring_all(self) -> None:
        """Bring what is missing, some slices of each server at once."""
        manifest = await self._address.manifest()
        try:
            check_manifest(manifest, version=self._version)
        except ManifestError as error:
            raise BadSourceError(f"{self._route}: {error}") from None
        self._deltas.follow(manifest)
        if self._slices is None:
            self._slices = self._laid_out(manifest)
        missing: defaultdict[int, list[WantedSlice]] = defaultdict(list)
        for one in self._slices:
            if not one.is_verified:
                missing[self._address.holder(one)].append(one)
        streams = self._address.streams(len({0, *missing}))
        await run_all(*(self._bring_from(holder, slices, streams=streams) for holder, slices in missing.items()))

    async def _bring_from(self, holder: int, slices: list[WantedSlice], *, streams: int) -> None:
        """Bring the slices of one server. Another rank that breaks is asked again by itself: the others' slices do not wait for it."""
        backoff = Backoff()
        while missing := deque(one for one in slices if not one.is_verified):
            # A relay takes slices in the order of all.
            if self._nearby.cache is not None and self._nearby.relay is None:
                self._nearby.cache.shuffle(missing)
            try:
                await self._address.reach(holder, streams=streams)
                await run_all(*(self._bring(missing) for _ in range(min(streams, len(missing)))))
            except SourceBrokenError as error:
                if not holder or self._address.is_left:
                    raise
                self._last_break = str(error)
                await backoff.pause()

    def _laid_out(self, manifest: pb.Manifest) -> list[WantedSlice]:
        """Lay the tensors out in memory, but those that are held; return the slices that are missing."""
        staying = self._staying(manifest)
        fresh = [entry for entry in manifest.tensors if entry.name not in staying]
        try:
            laid_out = _with_memory(fresh, memory=self._memory)
        except MemoryError as error:
            raise WeightsError(f"{self._route}: {error}") from None
        held = [*staying.values()]
        wanted = [
            WantedSlice(tensor=tensor.entry.name, entry=one, buffer=buffer)
            for tensor in laid_out
            for one, buffer in tensor.slices()
        ]
        self._tensors = held + laid_out
        if self._nearby.relay is not None:
            self._nearby.relay.described(manifest)
            for tensor in held:
                for one, data in tensor.slices():
                    self._nearby.relay.have(one.hash, data)
        if self._nearby.cache is not None:
            slices = [one for entry in manifest.tensors for one in entry.slices]
            self._route.times.cache = self._nearby.cache.begin(slices, wait_s=self._cache_s)
        return wanted

    def _staying(self, manifest: pb.Manifest) -> dict[str, HeldTensor]:
        """Return the held tensors that stay where they are; the others are copied.

        A tensor holds all the memory of the version that it was fetched with. So they stay in as much as one version takes, where most of them lie.
        """
        pieces: defaultdict[int, list[HeldTensor]] = defaultdict(list)
        for entry in manifest.tensors:
            held = self._nearby.held.get(entry.name)
            if held is not None and held.has(entry):
                pieces[id(held.buffer.obj)].append(held)
        room_bytes = sum(map(_padded_bytes, manifest.tensors))
        staying = {}
        for tensors in sorted(pieces.values(), key=lambda one: sum(len(held.buffer) for held in one), reverse=True):
            room_bytes -= memoryview(tensors[0].buffer.obj).nbytes
            if room_bytes < 0:
                break
            staying.update({held.entry.name: held for held in tensors})
        return staying

    async def _bring(self, missing: deque[WantedSlice]) -> None:
        """Take from the list until it is empty, beside others."""
        while missing:
            wanted = missing.popleft()
            try:
                await self._have(wanted)
            except NotYetError as waiting:
                self._address.mark = waiting.mark
                missing.append(wanted)

    async def _have(self, wanted: WantedSlice) -> None:
        """Bring a slice from the first source that has it."""
        nearest = () if wanted.arrived_bytes else self._nearest  # what has arrived is not written over
        for source in (*nearest, self._address):
            if await source.fill(wanted) and await self._is_right(wanted, source):
                break
        relay, cache = self._nearby.relay, self._nearby.cache
        if relay is not None:
            relay.have(wanted.entry.hash, wanted.buffer)
        if cache is not None and source not in (self._held, cache):
            cache.write(wanted.entry, wanted.buffer)

    async def _is_right(self, wanted: WantedSlice, source: SliceSource) -> bool:
        """Verify what a source has filled in. Raises BadSourceError: no other has it."""
        with self._route.times.verify.running():
            got = await asyncio.to_thread(bytes_hash, wanted.buffer)
        if got != wanted.entry.hash:
            source.refute(wanted, got=got)
            return False
        wanted.missing, wanted.is_verified = [], True
        source.accept(wanted)
        return True


def _with_memory(entries: list[pb.TensorEntry], *, memory: Memory) -> list[HeldTensor]:
    """Return tensors that have not arrived, in one piece of memory. Raises MemoryError."""
    places = [0]
    for entry in entries:
        places.append(places[-1] + _padded_bytes(entry))
    whole = memory(places[-1])
    return [
        HeldTensor(entry, whole[begin : begin + size_bytes(entry)])
        for begin, entry in zip(places, entries, strict=False)
    ]


def _padded_bytes(entry: pb.TensorEntry) -> int:
    return -(-size_bytes(entry) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
