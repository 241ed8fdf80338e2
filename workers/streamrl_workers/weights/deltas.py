"""Which deltas there are between the versions of a trainer's rank; and slices made by them of those that are held, a `SliceSource`.

    version        5 ──────▶ 6 ──────▶ 7        a manifest of 7 names the deltas of both steps
    held by        a puller that has 5 takes two for each slice, one that has 6 takes one, one that has nothing takes the slices

Owns the bytes of the newest deltas, and their bound. Does not own what is in a delta (`delta.py`), the slices, nor how bytes travel (`address.py`).

Invariants:
- The deltas have at most `_MOST_SHARE` of the bytes of a version, and are of at most `_MOST_STEPS` steps; the oldest go first.
- A chain is shorter than the slice, whatever a manifest says.
"""

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import bytes_hash, reserved, usable_deltas
from streamrl_workers.weights.source import BusyTime, Piece, SliceSource, SourceRefusedError, WantedSlice, in_thread

_MOST_SHARE = 0.75
"""Of a version: as much as one step can have. Where few bytes change that is many steps; a puller with an older version takes whole slices."""
_MOST_STEPS = 8
"""Each delta has an entry in each manifest."""

_log = logging.getLogger("streamrl.weights")

_Step = dict[bytes, tuple[pb.TensorDelta, memoryview]]
"""By hash of the delta."""


class KeptSlice(NamedTuple):
    """Bytes that never change, and what they are."""

    data: memoryview
    entry: pb.TensorSlice
    element_bytes: int


SliceKey = tuple[str, int]
"""Name of the tensor, first row: slices of two versions are compared where both are the same."""


class DeltaStore:
    """The newest deltas of a trainer. `make` is called by one thread, the rest by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._has_failed = False  # it is logged once
        self.made_bytes = 0
        """Since the process began."""
        self.seconds = 0.0
        """That it took."""

    def make(self, before: Mapping[SliceKey, KeptSlice], after: Mapping[SliceKey, KeptSlice]) -> list[pb.TensorDelta]:
        """Make those from the version before to this one; what can be had then, oldest first."""
        begun_s = time.perf_counter()
        step: _Step = {}
        try:
            for base, new in _changed(before, after):
                step.update(_made(base, new))
        except (RuntimeError, MemoryError) as error:  # no thread, or no memory: pullers can do without
            if not self._has_failed:
                _log.warning("no deltas to this version: %s", str(error) or type(error).__name__)
            self._has_failed = True
            step.clear()
        most_bytes = int(_MOST_SHARE * sum(one.entry.size_bytes for one in after.values()))
        with self._lock:
            self._steps.append(step)
            while sum(map(_size_bytes, self._steps)) > most_bytes:
                self._steps.popleft()
            self.made_bytes += _size_bytes(step)
            self.seconds += time.perf_counter() - begun_s
            return [entry for kept in self._steps for entry, _ in kept.values()]

    def content(self, content_hash: bytes) -> memoryview | None:
        """The delta of this hash; None when it is not kept."""
        with self._lock:
            return next((step[content_hash][1] for step in self._steps if content_hash in step), None)


def _made(base: KeptSlice, new: KeptSlice) -> _Step:
    from streamrl_workers.weights.delta import encode  # numpy

    before, after = base.entry.hash, new.entry.hash
    made = encode(base.data, new.data, width=new.element_bytes, base_hash=before, new_hash=after)
    if made is None:
        return {}
    data = memoryview(made)
    entry = pb.TensorDelta(base_hash=before, new_hash=after, hash=bytes_hash(data), size_bytes=len(data))
    return {entry.hash: (entry, data)}


def _changed(
    before: Mapping[SliceKey, KeptSlice], after: Mapping[SliceKey, KeptSlice]
) -> Iterable[tuple[KeptSlice, KeptSlice]]:
    """Base and new of each content once: names may share their bytes."""
    pairs = {}
    for key, new in after.items():
        base = before.get(key)
        if base is not None and base.entry.hash != new.entry.hash and base.entry.size_bytes == new.entry.size_bytes:
            pairs[base.entry.hash, new.entry.hash] = base, new
    return pairs.values()


def _size_bytes(step: _Step) -> int:
    return sum(entry.size_bytes for entry, _ in step.values())


Fetch = Callable[[Piece, int], Awaitable[None]]
"""Brings what has not arrived of a content, from its holder; a piece of all of it."""


class DeltaChains(SliceSource):
    """Deltas from held slices, for one pull: over all its connections."""

    def __init__(
        self,
        *,
        held: Mapping[bytes, memoryview],
        fetch: Fetch,
        applying: BusyTime,
        used: Callable[[int], None],
        failed: Callable[[], None],
    ) -> None:
        """`used` is called with the bytes that were not fetched, `failed` when a slice is fetched all the same."""
        self._held = held
        self._fetch = fetch
        self._applying = applying
        self._used = used
        self._failed = failed
        self._leading_to: dict[bytes, pb.TensorDelta] = {}
        self._arriving: dict[bytes, Piece] = {}  # or there, by hash of the delta
        self._fetching: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)  # slices may share a delta
        self._saved: dict[WantedSlice, int] = {}
        self._useless = set[WantedSlice]()  # their deltas could not be used: they are not tried again

    @property
    def arrived_bytes(self) -> int:
        """Bytes of deltas. May be asked by any thread."""
        return sum(piece.begin for piece in list(self._arriving.values()))

    def follow(self, manifest: pb.Manifest) -> None:
        """Take the deltas that a source offers, instead of those of the source before."""
        self._leading_to = usable_deltas(manifest)

    async def fill(self, wanted: WantedSlice) -> bool:
        """Make the slice of one that is held. Raises as `Source.fetch` of a connection that broke, or of a source that waits."""
        base, chain = chain_to(wanted.entry, held=self._held, leading_to=self._leading_to)
        if not chain or wanted in self._useless:
            return False
        from streamrl_workers.weights.delta import DeltaError  # numpy, where there are deltas

        try:
            parts = [await self._fetched(delta) for delta in chain]
            with self._applying.running():
                await in_thread(lambda: _apply(chain, parts=parts, base=self._held[base], into=wanted.buffer))
        except (
            SourceRefusedError,
            DeltaError,
            RuntimeError,
            MemoryError,
        ) as error:  # no memory or thread for it either
            self._give_up(wanted, str(error) or type(error).__name__)
            return False
        self._saved[wanted] = wanted.entry.size_bytes - sum(delta.size_bytes for delta in chain)
        return True

    def accept(self, wanted: WantedSlice) -> None:
        self._used(self._saved[wanted])

    def refute(self, wanted: WantedSlice, *, got: bytes) -> None:
        self._give_up(wanted, f"they make {got.hex()}")

    def _give_up(self, wanted: WantedSlice, reason: str) -> None:
        if not self._useless:
            _log.warning("no delta for tensor %s: %s; it is fetched whole", wanted.tensor, reason)
        self._useless.add(wanted)
        self._failed()

    async def _fetched(self, delta: pb.TensorDelta) -> memoryview:
        """Return its bytes; what had arrived before a break is not asked for again."""
        async with self._fetching[delta.hash]:
            piece = self._arriving.get(delta.hash)
            if piece is None:
                buffer = reserved(delta.size_bytes)
                piece = self._arriving[delta.hash] = Piece(hash=delta.hash, buffer=buffer, begin=0, end=len(buffer))
            await self._fetch(piece, delta.holder)
        return piece.buffer


def chain_to(
    wanted: pb.TensorSlice, *, held: Mapping[bytes, memoryview], leading_to: Mapping[bytes, pb.TensorDelta]
) -> tuple[bytes, Sequence[pb.TensorDelta]]:
    """Return a held content and the deltas from it to the wanted one, in their order; no deltas if no chain is shorter than the slice.

    `leading_to`: deltas by the hash of what they make.
    """
    chain: list[pb.TensorDelta] = []
    place = wanted.hash
    while place not in held:
        delta = leading_to.get(place)
        if delta is None or len(chain) == _MOST_STEPS:
            return b"", ()
        chain.insert(0, delta)
        place = delta.base_hash
    is_shorter = sum(delta.size_bytes for delta in chain) < wanted.size_bytes == len(held[place])
    return place, chain if is_shorter else ()


def _apply(chain: Sequence[pb.TensorDelta], *, parts: Sequence[memoryview], base: memoryview, into: memoryview) -> None:
    """Write what they make of `base`, one after the other. Raises `delta.DeltaError`."""
    from streamrl_workers.weights.delta import apply  # numpy

    for delta, part in zip(chain, parts, strict=True):
        apply(part, base=base, base_hash=delta.base_hash, new_hash=delta.new_hash, into=into)
        base = into
