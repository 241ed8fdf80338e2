"""Servers of weights in processes of their own, for tests of the pull."""

import multiprocessing
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.tls import Tls
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash, describe
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.pull import Route, pull
from streamrl_workers.weights.store import WeightStore

TOKEN = "secret"
START_TIMEOUT_S = 240.0
SIZES = {"big": 8 * 2**20, "small": 1000, "odd": 12345, "empty": 0}
"""Bytes of each tensor of the test version."""
VERSIONS = (4, 5, 6, 7)
"""Published one after the other where there are deltas."""
NAMES: dict[bytes, str] = {}
"""Of its tensors by their hashes, in a server's process."""


def make_tensors(step: int = 5) -> dict[str, TensorBytes]:
    """The same bytes in every process."""
    pattern = bytes((step + place * 7) % 251 for place in range(1009))
    return {
        name: TensorBytes("uint8", (size,), memoryview((pattern * (size // 1009 + 1))[:size]))
        for name, size in SIZES.items()
    }


class Slowed(HttpWeightServer):
    """Serves at most `allowed` slices of `big` in all, then waits for its death."""

    slice_bytes = 64 * 1024

    def __init__(self, store: WeightStore, *, allowed: int, served: Connection, **options: Any) -> None:
        self._left = allowed
        self._served = served
        self._telling = threading.Lock()
        super().__init__(store, **options)

    def content(self, content_hash, *, begin, end):
        name = NAMES[content_hash]
        self._tell((name, begin))
        for piece in super().content(content_hash, begin=begin, end=end):
            if self._left == 0 and name == "big":
                self._tell("stuck")
                threading.Event().wait()
            self._left -= name == "big"
            yield piece

    def _tell(self, event: object) -> None:
        with self._telling:
            self._served.send(event)


class Corrupting(HttpWeightServer):
    """Flips a bit in the last slice of `odd`."""

    def content(self, content_hash, *, begin, end):
        for piece in super().content(content_hash, begin=begin, end=end):
            data = bytearray(piece)
            data[-1] ^= 1 if NAMES[content_hash] == "odd" else 0
            yield memoryview(data)


class Older(HttpWeightServer):
    """Of a release that names no algorithm."""

    def manifest(self, version, *, kept):
        manifest = pb.Manifest.FromString(super().manifest(version, kept=kept).SerializeToString())
        manifest.ClearField("hash_algorithm")
        return manifest


class Rebased(HttpWeightServer):
    """Names other bytes for the tensor `big` than the version's hash was formed of."""

    def manifest(self, version, *, kept):
        manifest = pb.Manifest.FromString(super().manifest(version, kept=kept).SerializeToString())
        manifest.tensors[0].slices[0].hash = bytes_hash(memoryview(b"another base"))
        return manifest


class DamagedDeltas(HttpWeightServer):
    """Flips a bit in each delta."""

    def content(self, content_hash, *, begin, end):
        for piece in super().content(content_hash, begin=begin, end=end):
            data = bytearray(piece)
            data[-1] ^= content_hash not in NAMES
            yield memoryview(data)


class StuckDeltas(HttpWeightServer):
    """Sends half of the first delta, then waits for its death."""

    def __init__(self, store: WeightStore, *, served: Connection, **options: Any) -> None:
        self._served = served
        super().__init__(store, **options)

    def content(self, content_hash, *, begin, end):
        for piece in super().content(content_hash, begin=begin, end=end):
            yield piece[: len(piece) // 2]
            self._served.send("stuck")
            threading.Event().wait()


class LyingDeltas(HttpWeightServer):
    """Names for each tensor the delta of another one."""

    def manifest(self, version, *, kept):
        manifest = pb.Manifest.FromString(super().manifest(version, kept=kept).SerializeToString())
        named = [(delta.hash, delta.size_bytes) for delta in manifest.deltas]
        for delta, (other, size_bytes) in zip(manifest.deltas, [*named[1:], named[0]], strict=True):
            delta.hash, delta.size_bytes = other, size_bytes
        return manifest


class LongerDeltas(HttpWeightServer):
    """Says of each delta that it has a byte more."""

    def manifest(self, version, *, kept):
        manifest = pb.Manifest.FromString(super().manifest(version, kept=kept).SerializeToString())
        for delta in manifest.deltas:
            delta.size_bytes += 1
        return manifest


class GoneDeltas(DeltaStore):
    """Has none any more of those that it named."""

    def content(self, content_hash):
        return None


def _main(pipe: Connection, kind: str, port: int, allowed: int) -> None:
    deltas = {"gone-deltas": GoneDeltas}.get(kind, DeltaStore)() if "deltas" in kind else None
    store = WeightStore(deltas=deltas)
    for step in (5,) if deltas is None else VERSIONS:
        store.publish(attempt=1, step=step, tensors=make_tensors(step))
        NAMES.update({entry.slices[0].hash: entry.name for entry in describe(make_tensors(step))})
    make = {
        "plain": HttpWeightServer,
        "slowed": partial(Slowed, allowed=allowed, served=pipe),
        "corrupting": Corrupting,
        "older": Older,
        "rebased": Rebased,
        "deltas": HttpWeightServer,
        "gone-deltas": HttpWeightServer,
        "damaged-deltas": DamagedDeltas,
        "lying-deltas": LyingDeltas,
        "longer-deltas": LongerDeltas,
        "stuck-deltas": partial(StuckDeltas, served=pipe),
    }[kind]
    pipe.send(make(store, token=TOKEN, port=port).address)
    threading.Event().wait()


async def pull_from(
    target: pb.WeightsAvailable, *, timeout_s: float, token: str = TOKEN, tls: Tls | None = None, **options: Any
) -> dict[str, TensorBytes]:
    """As a generator pulls, over HTTP."""
    return await pull_along(Route(target), timeout_s=timeout_s, token=token, tls=tls, **options)


async def pull_along(
    route: Route,
    *,
    timeout_s: float,
    token: str = TOKEN,
    tls: Tls | None = None,
    arrived: Callable[[int], None] = lambda _: None,
    **options: Any,
) -> dict[str, TensorBytes]:
    """The same, by a route that a `Puller` has made."""

    def connect(target: pb.WeightsAvailable) -> Awaitable[HttpSource]:
        role = "generator" if target.peer else "trainer"
        return HttpSource.connect(target.address, tls=tls, token=token, role=role)

    def told(_: pb.WeightsAvailable, size_bytes: int) -> None:
        arrived(size_bytes)

    return await pull(route, timeout_s=timeout_s, connect=connect, arrived=told, **options)


@contextmanager
def weight_server(
    kind: str = "plain", *, port: int = 0, allowed: int = 10**9
) -> Iterator[tuple[str, Connection, object]]:
    """A serving process: its address, its pipe of events, and the process itself (killed at the end)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, kind, port, allowed), daemon=True)
    process.start()
    try:
        assert ours.poll(START_TIMEOUT_S), f"waited {START_TIMEOUT_S} s for the server to start"
        yield ours.recv(), ours, process
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()
