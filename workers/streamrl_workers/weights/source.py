"""Where a slice of a version comes from: `SliceSource`, of which a puller has a list (`pull.py`); and what a server of weights gives.

A server gives manifests by the name of a version, and bytes by their hash. Each transport has a `Source`, one stream from a server
(`transports.py`), and serves a `ServedStore`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.proto import stream_pb2 as pb


class SourceBrokenError(Exception):
    """It broke off, or was not there; to ask again may help. The text says what happened."""


class SourceRefusedError(Exception):
    """It does not give what was asked for, and would not the next time."""


class NotYetError(Exception):
    """It will have it, and has it not yet. Raised by a store, and again by the source that asks its server: the connection continues."""

    def __init__(self, mark: int) -> None:
        """`mark`: another number than before if something has come to it meanwhile."""
        super().__init__("it is still on its way")
        self.mark = mark


class NotKeptError(SourceRefusedError):
    """It does not have it, or not any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """Consecutive bytes of one content that have not arrived, and where they belong."""

    hash: bytes  # of the whole content
    buffer: memoryview  # of the whole content
    begin: int  # moves on as bytes arrive
    end: int


PIECE_BYTES = 64 * 2**20
"""Maximum size of a piece, which one request asks for: streams share a large slice, and end at nearly the same time."""


@dataclass(slots=True, kw_only=True, eq=False)
class WantedSlice:
    """A slice on its way, and the memory that it belongs in."""

    tensor: str
    entry: pb.TensorSlice
    buffer: memoryview
    missing: list[Piece] = field(init=False)
    """What has not arrived from a server; a piece stays until it is whole."""
    is_verified: bool = False

    def __post_init__(self) -> None:
        size = len(self.buffer)
        self.missing = [
            Piece(hash=self.entry.hash, buffer=self.buffer, begin=begin, end=min(size, begin + PIECE_BYTES))
            for begin in range(0, size, PIECE_BYTES)
        ]

    @property
    def arrived_bytes(self) -> int:
        """Bytes that are there. May be asked by any thread."""
        return len(self.buffer) - sum(piece.end - piece.begin for piece in self.missing)


class SliceSource(Protocol):
    """Something that may have slices. The puller asks its sources in their order, and verifies what one has filled in."""

    async def fill(self, wanted: WantedSlice) -> bool:
        """Fill the slice's buffer; False: another source must.

        After it returned, raised or was cancelled nothing of it writes there. Raises as `Source.fetch`.
        """
        ...

    def accept(self, wanted: WantedSlice) -> None:
        """Hear that what it filled in is the slice."""
        return

    def refute(self, wanted: WantedSlice, *, got: bytes) -> None:
        """Hear that what it filled in hashes to `got`, so another source is asked. Raises BadSourceError: no other has it."""
        ...


class BusyTime:
    """Seconds in which at least one of several calls was under way. Used in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._calls = 0
        self._counted_s = 0.0
        self._total_s = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds until now."""
        now_s = self._clock()
        self._total_s += (now_s - self._counted_s) if self._calls else 0.0
        self._counted_s = now_s
        return self._total_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a call."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, calls: int) -> None:
        _ = self.seconds
        self._calls += calls


async def in_thread(call: Callable[[], None]) -> None:
    """Run in a thread, and end after it has ended, cancelled or not: it writes into memory that others use afterwards."""
    work = asyncio.get_running_loop().run_in_executor(None, call)
    await until_ended(work)
    work.result()


async def until_ended(work: "asyncio.Future[Any]") -> None:
    """Return when `work` has ended. If this task is cancelled, once or several times, raise that then."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    work.exception()  # retrieved, so that it is not logged where the caller does not ask for it
    if cancelled is not None:
        raise cancelled


class ServedStore(Protocol):
    """What a server serves. Its answers may take seconds."""

    def versions(self) -> list[pb.VersionName]:
        """Names of the kept versions."""
        ...

    def pulling(self, version: pb.VersionName) -> AbstractContextManager[pb.Manifest | None]:
        """The manifest of a version, which is kept while inside; None: it is not. Raises NotYetError."""
        ...

    def content(self, content_hash: bytes) -> memoryview | None:
        """The bytes of a hash; None: they are not kept. Raises NotYetError."""
        ...


class Source(Protocol):
    """One stream from such a place. Calls follow each other; one that is cancelled has ended when it raises, and writes no more."""

    async def manifest(self, version: pb.VersionName) -> pb.Manifest:
        """Of a version, which the place keeps until `close`."""
        ...

    async def fetch(self, piece: Piece, *, arrived: Callable[[int], None]) -> None:
        """Fill the piece; `arrived` is told of bytes, in the event loop. After an error the piece has what had arrived."""
        ...

    def abort(self) -> None:
        """The call that is under way ends with SourceBrokenError."""
        ...

    async def close(self) -> None:
        """End the stream."""
        ...
