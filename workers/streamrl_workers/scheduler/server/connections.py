"""Connections of generators and of the trainer: who is connected, what waits for a peer, the course of a connection.

Owns the mapping from names to links, the bounded queue of commands to one peer, and a connection's greeting, two loops
and one end. Does not own what events mean (`service.py`), nor decisions: the core has its own view of who is alive, fed
by the same connections.

Writer loop of a link: consumes queued commands; produces frames; waits for commands (unblocked by `send` and `end`) and
for the peer, which must take each frame within `STALL_S`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import DeliverGroup
from streamrl_workers.scheduler.server.lifetime import ExitDecision, report
from streamrl_workers.scheduler.server.peer_messages import LIMIT_BYTES, group_commands
from streamrl_workers.scheduler.server.rates import BeatWindow
from streamrl_workers.stream.auth import Context
from streamrl_workers.stream.messages import ProtocolError, frames

MAX_NAMES, MAX_INSTANCES = 16_384, 64
"""Names that are remembered, and processes of each: more than a run has at once."""


class Message(Protocol):
    """A command of the protocol, for either kind of peer."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""


STALL_S = 60.0
"""A peer that takes nothing for so long is gone."""


class SlowPeerError(RuntimeError):
    """The peer does not read what it is sent."""


class PeerLink:
    """Commands to one peer."""

    def __init__(self, peer: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.peer = peer
        self._limit_bytes = limit_bytes
        self._queue: deque[tuple[int, Callable[[], Iterable[bytes]]]] = deque()
        self._queued_bytes = 0
        self._ending = False
        self._wake = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: Message) -> None:
        """Queue a message; what comes after `end` or a break is lost, as the connection is."""
        data = message.SerializeToString()  # once, here: the queue is bounded in bytes
        self._put(len(data), lambda: (data,))

    def send_later(self, make: Callable[[], Iterable[bytes]]) -> None:
        """Queue messages that are made when it is their turn: until then they take no memory of their own."""
        self._put(0, make)

    def _put(self, size_bytes: int, make: Callable[[], Iterable[bytes]]) -> None:
        if self._ending or self._broken.done():
            return
        self._queue.append((size_bytes, make))
        self._queued_bytes += size_bytes
        if self._queued_bytes > self._limit_bytes:
            self._break(f"{self._queued_bytes} bytes wait for it, more than {self._limit_bytes}")
        self._wake.set()

    def end(self) -> None:
        """Close after what is queued."""
        self._ending = True
        self._wake.set()

    async def write_all(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write until `end`.

        Raises:
            SlowPeerError: the peer did not read; the connection is to be closed.
        """
        writer = asyncio.create_task(self._write(write), name=f"write to {self.peer}")
        try:
            await asyncio.wait({writer, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                await self._broken
            await writer
        finally:
            writer.cancel()
            self._queue.clear()
            self._break("its connection is closed")

    async def _write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            while self._queue:
                size_bytes, make = self._queue.popleft()
                for message in make():
                    await self._write_one(write, message)
                self._queued_bytes -= size_bytes
            if self._ending:
                return
            self._wake.clear()
            await self._wake.wait()  # no deadline: a link may have nothing to say for the whole run

    async def _write_one(self, write: Callable[[bytes], Awaitable[None]], message: bytes) -> None:
        try:
            for frame in frames(message):
                async with asyncio.timeout(STALL_S):
                    await write(frame.SerializeToString())
        except TimeoutError:
            raise SlowPeerError(f"{self.peer} took nothing for {STALL_S:g} s") from None

    def _break(self, reason: str) -> None:
        if not self._broken.done():
            self._broken.set_exception(SlowPeerError(f"{self.peer} is cut off: {reason}"))
            self._broken.exception()  # seen: nobody may be left to wait for it


@dataclass(slots=True, kw_only=True)
class GeneratorEntry:
    """One connected generator."""

    link: PeerLink
    hello: pb.GeneratorHello
    version_step: int | None
    """Weights in its engine."""
    beats: BeatWindow
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)


@dataclass(slots=True, kw_only=True)
class TrainerEntry:
    """The connected trainer."""

    link: PeerLink
    hello: pb.TrainerHello
    beats: BeatWindow
    heartbeat: pb.TrainerHeartbeat = field(default_factory=pb.TrainerHeartbeat)


class Fence:
    """Of several processes of one name the newest counts: an older one that comes back is refused for good."""

    def __init__(self) -> None:
        self._instances: dict[str, dict[str, None]] = {}
        """By name: those that were let in, newest last."""

    def admits(self, name: str, instance: str) -> bool:
        """Whether this process may come in: again, or in the place of those before it."""
        instances = self._instances.pop(name, {})
        self._instances[name] = instances
        if instance in instances:
            return instance == next(reversed(instances))
        instances[instance] = None
        _forget_oldest(self._instances, limit=MAX_NAMES)
        _forget_oldest(instances, limit=MAX_INSTANCES)
        return True


def _forget_oldest(memory: dict[str, Any], *, limit: int) -> None:
    while len(memory) > limit:
        del memory[next(iter(memory))]


class Connections:
    """Links by name. One link per generator, one trainer: a new connection replaces the old one."""

    def __init__(self) -> None:
        self._generators: dict[str, GeneratorEntry] = {}
        self._trainer: TrainerEntry | None = None
        self.fence = Fence()
        self._stop: str | None = None
        self._trainer_told = False
        self._changed = asyncio.Event()

    @property
    def generators(self) -> Mapping[str, GeneratorEntry]:
        """Connected generators by id."""
        return self._generators

    @property
    def trainer(self) -> TrainerEntry | None:
        """The connected trainer."""
        return self._trainer

    def add_generator(self, entry: GeneratorEntry) -> GeneratorEntry | None:
        """Connect; the entry that it replaces, if the generator was connected already."""
        old = self._generators.pop(entry.hello.generator_id, None)
        if old is not None:
            old.link.end()
        self._generators[entry.hello.generator_id] = entry
        return old

    def remove_generator(self, entry: GeneratorEntry) -> bool:
        """Disconnect; False if a newer connection has replaced this one."""
        if self._generators.get(entry.hello.generator_id) is not entry:
            return False
        del self._generators[entry.hello.generator_id]
        self._changed.set()
        return True

    def set_trainer(self, entry: TrainerEntry) -> TrainerEntry | None:
        """Connect the trainer; the entry that it replaces."""
        old, self._trainer = self._trainer, entry
        if old is not None:
            old.link.end()
        return old

    def remove_trainer(self, entry: TrainerEntry) -> bool:
        """Disconnect; False if a newer connection has replaced this one."""
        if self._trainer is not entry:
            return False
        self._trainer = None
        self._changed.set()
        return True

    def to_generator(self, generator_id: str, command: pb.GeneratorCommand) -> None:
        """Send; a command for one that has just left is lost, as its connection is (the core hears of that)."""
        entry = self._generators.get(generator_id)
        if entry is not None:
            entry.link.send(command)

    def to_trainer(self, command: pb.TrainerCommand) -> None:
        """Send to the trainer, if it is connected."""
        if self._trainer is not None:
            self._trainer.link.send(command)

    def stop_all(self, reason: str) -> None:
        """Tell everybody to end, also those who connect from now on."""
        self._stop = reason
        for entry in self._generators.values():
            self.stop_generator(entry)
        if self._trainer is not None:
            self.stop_trainer(self._trainer)

    @property
    def stopping(self) -> bool:
        """Whether everybody has been told to end."""
        return self._stop is not None

    def deliver_group(self, effect: DeliverGroup) -> None:
        """Send a group to the trainer, if it is connected."""
        if self._trainer is not None:
            self._trainer.link.send_later(lambda: group_commands(effect))

    async def wait_until_told(self, *, timeout_s: float) -> bool:
        """Wait until the trainer and all connected generators have been told and are gone; False if time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._generators or self._trainer is not None or not self._trainer_told:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def stop_generator(self, entry: GeneratorEntry) -> None:
        """Tell one generator to end."""
        entry.link.send(pb.GeneratorCommand(stop=pb.Stop(reason=self._stop or "")))
        entry.link.end()

    def stop_trainer(self, entry: TrainerEntry) -> None:
        """Tell the trainer to end."""
        self._trainer_told = True
        entry.link.send(pb.TrainerCommand(stop=pb.Stop(reason=self._stop or "")))
        entry.link.end()


HELLO_TIMEOUT_S = 10.0
"""A connection that does not say who it is for so long is closed."""

log = logging.getLogger("streamrl.scheduler")

Events = AsyncIterator[Any]
"""The peer's events."""
Handlers = Mapping[str, Callable[[Any], None]]
"""Kind of event -> what it does."""


class PeerHandler(Protocol):
    """One side's part of a connection."""

    link: PeerLink

    def join(self) -> bool:
        """Say hello to the core; False if the peer was told to stop instead."""

    def leave(self, reason: str) -> None:
        """Say good-bye to the core, unless a newer connection has taken over."""

    async def take(self, event: Any) -> None:  # noqa: ANN401 - either direction's event
        """Handle one event."""


async def greeting(events: Events, context: Context, *, kind: str) -> Any:  # noqa: ANN401 - either hello
    """The first message, which must be a hello."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            event = await anext(events, None)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello of the {kind} within {HELLO_TIMEOUT_S:g} s")
        raise
    except ProtocolError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the {kind}'s hello: {error}")
        raise
    if event is None or event.WhichOneof("event") != "hello":
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the first message of a {kind} must be its hello")
        raise ProtocolError(kind)
    return event.hello


async def serve_peer(peer: PeerHandler, events: Events, *, context: Context, ending: ExitDecision) -> None:
    """Run a connection from its join to its end."""
    reason = "its connection is closed"
    try:
        if not peer.join():
            await peer.link.write_all(context.write)
            return
        await _both(_read(peer, events), peer.link.write_all(context.write))
    except (SlowPeerError, ProtocolError) as error:
        reason = str(error)
        log.warning("%s is disconnected: %s", peer.link.peer, reason)
        refused = isinstance(error, ProtocolError)  # a slow one may come again
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT if refused else grpc.StatusCode.ABORTED, reason)
    except Exception as error:
        if not is_lost_connection(error):
            report(error, ending=ending)  # grpc would only log it
            raise
    finally:
        peer.leave(reason)


def is_lost_connection(error: Exception) -> bool:
    """Whether grpc says that the peer is gone: it has no public type for that on the server's side."""
    return isinstance(error, grpc.RpcError) or type(error).__module__.startswith("grpc.")


def dispatch(event: Any, handlers: Handlers) -> None:  # noqa: ANN401 - either direction's event
    """Hand an event to its handler."""
    kind = event.WhichOneof("event")
    if kind == "hello":
        raise ProtocolError("it said hello twice")
    if kind is not None:  # None: an event of a newer protocol, which we may leave aside
        handlers[kind](getattr(event, kind))


async def _read(peer: PeerHandler, events: Events) -> None:
    async for event in events:
        await peer.take(event)


async def _both(read: Coroutine[Any, Any, None], write: Coroutine[Any, Any, None]) -> None:
    """Run the two loops of a connection until one ends; the other one is ended with it."""
    tasks = [asyncio.create_task(read, name="connection reader"), asyncio.create_task(write, name="connection writer")]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
