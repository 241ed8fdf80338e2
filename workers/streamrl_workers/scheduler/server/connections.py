"""Connections of generators, agent hosts and the trainer: who is connected, what waits for a peer, the course of a connection.

Owns the mapping from names to links, the bounded queue of commands to one peer, and a connection's greeting, two loops
and one end. Does not own what events mean (`service.py`), nor decisions: the core has its own view of who is alive, fed
by the same connections.

A name belongs to one process. The same process may connect again at any time; another one gets the name when the
connection of the first is gone, or the core has given it up as silent. So of two that live, neither takes it from the other.

Writer loop of a link: consumes queued commands; produces frames; waits for commands (unblocked by `send` and `end`) and
for the peer, which must take each frame within `STALL_S`.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from streamrl.keys import ENV_PROCESS
from streamrl.names import AGENTS
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.shutdown import first_of
from streamrl_workers.scheduler.effects import DeliverGroup
from streamrl_workers.scheduler.server.lifetime import ExitDecision, report
from streamrl_workers.scheduler.server.peer_messages import LIMIT_BYTES, group_commands
from streamrl_workers.scheduler.server.rates import BeatWindow
from streamrl_workers.stream.auth import Context
from streamrl_workers.stream.messages import ProtocolError, frames

log = logging.getLogger("streamrl.scheduler")

STALL_S = 60.0
"""A peer that takes nothing for so long is gone."""


class SlowPeerError(RuntimeError):
    """The peer does not read what it is sent."""


@dataclass(slots=True)
class Traffic:
    """Bytes of messages, over all connections of a pool."""

    received_bytes: int = 0
    sent_bytes: int = 0


class CountedFrames:
    """What a peer sends, counted."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        self._frames = frames
        self.traffic = Traffic()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for frame in self._frames:
            self.traffic.received_bytes += len(frame)
            yield frame


class PeerLink:
    """Commands to one peer."""

    def __init__(self, peer: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.peer = peer
        self.traffic = Traffic()
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
                data = frame.SerializeToString()
                async with asyncio.timeout(STALL_S):
                    await write(data)
                self.traffic.sent_bytes += len(data)
        except TimeoutError:
            raise SlowPeerError(f"{self.peer} took nothing for {STALL_S:g} s") from None

    def _break(self, reason: str) -> None:
        if not self._broken.done():
            self._broken.set_exception(SlowPeerError(f"{self.peer} is cut off: {reason}"))
            self._broken.exception()  # seen: nobody may be left to wait for it


@dataclass(slots=True, kw_only=True)
class GeneratorEntry:
    """One connected generator."""

    command: ClassVar = pb.GeneratorCommand
    link: PeerLink
    hello: pb.GeneratorHello
    version_step: int | None
    """Weights in its engine."""
    beats: BeatWindow
    refused: str = ""
    """Instance that was last refused because this one has the name."""
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)

    @property
    def name(self) -> str:
        """One connection of a name at a time."""
        return self.hello.generator_id

    @property
    def pool(self) -> str:
        """Of the generator."""
        return self.hello.pool


TRAINER = "the trainer"
"""Whatever its name: there is one. No generator may be called so."""


@dataclass(slots=True, kw_only=True)
class TrainerEntry:
    """The connected trainer."""

    command: ClassVar = pb.TrainerCommand
    link: PeerLink
    hello: pb.TrainerHello
    beats: BeatWindow
    refused: str = ""
    """As a generator's."""
    heartbeat: pb.TrainerHeartbeat = field(default_factory=pb.TrainerHeartbeat)
    name: str = TRAINER
    pool: str = ""
    """It is of none."""


@dataclass(slots=True, kw_only=True)
class AgentHostEntry:
    """The connected link of an agent host."""

    command: ClassVar = pb.AgentsCommand
    link: PeerLink
    hello: pb.AgentsHello
    refused: str = ""
    """As a generator's."""

    @property
    def name(self) -> str:
        """As no generator can be called."""
        return f"agent host {self.hello.host_id}"

    @property
    def pool(self) -> str:
        """Of all agent hosts."""
        return AGENTS


Entry = GeneratorEntry | TrainerEntry | AgentHostEntry
_NO_LOADS: Mapping[str, float] = {"loads": 0} | {
    f"{part}_seconds": 0.0 for part in ("pull", "pause", "copy", "load", "cache")
}


class Connections:
    """Links by name. One link per generator or agent host, one trainer: a new connection replaces the old one."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._pools = Counter[str]()
        self._stop: str | None = None
        self._trainer_told = False
        self._changed = asyncio.Event()
        self._traffic: dict[str, Traffic] = {}
        self._loads = dict(_NO_LOADS)
        self.on_change: Callable[[], None] = lambda: None
        """Somebody has come or gone."""
        self.on_event: Callable[[str, Any], None] = lambda name, event: None
        """Told of a peer's events that count, before the core is; None: the peer has left."""

    def pools(self) -> Counter[str]:
        """Pool -> its connected generators; the trainer stands under ""."""
        return +self._pools

    def count(self, pools: Iterable[str]) -> None:
        """Count the traffic of these pools; a peer may name any other."""
        self._traffic = {pool: Traffic() for pool in pools}

    def traffic(self, pool: str) -> Traffic:
        """Of all generators of a pool since the start; of the trainer: pool ""."""
        return self._traffic.get(pool, Traffic())

    def loaded(self, loaded: pb.WeightsLoaded) -> None:
        """Count the seconds of a version that a generator has loaded; one that it had already took none."""
        if not loaded.load_s:
            return
        copy_s, pause_s, cache_s = (loaded.load_parts.get(part, 0.0) for part in ("copy", "pause", "cache"))
        load_s = loaded.load_s - copy_s - pause_s - cache_s
        took = (1, loaded.fetch_s, loaded.waited_s + pause_s, copy_s, load_s, cache_s)
        self._loads = {name: total + more for (name, total), more in zip(self._loads.items(), took, strict=True)}

    def take_loads(self) -> dict[str, float]:
        """Number of loads and sums of their seconds, since the last call."""
        loads, self._loads = self._loads, dict(_NO_LOADS)
        return loads

    @property
    def generators(self) -> dict[str, GeneratorEntry]:
        """Connected generators by id."""
        return {name: entry for name, entry in self._entries.items() if isinstance(entry, GeneratorEntry)}

    @property
    def trainer(self) -> TrainerEntry | None:
        """The connected trainer."""
        entry = self._entries.get(TRAINER)
        return entry if isinstance(entry, TrainerEntry) else None

    def refusal(self, entry: Entry) -> str:
        """Why the peer must not take its place, since another process has it; "" if none has."""
        holder = self._entries.get(entry.name)
        if holder is None or holder.hello.instance == entry.hello.instance:
            return ""
        text = (
            f"{holder.link.peer} is connected as instance {holder.hello.instance}; instance {entry.hello.instance} gets its place "
            f"when that one has ended or falls silent; if both are to run, give each its own {ENV_PROCESS}"
        )
        if holder.refused != entry.hello.instance:  # it comes again every few seconds
            holder.refused = entry.hello.instance
            log.warning("refused %s: %s", entry.link.peer, text)
        return text

    def add(self, entry: Entry) -> Entry | None:
        """Connect; the entry that it replaces, if the peer was connected already."""
        old = self._entries.pop(entry.name, None)
        if old is not None:
            old.link.end()
            self._pools[old.pool] -= 1
        self._entries[entry.name] = entry
        self._pools[entry.pool] += 1
        self.on_change()
        return old

    def remove(self, entry: Entry) -> bool:
        """Disconnect; False if a newer connection has replaced this one."""
        if self._entries.get(entry.name) is not entry:
            return False
        del self._entries[entry.name]
        self._pools[entry.pool] -= 1
        self.on_change()
        self._changed.set()
        return True

    def hears(self, entry: Entry) -> bool:
        """Whether what this connection says counts: no newer one has replaced it, nobody has been told to end."""
        return self._entries.get(entry.name) is entry and not self.stopping

    def to_generator(self, generator_id: str, command: pb.GeneratorCommand) -> None:
        """Send; a command for one that has just left is lost, as its connection is (the core hears of that)."""
        entry = self._entries.get(generator_id)
        if entry is not None:
            entry.link.send(command)

    def to_trainer(self, command: pb.TrainerCommand) -> None:
        """Send to the trainer, if it is connected."""
        if self.trainer is not None:
            self.trainer.link.send(command)

    def deliver_group(self, effect: DeliverGroup) -> None:
        """Send a group to the trainer, if it is connected."""
        if self.trainer is not None:
            self.trainer.link.send_later(lambda: group_commands(effect))

    def stop_all(self, reason: str) -> None:
        """Tell everybody to end, also those who connect from now on."""
        self._stop = reason
        for entry in self._entries.values():
            self.stop(entry)

    def stop(self, entry: Entry) -> None:
        """Tell one peer to end."""
        self._trainer_told |= entry.name == TRAINER
        stop = pb.Stop(reason=self._stop or "")
        entry.link.send(entry.command(stop=stop))
        entry.link.end()

    @property
    def stopping(self) -> bool:
        """Whether everybody has been told to end."""
        return self._stop is not None

    async def wait_until_told(self, *, timeout_s: float) -> bool:
        """Wait until the trainer and all others that are connected have been told and are gone; False if time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._entries or not self._trainer_told:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


HELLO_TIMEOUT_S = 10.0
"""A connection that does not say who it is for so long is closed."""

Events = AsyncIterator[Any]
"""The peer's events."""
Handlers = Mapping[str, Callable[[Any], None]]
"""Kind of event -> what it does."""


class PeerHandler(ABC):
    """One side's part of a connection, from hello to the end of its stream."""

    def __init__(self, connections: Connections, entry: Entry) -> None:
        self.connections = connections
        self.entry = entry
        self.handlers: Handlers = {}

    @abstractmethod
    def on_join(self) -> None:
        """Say hello to the core."""

    @abstractmethod
    def on_leave(self) -> None:
        """Say good-bye to the core."""

    def refusal(self) -> str:
        """Why it cannot be let in now; "" if it can."""
        return self.connections.refusal(self.entry)

    def join(self) -> bool:
        """Take the peer's place; False if it was told to stop instead."""
        replaced = self.connections.add(self.entry)
        if self.connections.stopping:
            self.connections.stop(self.entry)
            return False
        if replaced is not None:
            self._left()
        self.on_join()
        return True

    def leave(self, reason: str) -> None:
        """Give the place back, unless a newer connection has taken it."""
        if self.connections.remove(self.entry) and not self.connections.stopping:
            log.info("%s has left: %s", self.entry.link.peer, reason)
            self._left()

    async def take(self, event: Any) -> None:  # noqa: ANN401 - either direction's event
        """Handle one event."""
        if self.connections.hears(self.entry):
            self.connections.on_event(self.entry.name, event)
            dispatch(event, self.handlers)

    def _left(self) -> None:
        self.connections.on_event(self.entry.name, None)
        self.on_leave()


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
            await peer.entry.link.write_all(context.write)
            return
        await first_of(reader=_read(peer, events), writer=peer.entry.link.write_all(context.write))
    except (SlowPeerError, ProtocolError) as error:
        reason = str(error)
        log.warning("%s is disconnected: %s", peer.entry.link.peer, reason)
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
