"""Pulls weights: one version whole and verified (`pull`), and in the background whatever was announced (`Puller`).

    manifest, then tensors in pieces, by several streams, over new ones if one breaks, against one deadline

`Puller` lets a running pull end when a newer version of the same trainer is announced, and keeps only the newest of those
that wait: where a pull takes longer than a step, a pull that newer versions ended would never come to its end. A pull of
another attempt or address is ended: those bytes are not wanted any more.

A tensor that the puller holds from the version before, by name and hash, is not fetched: where adapters are trained that is the base, so a
version costs what its adapters have. Who holds nothing, or another base, fetches all; a trainer that starts again publishes the same base.
Where the pool has a cache (`cache.py`) a tensor that lies there is not fetched either. Where the manifest names deltas that lead from a tensor that is
held to the wanted one (`delta_chains.py`), these are fetched; whatever is wrong with them, the tensor is fetched as if there were none.

Does not own how bytes travel (`transports.py`), putting weights into an engine, nor which version a generator may use (the scheduler issues by the one that it is told of).

Invariants:
- What is returned hashes to `version.hash`; otherwise a `WeightsError` is raised. Each byte is hashed once, where it lies, in a thread.
- Bytes that arrived are not asked for again after a break. Cancelling `pull` ends its calls and closes its connections.
- One pull runs, one version waits for it, one pulled version waits for the engine, each at most; versions become ready
  in the order of their announcements.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import Backoff
from streamrl_workers.weights.cache import WeightCache
from streamrl_workers.weights.delta_chains import follow, way
from streamrl_workers.weights.hashing import HASH_ALGORITHM, TensorBytes, bytes_hash, manifest_hash, reserved
from streamrl_workers.weights.source import NotKeptError, Piece, Source, SourceBrokenError, SourceRefusedError


class WeightsError(RuntimeError):
    """A version could not be had: what was awaited, from whom, and what came instead."""


class VersionGoneError(WeightsError):
    """The server keeps the version no longer (or never had it); asking again is pointless."""


_STREAMS = 4
"""At once: hides the round trip of each request on a far link, and shares the work of encryption among processors."""
_PIECE_BYTES = 64 * 2**20
"""Of a tensor, by one request: the streams share a large one, and end at nearly the same time."""
_CACHE_SHARE = 0.25
"""Of a pull's time, for which it waits for a cache; in the rest the service sends what the cache did not give."""
_ALIGNMENT_BYTES = 64
"""Of a tensor in memory."""
_RETRY_FIRST_S, _RETRY_LIMIT_S = 1.0, 10.0
"""Between two pulls of a version; each pull has tried for its own deadline before."""
_log = logging.getLogger("streamrl.weights")

Connect = Callable[[], Awaitable[Source]]
"""Opens one more stream to where a version was announced. Raises SourceBrokenError."""


async def pull(
    target: pb.WeightsAvailable,
    *,
    timeout_s: float,
    connect: Connect,
    arrived: Callable[[int], None] = lambda _: None,
    nearby: "Nearby | None" = None,
) -> dict[str, TensorBytes]:
    """Fetch and verify all tensors of a version that was announced.

    Args:
        target: the version, whose hash is what is verified, and the address that has it.
        timeout_s: for all of it.
        connect: opens a stream to that address.
        arrived: called with numbers of bytes that it has sent.
        nearby: where tensors may be that need not be fetched; behind a pull that ended well it holds this version's.

    Raises:
        VersionGoneError: the version is not kept there.
        WeightsError: refused, corrupted, or not complete after `timeout_s`.
    """
    nearby = Nearby() if nearby is None else nearby
    state = _Pull(target=target, connect=connect, arrived=arrived, nearby=nearby, cache_s=timeout_s * _CACHE_SHARE)
    try:
        async with asyncio.timeout(timeout_s):
            backoff = Backoff()
            while not await _attempt(state):
                await backoff.pause()
    except TimeoutError:
        raise WeightsError(f"{state.named()}: not complete after {timeout_s:g} s; {state.progress()}") from None
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
            raise WeightsError(f"corrupt: its bytes hash to {got.hex()}, the manifest says {self.entry.hash.hex()}")
        self.verified = True


@dataclass(slots=True, kw_only=True)
class Nearby:
    """Where tensors may be had without the service."""

    held: dict[str, FetchedTensor] = field(default_factory=dict)
    """Verified ones by name; not fetched where hash and shape are the same."""
    cache: WeightCache | None = None
    """Asked for each that is not held, and given what was fetched."""
    delta_used: Callable[[int], None] = lambda _: None
    """Told of bytes that a delta has spared."""
    delta_failed: Callable[[], None] = lambda: None
    """A tensor is fetched, though its manifest named deltas from what is held."""


@dataclass(slots=True, kw_only=True)
class _Pull:
    """One pull, over all its connections, and what has arrived."""

    target: pb.WeightsAvailable
    connect: Connect
    arrived: Callable[[int], None]
    nearby: Nearby
    cache_s: float
    tensors: list[FetchedTensor] | None = None  # None until the manifest is there
    leading_to: dict[bytes, pb.TensorDelta] = field(default_factory=dict)  # by the hash of what they make
    deltas: dict[bytes, Piece] = field(default_factory=dict)  # arrived or on their way, by their own hash
    whole: set[str] = field(default_factory=set)  # tensors whose deltas could not be used: they are not tried again
    last_break: str = "none"

    @property
    def version(self) -> pb.VersionName:
        return self.target.version

    @property
    def cache(self) -> WeightCache | None:
        return self.nearby.cache

    def named(self) -> str:
        return f"weights of version ({self.version.attempt}, {self.version.step}) from {self.target.address}"

    def progress(self) -> str:
        if self.tensors is None:
            return f"awaited its manifest; last break: {self.last_break}"
        missing = next((t.entry.name for t in self.tensors if t.missing), "none")
        done_bytes = sum(t.arrived_bytes for t in self.tensors)
        total_bytes = sum(len(t.buffer) for t in self.tensors)
        return (
            f"awaited tensor {missing}, {done_bytes} of {total_bytes} bytes have arrived; last break: {self.last_break}"
        )


async def _attempt(state: _Pull) -> bool:
    """Go on over new connections; False when one broke. The first error ends them all."""
    try:
        first = await state.connect()
        try:
            await _over(first, state)
        finally:
            await first.close()  # open until here: the version is not dropped between two tensors
    except SourceBrokenError as error:
        state.last_break = str(error)
        return False
    except NotKeptError as error:
        raise VersionGoneError(f"{state.named()}: gone: {error}") from None
    except SourceRefusedError as error:
        raise WeightsError(f"{state.named()}: refused: {error}") from None
    return True


async def _over(first: Source, state: _Pull) -> None:
    """Fetch what is missing, by several streams at once."""
    manifest = await first.manifest(state.version)
    state.leading_to = {delta.new_hash: delta for delta in manifest.deltas}
    if state.tensors is None:
        state.tensors = _arriving(manifest, state)
        if state.cache is not None:
            state.cache.begin(manifest.tensors, wait_s=state.cache_s)
    pending = _Pending(deque(t for t in state.tensors if not t.verified), deque())
    if state.cache is not None:
        state.cache.shuffle(pending.tensors)
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(min(_STREAMS, pending.most_streams)):
                work = _work(first, state, pending=pending) if number == 0 else _another(state, pending=pending)
                group.create_task(work, name=f"fetch-{number}")
    except ExceptionGroup as errors:
        raise min(errors.exceptions, key=lambda e: isinstance(e, SourceBrokenError)) from None


def _arriving(manifest: pb.Manifest, state: _Pull) -> list[FetchedTensor]:
    if manifest.hash_algorithm != HASH_ALGORITHM:
        raise WeightsError(
            f"{state.named()}: refused: the trainer hashes weights by {manifest.hash_algorithm or 'blake2b'}, "
            f"this generator verifies {HASH_ALGORITHM}; run one release everywhere"
        )
    got = manifest_hash(manifest.tensors)
    if got != state.version.hash:
        raise WeightsError(
            f"{state.named()}: its manifest hashes to {got.hex()}, announced was {state.version.hash.hex()}"
        )
    fresh = [entry for entry in manifest.tensors if not _is_held(entry, state)]
    places = [0]
    for entry in fresh:
        places.append(places[-1] + -(-entry.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    memory = reserved(places[-1])
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


async def _another(state: _Pull, *, pending: _Pending) -> None:
    source = await state.connect()
    try:
        await _work(source, state, pending=pending)
    finally:
        await source.close()


async def _work(source: Source, state: _Pull, *, pending: _Pending) -> None:
    """One stream's part."""
    while pending.pieces or pending.tensors:
        if not pending.pieces:
            await _look_nearby(source, state, pending=pending)
            continue
        tensor, piece = pending.pieces.popleft()
        await source.fetch(piece, arrived=state.arrived)
        tensor.missing.remove(piece)
        if not tensor.missing:
            await _verify(state, tensor=tensor)


async def _look_nearby(source: Source, state: _Pull, *, pending: _Pending) -> None:
    """Take the next tensor; it is had, or its pieces are pending."""
    tensor = pending.tensors.popleft()
    cached = None if state.cache is None or tensor.arrived_bytes else await state.cache.read(tensor.entry)
    if cached is not None:
        tensor.have(cached)
    elif not tensor.arrived_bytes and await _by_deltas(source, state, tensor=tensor):
        _kept(state, tensor=tensor)
    elif tensor.missing:
        pending.pieces.extend((tensor, piece) for piece in tensor.missing)
    else:
        await _verify(state, tensor=tensor)


async def _verify(state: _Pull, *, tensor: FetchedTensor) -> None:
    try:
        await tensor.verify()
    except WeightsError as error:
        raise WeightsError(f"{state.named()}: tensor {tensor.entry.name}: {error}") from None
    _kept(state, tensor=tensor)


async def _by_deltas(source: Source, state: _Pull, *, tensor: FetchedTensor) -> bool:
    """Whether the tensor was made of what is held."""
    held = None if tensor.entry.name in state.whole else state.nearby.held.get(tensor.entry.name)
    deltas = way(tensor.entry, held=held.entry.hash, leading_to=state.leading_to) if held is not None else ()
    if held is None or not deltas:
        return False
    from streamrl_workers.weights.delta import DeltaError  # numpy, where there are deltas

    try:
        parts = [await _delta(source, state, delta=delta) for delta in deltas]
        made = await asyncio.to_thread(follow, deltas, parts=parts, base=held.buffer)
    except (SourceRefusedError, DeltaError) as error:
        if not state.whole:
            _log.warning("%s: tensor %s: no delta: %s; it is fetched whole", state.named(), tensor.entry.name, error)
        state.whole.add(tensor.entry.name)
        state.nearby.delta_failed()
        return False
    state.nearby.delta_used(tensor.entry.size_bytes - sum(delta.size_bytes for delta in deltas))
    tensor.have(made)
    return True


async def _delta(source: Source, state: _Pull, *, delta: pb.TensorDelta) -> memoryview:
    """Its bytes; what had arrived before a break is not asked for again."""
    piece = state.deltas.setdefault(
        delta.hash, Piece(hash=delta.hash, buffer=reserved(delta.size_bytes), begin=0, end=delta.size_bytes)
    )
    if piece.begin < piece.end:
        await source.fetch(piece, arrived=state.arrived)
    return piece.buffer


def _kept(state: _Pull, *, tensor: FetchedTensor) -> None:
    if state.cache is not None:
        state.cache.write(tensor.entry, tensor.buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Verified bytes of a version."""

    version: pb.VersionName
    tensors: dict[str, TensorBytes]
    fetch_s: float
    at_s: float
    """When they were all there, by the monotonic clock."""


Pull = Callable[[pb.WeightsAvailable], Awaitable[dict[str, TensorBytes]]]


class Puller:
    """Pulls what is announced; `wake` is called when a version is ready and when pulling ends, `failed` with each error."""

    def __init__(self, pull: Pull, *, wake: Callable[[], None], failed: Callable[[pb.VersionName, str], None]) -> None:
        self._pull = pull
        self._wake = wake
        self._failed = failed
        self._target: pb.WeightsAvailable | None = None
        """What the task pulls, or pulled last."""
        self._next: pb.WeightsAvailable | None = None
        """What it pulls afterwards."""
        self._task: asyncio.Task[None] | None = None
        self._ready: Pulled | None = None

    @property
    def pulling(self) -> bool:
        """Whether bytes are on their way."""
        return self._task is not None and not self._task.done()

    @property
    def ready(self) -> bool:
        """Whether a pulled version waits for the engine."""
        return self._ready is not None

    def announce(self, target: pb.WeightsAvailable) -> None:
        """Pull `target` next, unless that is already being done or was done."""
        if self.pulling and self._target is not None and _of_one_trainer(self._target, target):
            self._next = None if target == self._target else target
            return
        if target == self._target and self.ready:
            return
        self._target, self._next, self._ready = target, None, None
        self._task = asyncio.get_running_loop().create_task(
            self._replace(self._task), name=f"pull-{target.version.step}"
        )
        self._task.add_done_callback(lambda _: self._wake())

    def drop(self) -> None:
        """Nothing is wanted: the engine has what was announced last."""
        self._target = self._next = self._ready = None
        if self._task is not None:
            self._task.cancel()

    def take(self) -> Pulled:
        """The pulled version; it is the caller's now."""
        assert self._ready is not None, "nothing is ready"
        ready, self._ready = self._ready, None
        return ready

    def check(self) -> None:
        """Raise the fault that ended the pull task, if one did."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """End the pull task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _replace(self, old: "asyncio.Task[None] | None") -> None:
        if old is not None:
            old.cancel()
            await asyncio.wait({old})
        while self._target is not None:
            await self._until_had(self._target)
            if self._next is None:
                return
            self._target, self._next = self._next, None

    async def _until_had(self, target: pb.WeightsAvailable) -> None:
        """Until it is ready, is gone, or failed while a newer one waits."""
        backoff = Backoff(first_s=_RETRY_FIRST_S, limit_s=_RETRY_LIMIT_S)
        while True:
            begun_s = time.monotonic()
            try:
                tensors = await self._pull(target)
            except WeightsError as error:
                self._failed(target.version, str(error))
                if isinstance(error, VersionGoneError) or self._next is not None:
                    return  # asking again is pointless; a newer one is there or will be announced
                await backoff.pause()
                if self._next is not None:
                    return
            else:
                at_s = time.monotonic()
                self._ready = Pulled(version=target.version, tensors=tensors, fetch_s=at_s - begun_s, at_s=at_s)
                self._wake()
                return


def _of_one_trainer(one: pb.WeightsAvailable, other: pb.WeightsAvailable) -> bool:
    """Whether the same attempt of the same trainer has published both."""
    return one.address == other.address and one.version.attempt == other.version.attempt
