"""The scheduler's gRPC service: one stream for each generator, one for the trainer.

Owns what each event of a peer does: it goes to the core on the event loop's thread, the effects to
the executor. Decides nothing. The course of a connection is in `shell/connection.py`.

Reader loop of a connection: consumes the peer's events; produces calls of the core; waits for the
peer (unblocked by it, or by the end of the connection) and for the journal's room (unblocked by the disk).
Writer loop: see `shell/link.py`.

Invariants: exactly one `joined` and one `left` reach the core for every connection that said hello;
a peer that breaks the protocol loses its connection and nobody else is touched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.step_times import Steps
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch.measured import Reading
from streamrl_workers.scheduler.effects import GeneratorInfo
from streamrl_workers.scheduler.journal import Journal
from streamrl_workers.scheduler.shell.connection import Events, Handlers, dispatch, greeting, log, serve_peer
from streamrl_workers.scheduler.shell.ending import EndingBox
from streamrl_workers.scheduler.shell.executor import Executor
from streamrl_workers.scheduler.shell.link import Link
from streamrl_workers.scheduler.shell.model_files import ModelFiles
from streamrl_workers.scheduler.shell.rates import LEASES, Beat, BeatWindow
from streamrl_workers.scheduler.shell.switchboard import GeneratorEntry, Switchboard, TrainerEntry
from streamrl_workers.stream.admission import Context

_SERVICE = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What connections work with."""

    core: Core
    executor: Executor
    journal: Journal
    switchboard: Switchboard
    ending: EndingBox
    lease_s: float
    clock_s: Callable[[], float]

    def beats(self) -> BeatWindow:
        """Of a new connection."""
        return BeatWindow(LEASES * self.lease_s)


class SchedulerService:
    """Generate, Train and GetModel. Commands leave as bytes: links have serialized them already."""

    def __init__(self, parts: Parts, *, model_files: ModelFiles) -> None:
        self._parts = parts
        self._model_files = model_files

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        handlers = {
            "Generate": grpc.stream_stream_rpc_method_handler(self.generate, pb.GeneratorEvent.FromString),
            "Train": grpc.stream_stream_rpc_method_handler(self.train, pb.TrainerEvent.FromString),
            "GetModel": grpc.unary_stream_rpc_method_handler(
                self._model_files.serve, pb.ModelRequest.FromString, pb.ModelFile.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    async def generate(self, events: Events, context: Context) -> None:
        """One generator's connection."""
        hello = await greeting(events, context, kind="generator")
        if hello.slots < 1:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a generator must have at least one slot")
        await serve_peer(_Generator(self._parts, hello), events, context=context, ending=self._parts.ending)

    async def train(self, events: Events, context: Context) -> None:
        """The trainer's connection."""
        hello = await greeting(events, context, kind="trainer")
        await serve_peer(_Trainer(self._parts, hello), events, context=context, ending=self._parts.ending)


class _Generator:
    """One generator, from hello to the end of its stream."""

    def __init__(self, parts: Parts, hello: pb.GeneratorHello) -> None:
        self.link = Link(f"generator {hello.generator_id}")
        self._parts = parts
        self._core = parts.core
        self._run = parts.executor.run
        self._id = hello.generator_id
        step = hello.version.step if hello.HasField("version") else None
        self._entry = GeneratorEntry(link=self.link, hello=hello, version_step=step, beats=parts.beats())
        self._handlers: Handlers = {
            "progress": self._on_progress,
            "heartbeat": self._on_heartbeat,
            "weights_loaded": self._on_weights_loaded,
            "weights_failed": self._on_weights_failed,
            "leaving": self._on_leaving,
            "drained": self._on_drained,
        }

    def join(self) -> bool:
        switchboard = self._parts.switchboard
        replaced = switchboard.add_generator(self._entry)
        if switchboard.stopping:
            switchboard.stop_generator(self._entry)
            return False
        if replaced is not None:
            self._run(self._core.generator_left(self._id, reason="it has connected again", now_s=self._now_s()))
        log.info("generator %s has joined with %d slots", self._id, self._entry.hello.slots)
        self._run(self._core.generator_joined(_info(self._entry.hello), now_s=self._now_s()))
        return True

    def leave(self, reason: str) -> None:
        switchboard = self._parts.switchboard
        if switchboard.remove_generator(self._entry) and not switchboard.stopping:
            log.info("generator %s has left: %s", self._id, reason)
            self._run(self._core.generator_left(self._id, reason=reason, now_s=self._now_s()))

    async def take(self, event: pb.GeneratorEvent) -> None:
        switchboard = self._parts.switchboard
        if switchboard.generators.get(self._id) is self._entry and not switchboard.stopping:
            dispatch(event, self._handlers)
            await self._parts.journal.wait_for_room()

    def _now_s(self) -> float:
        return self._parts.clock_s()

    def _on_progress(self, batch: pb.ProgressBatch) -> None:
        self._run(self._core.generator_progress(self._id, items=batch.items, now_s=self._now_s()))

    def _on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        self._entry.heartbeat = heartbeat
        self._entry.beats.add(
            Beat(wall_s=heartbeat.wall_seconds, parts=dict(heartbeat.bubble_seconds), tokens=heartbeat.tokens)
        )
        self._run(self._core.generator_alive(self._id, now_s=self._now_s(), reading=_reading(heartbeat)))

    def _on_weights_loaded(self, loaded: pb.WeightsLoaded) -> None:
        self._entry.version_step = loaded.version.step
        self._run(self._core.weights_loaded(self._id, version=loaded.version, now_s=self._now_s()))

    def _on_weights_failed(self, failed: pb.WeightsFailed) -> None:
        log.warning("generator %s did not get version %d: %s", self._id, failed.version.step, failed.error)
        version, error = failed.version, failed.error
        self._run(self._core.weights_failed(self._id, version=version, error=error, now_s=self._now_s()))

    def _on_leaving(self, _leaving: pb.Leaving) -> None:
        log.info("generator %s is leaving", self._id)
        self._run(self._core.generator_leaving(self._id, now_s=self._now_s()))

    def _on_drained(self, _drained: pb.Drained) -> None:
        self._run(self._core.generator_drained(self._id, now_s=self._now_s()))


class _Trainer:
    """The trainer, from hello to the end of its stream."""

    def __init__(self, parts: Parts, hello: pb.TrainerHello) -> None:
        self.link = Link(f"trainer {hello.trainer_id}")
        self._parts = parts
        self._run = parts.executor.run
        self._entry = TrainerEntry(link=self.link, hello=hello, beats=parts.beats())
        core = self._core = parts.core
        self._handlers: Handlers = {
            "credit": lambda event: self._run(core.credit(event.bytes)),
            "step_done": lambda event: self._run(core.step_done(event)),
            "published": lambda event: self._run(core.published(event, address=hello.weights_address)),
            "sync_journal": lambda event: self._run(core.sync_journal(event)),
            "checkpointed": lambda event: self._run(core.checkpointed(event)),
            "heartbeat": self._on_heartbeat,
        }

    def join(self) -> bool:
        switchboard = self._parts.switchboard
        replaced = switchboard.set_trainer(self._entry)
        if switchboard.stopping:
            switchboard.stop_trainer(self._entry)
            return False
        if replaced is not None:
            self._run(self._core.trainer_left(now_s=self._parts.clock_s()))
        log.info("trainer %s has joined at step %d", self._entry.hello.trainer_id, self._entry.hello.step)
        self._run(self._core.trainer_joined(self._entry.hello, now_s=self._parts.clock_s()))
        return True

    def leave(self, reason: str) -> None:
        switchboard = self._parts.switchboard
        if switchboard.remove_trainer(self._entry) and not switchboard.stopping:
            log.info("trainer has left: %s", reason)
            self._run(self._core.trainer_left(now_s=self._parts.clock_s()))

    async def take(self, event: pb.TrainerEvent) -> None:
        switchboard = self._parts.switchboard
        if switchboard.trainer is self._entry and not switchboard.stopping:
            dispatch(event, self._handlers)

    def _on_heartbeat(self, heartbeat: pb.TrainerHeartbeat) -> None:
        self._entry.heartbeat = heartbeat
        self._entry.beats.add(Beat(wall_s=heartbeat.wall_seconds, parts=dict(heartbeat.bubble_seconds)))


def _reading(heartbeat: pb.Heartbeat) -> Reading:
    return {bucket: Steps(of.steps, of.tokens, of.seconds) for bucket, of in heartbeat.step_times.items()}


def _info(hello: pb.GeneratorHello) -> GeneratorInfo:
    known = hello.HasField("version")
    return GeneratorInfo(
        generator_id=hello.generator_id,
        instance=hello.instance,
        pool=hello.pool,
        slots=hello.slots,
        step=hello.version.step if known else None,
        attempt=hello.version.attempt if known else None,
    )
