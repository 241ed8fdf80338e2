"""Pulls one version of the weights, whole and verified.

    manifest, then tensors in pieces, by several streams, over new ones if one breaks, against one deadline

A tensor that the puller holds from the version before, by name and hash, is not fetched: where adapters are trained that is the base, so a
version costs what its adapters have. Who holds nothing, or another base, fetches all; a trainer that starts again publishes the same base.
Where the pool has a cache (`cache.py`) a tensor that lies there is not fetched either. Where the manifest names deltas that lead from a tensor that is
held to the wanted one (`delta_chains.py`), these are fetched; whatever is wrong with them, the tensor is fetched as if there were none.

Does not own how bytes travel (`transports.py`), putting weights into an engine, nor which version a generator may use (the scheduler issues by the one that it is told of).

Invariants:
- What is returned hashes to `version.hash`; otherwise a `WeightsError` is raised. Each byte is hashed once, where it lies, in a thread.
- Bytes that arrived are not asked for again after a break. Cancelling `pull` ends its calls and closes its connections.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import Backoff
from streamrl_workers.weights.cache import WeightCache
from streamrl_workers.weights.delta_chains import follow, way
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash, reserved
from streamrl_workers.weights.manifest import ManifestError, check_manifest, usable_deltas
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
_log = logging.getLogger("streamrl.weights")

Connect = Callable[[pb.WeightsAvailable], Awaitable[Source]]
"""Opens one more stream to where a version was announced. Raises SourceBrokenError."""


Arrived = Callable[[pb.WeightsAvailable, int], None]


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
) -> dict[str, TensorBytes]:
    """Fetch and verify all tensors of a version that was announced.

    Args:
        route: the version, whose hash is what is verified, and the address that has it, which may become another.
        timeout_s: for all of it.
        connect: opens a stream to an address.
        arrived: called with the source and numbers of bytes that it has sent.
        nearby: where tensors may be that need not be fetched; behind a pull that ended well it holds this version's.

    Raises:
        VersionGoneError: the version is not kept there.
        BadSourceError: refused or corrupted.
        WeightsError: not complete after `timeout_s`, or there is no memory for it.
    """
    nearby = Nearby() if nearby is None else nearby
    state = _Pull(route=route, connect=connect, arrived=arrived, nearby=nearby, cache_s=timeout_s * _CACHE_SHARE)
    if nearby.relay is not None:
        nearby.relay.begin(state.version, mark=state.mark)
    watch = asyncio.create_task(_watch(state), name="weights-watch")
    try:
        async with asyncio.timeout(timeout_s):
            await _attempts(state)
    except BaseException as error:
        if nearby.relay is not None:
            nearby.relay.failed()
        if not isinstance(error, TimeoutError):
            raise
        raise WeightsError(f"{state.named()}: not complete after {timeout_s:g} s; {state.progress()}") from None
    finally:
        watch.cancel()
    tensors = state.tensors or ()
    assert all(t.verified for t in tensors), "bytes that nobody has verified"
    nearby.held.clear()
    nearby.held.update({t.entry.name: t for t in tensors})
    return {t.entry.name: TensorBytes(t.entry.dtype, tuple(t.entry.shape), t.buffer) for t in tensors}


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


@dataclass(slots=True, kw_only=True)
class _Pull:
    """One pull, over all its connections, and what has arrived."""

    route: Route
    connect: Connect
    arrived: Arrived
    nearby: Nearby
    cache_s: float
    tensors: list[FetchedTensor] | None = None  # None until the manifest is there
    leading_to: dict[bytes, pb.TensorDelta] = field(default_factory=dict)  # by the hash of what they make
    deltas: dict[bytes, Piece] = field(default_factory=dict)  # arrived or on their way, by their own hash
    fetching: defaultdict[bytes, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """A delta, by one stream at a time: names may share it."""
    whole: set[str] = field(default_factory=set)  # tensors whose deltas could not be used: they are not tried again
    source_mark: int = 0  # what the source has said of itself
    last_break: str = "none"

    @property
    def version(self) -> pb.VersionName:
        return self.route.target.version

    @property
    def cache(self) -> WeightCache | None:
        return self.nearby.cache

    def described(self, manifest: pb.Manifest) -> None:
        """Tell those who pull from us."""
        if self.nearby.relay is not None:
            self.nearby.relay.described(manifest)
            for tensor in self.tensors or ():
                if tensor.verified:
                    self.passed_on(tensor)

    def passed_on(self, tensor: FetchedTensor) -> None:
        if self.nearby.relay is not None:
            self.nearby.relay.have(tensor.entry.hash, tensor.buffer)

    def mark(self) -> int:
        """Changes when a byte comes to us, or to our source."""
        arrived_bytes = sum(t.arrived_bytes for t in self.tensors or ())
        delta_bytes = sum(piece.begin for piece in list(self.deltas.values()))  # a server's thread asks too
        return arrived_bytes + delta_bytes + (self.tensors is not None) + self.source_mark

    def named(self) -> str:
        return f"weights of version ({self.version.attempt}, {self.version.step}) from {self.route.target.address}"

    def progress(self) -> str:
        if self.tensors is None:
            return f"awaited its manifest; last break: {self.last_break}"
        missing = next((t.entry.name for t in self.tensors if t.missing), "none")
        done_bytes = sum(t.arrived_bytes for t in self.tensors)
        total_bytes = sum(len(t.buffer) for t in self.tensors)
        return (
            f"awaited tensor {missing}, {done_bytes} of {total_bytes} bytes have arrived; last break: {self.last_break}"
        )


async def _watch(state: _Pull) -> None:
    """Tell, again and again, that nothing comes."""
    while True:
        mark, target = state.mark(), state.route.target
        await asyncio.sleep(STALLED_S)
        if state.mark() == mark and state.route.target is target:
            state.route.stalled(target)


async def _attempts(state: _Pull) -> None:
    task, backoff = asyncio.current_task(), Backoff()
    assert task is not None
    while not await _attempt(state):
        if task.cancelling():  # a break came in its place
            raise asyncio.CancelledError
        await backoff.pause()


async def _attempt(state: _Pull) -> bool:
    """Go on over new connections; False when one broke. The first error ends them all."""
    try:
        async with aclosing(_Stream(state, target=state.route.target)) as first:
            await _over(first, state)
    except SourceBrokenError as error:
        state.last_break = str(error)
        return False
    except NotKeptError as error:
        if state.route.target.peer:
            state.last_break = f"gone: {error}"
            return False  # it has not begun yet, or is further: the scheduler knows more
        raise VersionGoneError(f"{state.named()}: gone: {error}") from None
    except SourceRefusedError as error:
        raise BadSourceError(f"{state.named()}: refused: {error}") from None
    return True


class _UnopenedError(SourceBrokenError):
    """There is no such stream: what it was to fetch is for the others."""


class _Stream:
    """One of an attempt's streams."""

    def __init__(self, state: _Pull, *, target: pb.WeightsAvailable) -> None:
        """`target`: of the attempt."""
        self.state = state
        self.target = target
        self._source: Source | None = None

    async def opened(self) -> Source:
        """Opens it when it is first used: one that waits without a request is closed by the other side."""
        if self._source is None:
            self._source = await self.state.connect(self.target)
            self.state.route.sources.add(self._source)
        if self.target is not self.state.route.target:
            raise SourceBrokenError("it is pulled from somewhere else now")
        return self._source

    async def fetch(self, piece: Piece) -> None:
        """What has not arrived of it."""
        if piece.begin == piece.end:
            return  # it arrived while another stream broke
        try:
            source = await self.opened()
        except SourceBrokenError as error:
            raise _UnopenedError(str(error)) from None
        await source.fetch(piece, arrived=partial(self.state.arrived, self.target))

    async def aclose(self) -> None:
        if self._source is not None:
            self.state.route.sources.discard(self._source)
            await self._source.close()


async def _over(first: _Stream, state: _Pull) -> None:
    """Fetch what is missing, by several streams at once."""
    source = await first.opened()  # until the end: the version is not dropped between two tensors
    while (manifest := await _manifest(source, state)) is None:
        pass
    state.leading_to = usable_deltas(manifest)
    if state.tensors is None:
        state.tensors = _arriving(manifest, state)
        state.described(manifest)
        if state.cache is not None:
            state.cache.begin(manifest.tensors, wait_s=state.cache_s)
    pending = _Pending(deque(t for t in state.tensors if not t.verified), deque())
    if state.cache is not None and state.nearby.relay is None:  # who passes tensors on takes them in the order of all
        state.cache.shuffle(pending.tensors)
    work = [_work(first, pending=pending)]
    work += [_another(first, pending=pending) for _ in range(1, min(_STREAMS, pending.most_streams))]
    tasks = [asyncio.create_task(part, name=f"fetch-{number}") for number, part in enumerate(work)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    await _work(first, pending=pending)  # what a stream that could not be opened has left


async def _manifest(source: Source, state: _Pull) -> pb.Manifest | None:
    try:
        return await source.manifest(state.version)
    except SourceWaitingError as waiting:
        state.source_mark = waiting.mark
        return None


def _arriving(manifest: pb.Manifest, state: _Pull) -> list[FetchedTensor]:
    try:
        check_manifest(manifest, version=state.version)
    except ManifestError as error:
        raise BadSourceError(f"{state.named()}: {error}") from None
    fresh = [entry for entry in manifest.tensors if not _is_held(entry, state)]
    places = [0]
    for entry in fresh:
        places.append(places[-1] + -(-entry.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    try:
        memory = reserved(places[-1])
    except MemoryError as error:
        raise WeightsError(f"{state.named()}: {error}") from None
    fetched = [
        FetchedTensor(entry=entry, buffer=memory[begin : begin + entry.size_bytes])
        for begin, entry in zip(places, fresh, strict=False)
    ]
    return fetched + [state.nearby.held[entry.name] for entry in manifest.tensors if _is_held(entry, state)]


def _is_held(entry: pb.TensorEntry, state: _Pull) -> bool:
    held = state.nearby.held.get(entry.name)
    return held is not None and held.entry == entry


@dataclass(slots=True)
class _Pending:
    """What the streams of an attempt take from."""

    tensors: deque[FetchedTensor]
    pieces: deque[tuple[FetchedTensor, Piece]]
    """Of tensors that are nowhere nearby."""

    @property
    def most_streams(self) -> int:
        return sum(max(1, len(tensor.missing)) for tensor in self.tensors)


async def _another(first: _Stream, *, pending: _Pending) -> None:
    async with aclosing(_Stream(first.state, target=first.target)) as stream:
        with suppress(_UnopenedError):
            await _work(stream, pending=pending)


async def _work(stream: _Stream, *, pending: _Pending) -> None:
    """One stream's part."""
    while pending.pieces or pending.tensors:
        if not pending.pieces:
            await _look_nearby(stream, pending=pending)
            continue
        tensor, piece = pending.pieces.popleft()
        try:
            await stream.fetch(piece)
        except SourceWaitingError as waiting:
            stream.state.source_mark = waiting.mark
            pending.pieces.append((tensor, piece))
            continue
        except _UnopenedError:
            pending.pieces.append((tensor, piece))
            raise
        tensor.missing.remove(piece)
        if not tensor.missing:
            await _verify(stream.state, tensor=tensor)


async def _look_nearby(stream: _Stream, *, pending: _Pending) -> None:
    """Take the next tensor; it is had, or its pieces are pending."""
    state, tensor = stream.state, pending.tensors.popleft()
    cached = None if state.cache is None or tensor.arrived_bytes else await state.cache.read(tensor.entry)
    if cached is not None:
        tensor.have(cached)
        state.passed_on(tensor)
    elif not tensor.arrived_bytes and await _by_deltas(stream, tensor=tensor, pending=pending):
        _kept(state, tensor=tensor)
    elif tensor.missing:
        pending.pieces.extend((tensor, piece) for piece in tensor.missing)
    else:
        await _verify(state, tensor=tensor)


async def _verify(state: _Pull, *, tensor: FetchedTensor) -> None:
    try:
        await tensor.verify()
    except BadSourceError as error:
        raise BadSourceError(f"{state.named()}: tensor {tensor.entry.name}: {error}") from None
    _kept(state, tensor=tensor)


async def _by_deltas(stream: _Stream, *, tensor: FetchedTensor, pending: _Pending) -> bool:
    """Whether the tensor was made of what is held."""
    state = stream.state
    held = None if tensor.entry.name in state.whole else state.nearby.held.get(tensor.entry.name)
    deltas = way(tensor.entry, held=held.entry.hash, leading_to=state.leading_to) if held is not None else ()
    if held is None or not deltas:
        return False
    from streamrl_workers.weights.delta import DeltaError  # numpy, where there are deltas

    try:
        parts = [await _delta(stream, delta=delta) for delta in deltas]
        made = await asyncio.to_thread(follow, deltas, parts=parts, base=held.buffer)
    except _UnopenedError:
        pending.tensors.append(tensor)
        raise
    except (SourceRefusedError, DeltaError, RuntimeError, MemoryError) as error:  # no memory or thread for it either
        if not state.whole:
            reason = str(error) or type(error).__name__
            _log.warning("%s: tensor %s: no delta: %s; it is fetched whole", state.named(), tensor.entry.name, reason)
        state.whole.add(tensor.entry.name)
        state.nearby.delta_failed()
        return False
    state.nearby.delta_used(tensor.entry.size_bytes - sum(delta.size_bytes for delta in deltas))
    tensor.have(made)
    return True


async def _delta(stream: _Stream, *, delta: pb.TensorDelta) -> memoryview:
    """Its bytes; what had arrived before a break is not asked for again."""
    piece = stream.state.deltas.setdefault(
        delta.hash, Piece(hash=delta.hash, buffer=reserved(delta.size_bytes), begin=0, end=delta.size_bytes)
    )
    async with stream.state.fetching[delta.hash]:
        await stream.fetch(piece)
    return piece.buffer


def _kept(state: _Pull, *, tensor: FetchedTensor) -> None:
    state.passed_on(tensor)
    if state.cache is not None:
        state.cache.write(tensor.entry, tensor.buffer)
