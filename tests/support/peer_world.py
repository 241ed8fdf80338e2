"""The world around the core, with one peer more that speaks the protocol in bytes, to the real service.

    stranger ── frames ──▶ SchedulerService ──▶ Executor ──▶ Core        all real, and the journal's tables
    the world's peers ─────────────────────────────▲

The world's own peers are on the same connections, so that a stranger can take the place of one of them.
"""

import asyncio
import itertools
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_RETRY
from streamrl.proto import stream_pb2 as pb
from streamrl_pages.server import json_response
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.journal.tables import apply_record, delete_samples, load, read_samples
from streamrl_workers.scheduler.server.connections import Connections, GeneratorEntry, TrainerEntry
from streamrl_workers.scheduler.server.executor import Executor
from streamrl_workers.scheduler.server.lifetime import ExitDecision
from streamrl_workers.scheduler.server.peer_messages import Door
from streamrl_workers.scheduler.server.rates import BeatWindow
from streamrl_workers.scheduler.server.service import SchedulerService
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from streamrl_workers.scheduler.settings import SchedulerSettings
from support import core_faults
from support.core_world import World
from support.jobs import parsed_job

LEASE_S = 10.0


class PeerWorld(World):
    """A world behind the real service. Construct in a running event loop; `close` takes back what it has put in its tables."""

    ours = False  # peers say what they like

    def __init__(
        self, job: SchedulerSettings, *, slots: tuple[int, ...], tables: sqlite3.Connection, folder: Path
    ) -> None:
        self._tables, self._folder = tables, folder
        tables.execute("BEGIN")
        super().__init__(job, slots=slots)

    def make_core(self) -> Any:
        core = Core(self.job, load(self._tables), first_lease=self.lives * 1_000_000)
        self.connections, self.ending = Connections(), ExitDecision()
        self.status = StatusEndpoint(core, job=parsed_job(), connections=self.connections, run_dir=self._folder)
        executor = Executor(core, journal=self, connections=self.connections, status=self.status, ending=self.ending)
        executor.attach(self)
        executor.carry_out({fx.AskRanker: self.ask})
        door = Door(
            max_tokens=self.job.tasks.max_tokens,
            batch_groups=self.job.batch_groups,
            newest_step=lambda: core.newest_step,
        )
        self.service = SchedulerService(
            core=core,
            executor=executor,
            journal=self,
            connections=self.connections,
            door=door,
            ending=self.ending,
            lease_s=LEASE_S,
            clock_s=lambda: self.now_s,
            model_path=lambda: None,
        )
        return core_faults.Door(core, core, executor)

    # ---- what the executor and the service ask

    def ask(self, effect: Any) -> None:
        """The task pool, or the ranker, is asked."""
        self.take(effect)

    put = ask

    def append(self, write: fx.Write) -> None:
        """To the journal."""
        self.take(write)

    def samples_of(self, effect: Any) -> Sequence[bytes]:
        """Of a group, from the journal."""
        return read_samples(self._tables, effect)

    async def wait_for_room(self) -> None:
        """The journal has room."""

    # ---- the world

    def commit(self, count: int) -> None:
        """Into the journal's tables first."""
        for write in itertools.islice(self.unsynced, count):
            delete_samples(self._tables, apply_record(self._tables, write.record))
        super().commit(count)

    def do(self, effects: list[fx.Effect]) -> None:
        """The effects have been carried out behind the executor."""
        del effects
        self.look()

    def look(self) -> None:
        """Whatever was said, state and pages are sound."""
        ending = self.ending.ending
        assert ending is None or ending.exit_code not in (EXIT_FAULT, EXIT_RETRY), ending.line
        self.finished = ending is not None and ending.exit_code == EXIT_DONE
        self.failed = "" if ending is None else ending.line
        if ending is None:
            self.check()

    def read_status(self) -> None:
        """The page, as somebody who asks gets it; what an optimiser gives may be infinite, nothing else."""
        numbers = self.status.status()
        json.dumps({**numbers, "last_step": None}, allow_nan=False)
        json.loads(json_response(numbers).body, parse_constant=pytest.fail)

    def join_generator(self, name: str, *, pool: str = "p") -> None:
        hello = pb.GeneratorHello(generator_id=name, instance="i", pool=pool, slots=3)
        link = WorldLink(name, lambda data: self._tell_generator(name, data), ended=lambda: self._cut_generator(name))
        entry = GeneratorEntry(link=link, hello=hello, version_step=None, beats=BeatWindow(LEASE_S))
        self.connections.add(entry)
        super().join_generator(name, pool=pool)

    def kill_generator(self, name: str) -> None:
        self.connections.remove(self.connections.generators[name])
        super().kill_generator(name)

    def _tell_generator(self, name: str, data: bytes) -> None:
        self.tell_generator(fx.ToGenerator(generator_id=name, command=pb.GeneratorCommand.FromString(data)))

    def _cut_generator(self, name: str) -> None:
        if name in self.generators:
            self.generators[name].connected = False

    def join_trainer(self) -> None:
        hello = pb.TrainerHello(trainer_id="trainer-0", instance=self.trainer.instance)
        link = WorldLink("trainer-0", self._tell_trainer, ended=self._cut_trainer)
        self.connections.add(TrainerEntry(link=link, hello=hello, beats=BeatWindow(LEASE_S)))
        super().join_trainer()

    def _tell_trainer(self, data: bytes) -> None:
        self.take(fx.ToTrainer(command=pb.TrainerCommand.FromString(data)))

    def _cut_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.connected = False

    # ---- the stranger

    def call(self, method: str) -> "Stranger":
        """A peer calls `method` of the service."""
        return Stranger(getattr(self.service, method))

    def close(self) -> None:
        """Nothing of it stays in the tables."""
        self.status.close()
        self._tables.execute("ROLLBACK")


@dataclass(slots=True)
class WorldLink:
    """What is said to one of the world's own peers."""

    peer: str
    tell: Callable[[bytes], None]
    ended: Callable[[], None]

    def send(self, message: Any) -> None:
        """At once."""
        self.tell(message.SerializeToString())

    def send_later(self, make: Callable[[], Iterable[bytes]]) -> None:
        """At once, too."""
        for data in make():
            self.tell(data)

    def end(self) -> None:
        """Its place is taken."""
        self.ended()


class Stranger:
    """One call of a peer that says what it likes."""

    def __init__(self, method: Callable[[Any, Any], Any]) -> None:
        self._heard = asyncio.Event()
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._context = Context()
        self._task = asyncio.create_task(method(self._spoken(), self._context))

    async def say(self, frame: bytes) -> None:
        """Until it has been taken, or the call is over."""
        await self._put(frame)

    @property
    def told(self) -> list[str | None]:
        """Kinds of the commands that it got, which are whole in one frame each."""
        frames = (pb.Frame.FromString(data) for data in self._context.said)
        return [pb.GeneratorCommand.FromString(frame.data).WhichOneof("command") for frame in frames]

    async def end(self) -> str:
        """Say no more; why it was refused, or ""."""
        await self._put(None)
        try:
            await self._task
        except grpc.aio.AbortError:
            assert self._context.refusal, "nobody was told why"
        return self._context.refusal

    async def _put(self, frame: bytes | None) -> None:
        self._heard.clear()
        self._frames.put_nowait(frame)
        heard = asyncio.create_task(self._heard.wait())
        await asyncio.wait({heard, self._task}, return_when=asyncio.FIRST_COMPLETED)
        heard.cancel()

    async def _spoken(self) -> AsyncIterator[bytes]:
        while (frame := await self._frames.get()) is not None:
            yield frame
            self._heard.set()


@dataclass(slots=True)
class Context:
    """A call, as a handler sees it."""

    refusal: str = ""
    said: list[bytes] = field(default_factory=list)

    async def write(self, data: bytes) -> None:
        """One frame to the peer."""
        self.said.append(data)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call."""
        self.refusal = f"{code.name}: {details}"
        raise grpc.aio.AbortError
