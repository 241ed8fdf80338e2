"""The last source of a slice: the servers of the address where a version was announced.

    address          gives the manifest: the trainer's rank 0, a peer, a folder
    other ranks      give the slices that the manifest says they hold, where the puller reaches them; else the address gives all of them

Owns the streams to each server, which share its work in pieces, and which server a slice is fetched from. Does not own how bytes travel
(`transports.py`), nor when a break is followed by new streams (`pull.py`).

Invariants:
- A server is asked for the version before anything else, by a stream that stays open: so the version stays kept there.
- Bytes that arrived are not asked for again after a break.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import at_one_place
from streamrl_workers.weights.source import (
    BusyTime,
    NotYetError,
    Piece,
    SliceSource,
    Source,
    SourceBrokenError,
    SourceRefusedError,
    WantedSlice,
)

_STREAMS = 4
"""To one server: hides the round trip of each request on a far link, and shares the work of encryption among processors."""
_MOST_STREAMS = 16
"""To all servers together, if there are fewer of them."""

_T = TypeVar("_T")
Connect = Callable[[pb.WeightsAvailable], Awaitable[Source]]
"""Opens one more stream to an address. Raises SourceBrokenError."""
Arrived = Callable[[pb.WeightsAvailable, int], None]


class WeightsError(RuntimeError):
    """A version could not be had: what was awaited, from whom, and what came instead."""


class BadSourceError(WeightsError):
    """The source gave something else than the version that was announced; another source may have it."""


@dataclass(slots=True)
class PullTimes:
    """Where the time of a pull went. The parts overlap, as several slices are on their way at once."""

    manifest: BusyTime = field(default_factory=BusyTime)
    """Connecting to servers, and waiting for their manifests."""
    fetch: BusyTime = field(default_factory=BusyTime)
    """Fetching slices and deltas from servers."""
    deltas: BusyTime = field(default_factory=BusyTime)
    """Applying deltas that have arrived."""
    verify: BusyTime = field(default_factory=BusyTime)
    cache: BusyTime = field(default_factory=BusyTime)
    """Reading the cache."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part, by its name."""
        return {name: getattr(self, name).seconds for name in self.__slots__}


class Route:
    """A version, and where it is pulled from at the moment."""

    def __init__(
        self, target: pb.WeightsAvailable, *, stalled: Callable[[pb.WeightsAvailable], None] = lambda _: None
    ) -> None:
        """`stalled` is called when nothing comes from there, again and again."""
        self.target = target
        self.stalled = stalled
        self.sources: set[Source] = set()
        self.times = PullTimes()

    def move(self, target: pb.WeightsAvailable) -> None:
        """Continue from somewhere else, with what has arrived."""
        self.target = target
        for source in self.sources:
            source.abort()

    def __str__(self) -> str:
        version = self.target.version
        return f"weights of version ({version.attempt}, {version.step}) from {self.target.address}"


class Address(SliceSource):
    """A `SliceSource` for one pull, over all its connections."""

    def __init__(self, route: Route, *, connect: Connect, arrived: Arrived, dials_ranks: bool) -> None:
        """`dials_ranks`: whether the addresses of a trainer's ranks lead there from here."""
        self._route = route
        self._connect = connect
        self._arrived = arrived
        self._dials_ranks = dials_ranks
        self._target = route.target
        self._opened: defaultdict[int, list[Source]] = defaultdict(list)  # by holder
        self._manifest = pb.Manifest()
        self._holders: dict[tuple[str, int], int] = {}  # by tensor and first row
        self._servers: dict[int, _Server] = {}  # by holder
        self.mark = 0
        """Changes when bytes come to the server at the address, which waits for them itself."""

    @property
    def is_left(self) -> bool:
        """Whether the version is pulled from another address by now."""
        return self._target is not self._route.target

    def streams(self, servers: int) -> int:
        """Return how many streams each of some servers has."""
        return max(1, min(_STREAMS, _MOST_STREAMS // servers))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep streams to where the version is pulled from now; they are closed at the end."""
        self._target = self._route.target
        try:
            yield
        finally:
            for holder in list(self._opened):
                await self._close(holder)

    async def manifest(self) -> pb.Manifest:
        """Return the version's manifest, as it must be read from here. It was not checked."""
        with self._route.times.manifest.running():
            target = self._target
            self._servers[0] = await self._open_server(target, target.version, holder=0)
        manifest = self._servers[0].manifest
        self._manifest = at_one_place(manifest) if target.peer or not self._dials_ranks else manifest
        self._holders = {
            (entry.name, one.first_row): one.holder for entry in self._manifest.tensors for one in entry.slices
        }
        return self._manifest

    async def reach(self, holder: int, *, streams: int) -> None:
        """Open streams to a server that holds something, instead of those of before; after the manifest was checked."""
        if holder:
            await self._close(holder)
            version = pb.VersionName(attempt=self._target.version.attempt, step=self._target.version.step)
            rank = pb.WeightsAvailable(version=version, address=self._manifest.holders[holder - 1])
            with self._route.times.manifest.running():
                self._servers[holder] = await self._open_server(rank, version, holder=holder)
        self._servers[holder].widen(streams)

    def holder(self, wanted: WantedSlice) -> int:
        """Return which server has a slice. Raises SourceRefusedError: none does, since a source before has cut the tensor elsewhere."""
        holder = self._holders.get((wanted.tensor, wanted.entry.first_row))
        if holder is None:
            raise SourceRefusedError(f"tensor {wanted.tensor} has other slices than the source before gave it")
        return holder

    async def fill(self, wanted: WantedSlice) -> bool:
        """Fetch what has not arrived, in pieces at once; a server that waits raises at the end."""

        async def one(piece: Piece) -> NotYetError | None:
            try:
                await self.fetch(piece, holder)
            except NotYetError as waiting:
                return waiting
            wanted.missing.remove(piece)
            return None

        holder = self.holder(wanted)
        for waiting in await run_all(*map(one, list(wanted.missing))):
            if waiting is not None:
                raise waiting
        return True

    def refute(self, wanted: WantedSlice, *, got: bytes) -> None:
        holder = self.holder(wanted)
        rank = f", of rank {self._manifest.holders[holder - 1]}" if holder else ""
        told = f"corrupt: its bytes hash to {got.hex()}, the manifest says {wanted.entry.hash.hex()}"
        raise BadSourceError(f"{self._route}: tensor {wanted.tensor}{rank}: {told}")

    async def fetch(self, piece: Piece, holder: int) -> None:
        """Fetch what has not arrived of a piece. Raises as `Source.fetch`."""
        if piece.begin == piece.end:
            return  # it arrived while another stream broke
        if holder not in self._servers:
            raise SourceRefusedError("its holder has no slice that is missing, so there is no stream to it")
        with self._route.times.fetch.running():
            await self._servers[holder].fetch(piece, arrived=partial(self._arrived, self._target))

    async def _open_server(self, where: pb.WeightsAvailable, version: pb.VersionName, *, holder: int) -> "_Server":
        first = await self._open(where, holder=holder)
        while True:
            try:
                manifest = await first.manifest(version)
            except NotYetError as waiting:
                self.mark = waiting.mark
            else:
                return _Server(manifest, first, open_one=partial(self._open, where, holder=holder))

    async def _open(self, where: pb.WeightsAvailable, *, holder: int) -> Source:
        source = await self._connect(where)
        self._opened[holder].append(source)
        self._route.sources.add(source)
        if self.is_left:
            source.abort()
        return source

    async def _close(self, holder: int) -> None:
        self._servers.pop(holder, None)
        for source in self._opened.pop(holder, ()):
            self._route.sources.discard(source)
            await source.close()


class _Server:
    """The streams to one server, each for one call at a time."""

    def __init__(self, manifest: pb.Manifest, first: Source, *, open_one: Callable[[], Awaitable[Source]]) -> None:
        self.manifest = manifest
        self._open_one = open_one
        self._free = asyncio.LifoQueue[Source | None]()  # None: one that may be opened, where all that are open work
        self._free.put_nowait(first)

    def widen(self, streams: int) -> None:
        """Allow it as many streams."""
        first = self._free.get_nowait()
        for source in (*[None] * (streams - 1), first):
            self._free.put_nowait(source)

    async def fetch(self, piece: Piece, *, arrived: Callable[[int], None]) -> None:
        source = await self._free_one()
        try:
            await source.fetch(piece, arrived=arrived)
        finally:
            self._free.put_nowait(source)

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


async def run_all(*parts: Coroutine[Any, Any, _T]) -> list[_T]:
    """Return their results; the first error ends them all, and none of them continues after it."""
    tasks = [asyncio.create_task(part, name=f"weights-{number}") for number, part in enumerate(parts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
