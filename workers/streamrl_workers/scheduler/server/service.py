"""The scheduler's ports and its gRPC service: a stream for each generator and agent host, one for the trainer, the model's files.

Owns binding, publishing and closing the two ports, and what each event of a peer does: it goes through the executor to
the core, on the event loop's thread. Decides nothing. The course of a connection is in `connections.py`.

Reader loop of a connection: consumes the peer's events; produces calls of the core; waits for the
peer (unblocked by it, or by the end of the connection) and for the journal's room (unblocked by the disk).
Writer loop: `PeerLink.write_all`.

Invariants: exactly one `joined` and one `left` reach the core for every connection that said hello;
a peer that breaks the protocol loses its connection and nobody else is touched.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from streamrl.errors import UserError
from streamrl.keys import ENV_MODEL_PATH, ENV_SHARED_DIR, FILE_MODEL
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.signals import Signals, SignalsServer
from streamrl_workers.metrics.step_times import StepCounts
from streamrl_workers.process.shutdown import on_terminate
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch.speeds import Reading
from streamrl_workers.scheduler.journal.writer import JournalWriter
from streamrl_workers.scheduler.server.agents import AgentHostHandler
from streamrl_workers.scheduler.server.connections import (
    Connections,
    CountedFrames,
    Events,
    GeneratorEntry,
    PeerHandler,
    PeerLink,
    TrainerEntry,
    greeting,
    log,
    serve_peer,
)
from streamrl_workers.scheduler.server.executor import Executor
from streamrl_workers.scheduler.server.lifetime import ExitDecision, report
from streamrl_workers.scheduler.server.peer_messages import Door, Frames
from streamrl_workers.scheduler.server.rates import LEASES, Beat, BeatWindow
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from streamrl_workers.scheduler.settings import SchedulerEnvironment
from streamrl_workers.stream.auth import Context
from streamrl_workers.stream.channel import SCHEDULER, bind, make_server
from streamrl_workers.stream.model_files import ModelFilesError, model_files, pieces
from streamrl_workers.stream.run_folder import write_endpoint
from streamrl_workers.tasks.agent_hosts import AgentHosts

_STOP_GRACE_S = 0.5
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Ports:
    """The two ports. Bound and published at once; they answer with content once the parts are there."""

    server: grpc.aio.Server
    ending: ExitDecision
    signals: SignalsServer = field(init=False)
    status: StatusEndpoint | None = None
    fault: Callable[[], str] = lambda: ""
    """Why it cannot work now, once it has started."""

    def __post_init__(self) -> None:
        self.signals = SignalsServer(
            Signals(
                metrics=lambda: self._page(self.status.metrics) if self.status else b"",
                status=lambda: self._page(self.status.status) if self.status else {},
                fault=lambda: self.fault() if self.status else "starting",
                curves=lambda: self._page(self.status.curves) if self.status else {},
            )
        )

    @classmethod
    async def open(cls, environment: SchedulerEnvironment, *, ending: ExitDecision) -> "Ports":
        """Bind both ports and publish them."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: _loop_fault(context, ending))
        on_terminate(loop, lambda: ending.asked("the scheduler was asked to end; start it again to go on"))
        host, tls = environment.variables.bind_host, environment.variables.tls
        server = make_server(environment.variables.token, tls=tls)
        address = bind(server, port=environment.grpc_port, host=host, tls=tls)
        ports = cls(server=server, ending=ending)
        port = await ports.signals.start(host=host, port=environment.signals_port)
        write_endpoint(environment.run_dir, process=environment.process, grpc=address, signals=f"{host}:{port}")
        return ports

    def _page(self, make: Callable[[], _T]) -> _T:
        """A page reads the core: an exception there ends the process as one of any event does."""
        try:
            return make()
        except Exception as error:
            report(error, ending=self.ending)
            raise

    async def close(self) -> None:
        """Close both ports; connections that are still open are broken off."""
        await self.server.stop(_STOP_GRACE_S)
        await self.signals.close()
        if self.status is not None:
            self.status.close()


def _loop_fault(context: dict[str, object], ending: ExitDecision) -> None:
    error = context.get("exception")
    # With a socket it is one that could not be accepted: asyncio tries again.
    if isinstance(error, BaseException) and "socket" not in context:
        report(error, ending=ending)
    else:
        logging.getLogger("streamrl.scheduler").error("%s", context.get("message"))


_UNREADY = f"the model is not ready: neither {ENV_MODEL_PATH} nor {FILE_MODEL} in {ENV_SHARED_DIR} says where it is"


def _read(path: Path, directory: Path) -> list[pb.ModelFile]:
    return list(pieces(path, directory=directory))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerService:
    """Generate, Train, Agents and GetModel. Frames come and leave as bytes: the door parses, links have serialized."""

    core: Core
    executor: Executor
    journal: JournalWriter
    connections: Connections
    door: Door
    ending: ExitDecision
    model_path: Callable[[], str | None]
    """The model's directory, once it is known."""
    lease_s: float
    clock_s: Callable[[], float]
    agent_hosts: AgentHosts | None = None
    """None: the job has no pool of agents."""
    life: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of this scheduler."""

    def beats(self) -> BeatWindow:
        """Of a new connection."""
        return BeatWindow(LEASES * self.lease_s)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        handlers = {
            "Generate": grpc.stream_stream_rpc_method_handler(self.generate),
            "Train": grpc.stream_stream_rpc_method_handler(self.train),
            "Agents": grpc.stream_stream_rpc_method_handler(self.agents),
            "GetModel": grpc.unary_stream_rpc_method_handler(
                self.get_model, pb.ModelRequest.FromString, pb.ModelFile.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SCHEDULER.full_name, handlers),))

    async def generate(self, frames: Frames, context: Context) -> None:
        """One generator's connection."""
        await self._serve(_Generator, frames, self.door.generator_events, context, kind="generator")

    async def train(self, frames: Frames, context: Context) -> None:
        """The trainer's connection."""
        await self._serve(_Trainer, frames, self.door.trainer_events, context, kind="trainer")

    async def agents(self, frames: Frames, context: Context) -> None:
        """The connection of an agent host's link."""
        if self.agent_hosts is None:
            # Who is cut off while it speaks does not hear why.
            await greeting(self.door.agents_events(frames), context, kind="agent host")
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the job has no task.agent.pool")
        await self._serve(_agent_host, frames, self.door.agents_events, context, kind="agent host")

    async def get_model(self, _request: pb.ModelRequest, context: Context) -> AsyncIterator[pb.ModelFile]:
        """The model's files, read when somebody asks: that is rare, and they are small."""
        try:
            place = self.model_path()
            if place is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, _UNREADY)
            directory = Path(place or "")
            for path in await asyncio.to_thread(model_files, directory):
                for piece in await asyncio.to_thread(_read, path, directory):
                    yield piece
        except (ModelFilesError, UserError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except OSError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the model cannot be read: {error}")

    async def _serve(
        self,
        make: Callable[["SchedulerService", Any], PeerHandler],
        frames: Frames,
        parse: Callable[[Frames], Events],
        context: Context,
        *,
        kind: str,
    ) -> None:
        counted = CountedFrames(frames)
        events = parse(aiter(counted))
        hello = await greeting(events, context, kind=kind)
        peer = make(self, hello)
        if refusal := peer.refusal():
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, refusal)
        counted.traffic = peer.entry.link.traffic = self.connections.traffic(peer.entry.pool)
        await serve_peer(peer, events, context=context, ending=self.ending)


class _Generator(PeerHandler):
    """One generator."""

    entry: GeneratorEntry

    def __init__(self, service: SchedulerService, hello: pb.GeneratorHello) -> None:
        limit_bytes = service.door.waiting_bytes(slots=hello.slots)
        link = PeerLink(f"generator {hello.generator_id}", limit_bytes=limit_bytes)
        step = hello.version.step if hello.version.attempt else None  # a frozen model is of no attempt
        entry = GeneratorEntry(link=link, hello=hello, version_step=step, beats=service.beats())
        super().__init__(service.connections, entry)
        self._service = service
        self._core = service.core
        self._call = service.executor.call
        self._id = hello.generator_id
        self.handlers = {
            "progress": self._on_progress,
            "heartbeat": self._on_heartbeat,
            "weights_loaded": self._on_weights_loaded,
            "weights_failed": self._on_weights_failed,
            "weights_stalled": self._on_weights_stalled,
            "leaving": self._on_leaving,
            "drained": self._on_drained,
        }

    def on_join(self) -> None:
        log.info("generator %s has joined with %d slots", self._id, self.entry.hello.slots)
        self._call(self._core.generator_joined, self.entry.hello, now_s=self._now_s())

    def on_leave(self) -> None:
        self._call(self._core.generator_left, self._id)

    def refusal(self) -> str:
        return "" if self._core.is_unresponsive(self._id) else super().refusal()

    async def take(self, event: pb.GeneratorEvent | None) -> None:
        if event is not None:
            await super().take(event)
        elif self.connections.hears(self.entry):  # a part of one: on a slow line its heartbeats are behind the rest
            self._call(self._core.generator_alive, self._id, now_s=self._now_s())
        await self._service.journal.wait_for_room()

    def _now_s(self) -> float:
        return self._service.clock_s()

    def _on_progress(self, batch: pb.ProgressBatch) -> None:
        self._call(self._core.generator_progress, self._id, items=batch.items, now_s=self._now_s())

    def _on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        self.entry.heartbeat = heartbeat
        self.entry.beats.add(
            Beat(wall_s=heartbeat.wall_seconds, parts=dict(heartbeat.bubble_seconds), tokens=heartbeat.tokens)
        )
        self._call(self._core.generator_alive, self._id, now_s=self._now_s(), reading=_reading(heartbeat))

    def _on_weights_loaded(self, loaded: pb.WeightsLoaded) -> None:
        self.entry.version_step = loaded.version.step
        self.connections.loaded(loaded)
        self._call(self._core.weights_loaded, self._id, version=loaded.version, now_s=self._now_s())

    def _on_weights_failed(self, failed: pb.WeightsFailed) -> None:
        log.warning("generator %s did not get version %d: %s", self._id, failed.version.step, failed.error)
        self._call(self._core.weights_failed, self._id, version=failed.version, now_s=self._now_s())

    def _on_weights_stalled(self, stalled: pb.WeightsStalled) -> None:
        log.warning("generator %s gets nothing of version %d from %s", self._id, stalled.version.step, stalled.address)
        self._call(self._core.weights_stalled, self._id, stalled=stalled, now_s=self._now_s())

    def _on_leaving(self, _leaving: pb.Leaving) -> None:
        log.info("generator %s is leaving", self._id)
        self._call(self._core.generator_leaving, self._id, now_s=self._now_s())

    def _on_drained(self, _drained: pb.Drained) -> None:
        self._call(self._core.generator_drained, self._id, now_s=self._now_s())


class _Trainer(PeerHandler):
    """The trainer."""

    entry: TrainerEntry

    def __init__(self, service: SchedulerService, hello: pb.TrainerHello) -> None:
        link = PeerLink(f"trainer {hello.trainer_id}")
        super().__init__(service.connections, TrainerEntry(link=link, hello=hello, beats=service.beats()))
        self._service = service
        call = self._call = service.executor.call
        core = self._core = service.core
        self.handlers = {
            "credit": lambda event: call(core.credit, event.bytes),
            "step_done": lambda event: call(core.step_done, event),
            "waits": lambda event: call(core.trainer_waits, event),
            "published": lambda event: call(core.published, event, address=hello.weights_address),
            "sync_journal": lambda event: call(core.sync_journal, event),
            "checkpointed": lambda event: call(core.checkpointed, event),
            "heartbeat": self._on_heartbeat,
        }

    def on_join(self) -> None:
        log.info("trainer %s has joined at step %d", self.entry.hello.trainer_id, self.entry.hello.step)
        self._call(self._core.trainer_joined, self.entry.hello)

    def on_leave(self) -> None:
        self._call(self._core.trainer_left)

    def _on_heartbeat(self, heartbeat: pb.TrainerHeartbeat) -> None:
        self.entry.heartbeat = heartbeat
        self.entry.beats.add(Beat(wall_s=heartbeat.wall_seconds, parts=dict(heartbeat.bubble_seconds)))


def _agent_host(service: SchedulerService, hello: pb.AgentsHello) -> AgentHostHandler:
    assert service.agent_hosts is not None, "its connection is let in where there is a pool"
    return AgentHostHandler(service.connections, service.agent_hosts, hello=hello, life=service.life)


def _reading(heartbeat: pb.Heartbeat) -> Reading:
    return {bucket: StepCounts(of.steps, of.tokens, of.seconds) for bucket, of in heartbeat.step_times.items()}
