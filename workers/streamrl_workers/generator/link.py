"""The generator's link to the scheduler: says hello, hands commands to the loop, writes what the outbox holds.

Owns: the heartbeat, when partial progress is sent. Does not own: the connection and its breaks (`stream/scheduler_link.py`), what
commands do (`engine_loop.py`).

Two tasks per connection:
- reader: consumes GeneratorCommand; produces calls of the loop; waits for the scheduler; unblocked by it or a broken
  connection (keep-alive notices a silent one).
- writer: consumes the outbox; produces GeneratorEvent; waits for the outbox, at most until the next heartbeat.

Before them: hello, then the scheduler's welcome. Each step of that, and the end, is waited for for one lease.

Invariants: one hello per connection, first; after a break everything active is dropped, as the scheduler issues it anew. A generator
that leaves closes its side of the stream behind `Drained` and waits for the scheduler to close the other: so nothing that it has
finished gets lost.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

from streamrl.liveness import SCHEDULER_LOST_S
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.generator.settings import GeneratorSettings
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.stream.messages import Joiner, read, write
from streamrl_workers.stream.scheduler_link import Call, SchedulerLink, broken

_PARTIALS_INTERVAL_S = 1.0
"""Between two messages with the gains of running requests: what a death costs at most. A heartbeat goes with each: by
these the scheduler measures how fast the generator is, also where it generates for few seconds at a time."""
_HEARTBEATS_PER_LEASE = 4
"""More than the three that the protocol asks for, so that one may be late."""

_Joiner = Joiner[pb.GeneratorCommand]
_log = logging.getLogger(__name__)


class GeneratorLink(SchedulerLink):
    """Keeps the generator linked until the scheduler says stop, or everything is done after `leave`."""

    def __init__(
        self,
        loop: EngineLoop,
        *,
        outbox: GeneratorOutbox,
        recorder: Recorder,
        settings: GeneratorSettings,
        instance: str,
        weights_address: str = "",
        lost_after_s: float = SCHEDULER_LOST_S,
    ) -> None:
        address = replace(settings.scheduler, lost_after_s=lost_after_s)
        super().__init__(address, method="Generate", patience_s=float(settings.spec.scheduling.lease_seconds))
        self._loop = loop
        self._outbox = outbox
        self._recorder = recorder
        self._settings = settings
        self._instance = instance
        self._weights_address = weights_address
        self._is_linked = self._was_linked = False

    def leave(self) -> bool:
        """Finish what is active, take nothing more, then end `run`; False: there is no link, so there is nothing to finish."""
        if self._is_linked:
            self._loop.leave()
        return self._is_linked

    def ill(self) -> str:
        """What health checks hear: the fault before the first welcome, and when a link is gone for a lease; else ""."""
        recent = self._was_linked and time.monotonic() - self._seen_s < self._patience_s
        return "" if self._is_linked or recent else self.fault

    @property
    def _is_over(self) -> bool:
        return self._loop.leaving

    def _disconnected(self) -> None:
        self._is_linked = False
        self._outbox.clear()
        self._loop.disconnected()

    async def _converse(self, call: Call) -> bool:
        joiner = Joiner(pb.GeneratorCommand)
        if not await self._patiently(self._greet(call, joiner), missing="no welcome"):
            return True
        return await self._read_and_write(
            self._read(call, joiner), self._write(call), is_leaving=lambda: self._loop.leaving
        )

    async def _greet(self, call: Call, joiner: _Joiner) -> bool:
        """Say hello and hear the welcome; False: it was `Stop`, the run is over.

        Nothing is said in between: a refusal that meets a write half-way has no reason.
        """
        self._outbox.open()
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over, and reading says why
            await write(call, self._hello())
        command = await read(call, joiner)
        if command is not None and command.HasField("stop"):
            return False
        if command is None or not command.HasField("welcome"):
            raise broken("the first command was no welcome")
        self._patience_s = command.welcome.lease_seconds or self._patience_s
        self._welcomed()
        self._is_linked = self._was_linked = True
        self._loop.connected()
        return True

    # ---- reader

    async def _read(self, call: Call, joiner: _Joiner) -> bool:
        """Until the stream ends; True when it ended with `Stop`."""
        try:
            while (command := await read(call, joiner)) is not None:
                if command.WhichOneof("command") == "stop":
                    return True
                self._obey(command)
        finally:
            self._seen_s = time.monotonic()  # it may have had nothing to say for long: keep-alive saw to it until now
        self.fault = "the scheduler ended the link"
        return False

    def _obey(self, command: pb.GeneratorCommand) -> None:
        match command.WhichOneof("command"):
            case "issue":
                self._loop.issue(command.issue.items)
            case "cancel":
                self._loop.cancel(command.cancel.leases)
            case "weights":
                self._loop.announce(command.weights)
            case "idle":
                self._loop.idle(command.idle.cause)
            case "queue":
                self._loop.queue_state(waiting=command.queue.waiting)
            case "pause":
                self._loop.pause(paused=command.pause.paused)
            case "drain":
                self._loop.drain()
            case other:  # a newer scheduler's; what we do not know we cannot do
                _log.warning("command not understood: %s", other)

    # ---- writer

    async def _write(self, call: Call) -> None:
        """Whatever the outbox holds; heartbeats and partial progress by the clock."""
        try:
            partials_s = heartbeat_s = time.monotonic()
            while True:
                now_s = time.monotonic()
                running = now_s >= partials_s
                events = self._outbox.pop(running=running)
                if running:
                    partials_s = now_s + _PARTIALS_INTERVAL_S
                if now_s >= heartbeat_s or (running and self._loop.status().active):
                    heartbeat_s = now_s + self._patience_s / _HEARTBEATS_PER_LEASE
                    events.append(self._heartbeat())
                for event in events:
                    await write(call, event)
                if self._loop.leaving and any(event.HasField("drained") for event in events):
                    await call.done_writing()
                    return
                if events:
                    self._loop.sent()
                await self._await_filled(min(partials_s, heartbeat_s) - time.monotonic())
        except asyncio.InvalidStateError:
            return  # the call is over; its status is the reader's to tell

    async def _await_filled(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._outbox.filled.wait()

    def _hello(self) -> pb.GeneratorEvent:
        now = self._loop.status()
        hello = pb.GeneratorHello(
            generator_id=self._settings.process,
            instance=self._instance,
            pool=self._settings.pool.name,
            slots=self._loop.slots,
            version=now.version,
            kv_capacity_tokens=None if now.kv is None else now.kv.capacity_tokens,
            shares_prompts=now.kv is not None and now.kv.shares_prompts,
            cluster=self._settings.cluster,
            weights_address=self._weights_address,
        )
        return pb.GeneratorEvent(hello=hello)

    def _heartbeat(self) -> pb.GeneratorEvent:
        wall_s, parts = self._recorder.totals()
        counts = self._loop.status()
        heartbeat = pb.Heartbeat(
            active=counts.active,
            waiting=counts.waiting,
            bubble_seconds=parts,
            wall_seconds=wall_s,
            tokens=counts.tokens,
            kv_used_tokens=None if counts.kv is None else counts.kv.used_tokens,
            step_times={
                bucket: pb.StepTimes(steps=round(of.steps), tokens=round(of.tokens), seconds=of.seconds)
                for bucket, of in self._loop.step_times().items()
            },
        )
        return pb.GeneratorEvent(heartbeat=heartbeat)
