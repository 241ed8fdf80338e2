"""The gRPC link to the scheduler: dials out, says hello, hands commands to the loop, writes what the outbox holds.

Owns: the connection, reconnecting, the heartbeat, when partial progress is sent. Does not own: what commands do (`loop.py`).

Two tasks per connection:
- reader: consumes GeneratorCommand; produces calls of the loop; waits for the scheduler; unblocked by it or a broken
  connection (keep-alive notices a silent one).
- writer: consumes the outbox; produces GeneratorEvent; waits for the outbox, at most until the next heartbeat.

Invariants: one hello per connection, first; after a break everything active is dropped, as the scheduler issues it anew;
without a scheduler for `_LOST_AFTER_LEASES` leases the link gives up. With certificates a connection gives way to a new
one before it is too old (`renewal.py`): to the scheduler that is a break like any other, without the wait. A generator that leaves closes its side of the
stream behind `Drained` and waits for the scheduler to close the other: so nothing that it has finished gets lost.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from streamrl.errors import UserError
from streamrl.keys import ENV_TLS_DIR, ENV_TOKEN
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.loop import EngineLoop
from streamrl_workers.generator.outbox import Outbox
from streamrl_workers.generator.puller import Announced
from streamrl_workers.generator.requests import to_request
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.stream.admission import await_admission
from streamrl_workers.stream.auth import call_metadata
from streamrl_workers.stream.channel import Backoff, ConnectTimeoutError, connect
from streamrl_workers.stream.renewal import Renewal
from streamrl_workers.stream.stream_pb2_grpc import SchedulerStub
from streamrl_workers.stream.tls import Tls

_PARTIALS_INTERVAL_S = 1.0
"""Between two messages with the gains of running requests: what a death costs at most. A heartbeat goes with each: by
these the scheduler measures how fast the generator is, also where it generates for few seconds at a time."""
_HEARTBEATS_PER_LEASE = 4
"""More than the three that the protocol asks for, so that one may be late."""
_LOST_AFTER_LEASES = 10
"""Leases without a scheduler after which this process ends; a restarted scheduler is back much sooner."""
_CONNECT_TIMEOUT_S = 5.0
"""Of one attempt."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall"
_log = logging.getLogger(__name__)


class SchedulerLostError(RuntimeError):
    """The scheduler did not come back in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this generator is and whom it serves."""

    generator_id: str
    instance: str
    pool: str
    scheduler_address: str  # host:port
    token: str
    lease_s: float  # the job's; the scheduler's welcome repeats it
    tls: Tls | None = None


class Link:
    """Keeps the generator linked until the scheduler says stop."""

    def __init__(self, loop: EngineLoop, *, outbox: Outbox, recorder: Recorder, identity: Identity) -> None:
        self._loop = loop
        self._outbox = outbox
        self._recorder = recorder
        self._identity = identity
        self._lease_s = identity.lease_s
        self._seen_s = time.monotonic()  # until when the scheduler was there
        self._backoff = Backoff()
        self._linked = False
        self._welcomed = self._ever_welcomed = False
        self._fresh: grpc.aio.Channel | None = None  # connected, and to be used next
        self.fault = "not connected to the scheduler yet"

    async def run(self) -> None:
        """Until `Stop`, or until everything is done after `leave`.

        Raises:
            SchedulerLostError: no scheduler for too long.
            UserError: the scheduler refuses our token.
        """
        while not (await self._connection() or self._loop.leaving):
            if self._fresh is not None:
                continue
            silent_s = time.monotonic() - self._seen_s
            if silent_s > self._patience_s():
                raise SchedulerLostError(
                    f"awaited the scheduler at {self._identity.scheduler_address} for {silent_s:.0f} s; last: {self.fault}"
                )
            await self._backoff.pause()

    def leave(self) -> bool:
        """Finish what is active, take nothing more, then end `run`; False: there is no link, so there is nothing to finish."""
        if self._linked:
            self._loop.leave()
        return self._linked

    def ill(self) -> str:
        """What health checks hear: the fault before the first welcome, and when a link is gone for a lease; else ""."""
        recent = self._ever_welcomed and time.monotonic() - self._seen_s < self._lease_s
        return "" if self._welcomed or recent else self.fault

    def _patience_s(self) -> float:
        return _LOST_AFTER_LEASES * self._lease_s

    async def _connection(self) -> bool:
        """One connection; True when the scheduler said stop."""
        try:
            channel = await self._channel()
        except ConnectTimeoutError as error:
            self.fault = str(error)
            return False
        try:
            return await self._session(SchedulerStub(channel))  # type: ignore[no-untyped-call]  # generated
        except grpc.aio.AioRpcError as error:
            self._broken(error)
        finally:
            self._linked = self._welcomed = False
            self._outbox.clear()
            self._loop.disconnected()
            await channel.close()
        return False

    async def _channel(self) -> grpc.aio.Channel:
        if self._fresh is not None:
            fresh, self._fresh = self._fresh, None
            return fresh
        return await connect(
            self._identity.scheduler_address,
            timeout_s=min(_CONNECT_TIMEOUT_S, self._patience_s()),
            who="the scheduler",
            tls=self._identity.tls,
        )

    def _broken(self, error: grpc.aio.AioRpcError) -> None:
        refused = refusal(error, address=self._identity.scheduler_address, tls=self._identity.tls)
        if refused is not None:
            raise refused from None
        self.fault = f"link broken: {error.code().name}: {error.details()}"
        _log.warning(self.fault)

    async def _session(self, stub: SchedulerStub) -> bool:
        call = stub.Generate(metadata=call_metadata(self._identity.token))
        try:
            await self._admission(call)
            return await self._conversation(call)
        finally:
            call.cancel()

    async def _admission(self, call: _Call) -> None:
        try:
            async with asyncio.timeout(self._lease_s):
                await await_admission(call)
        except TimeoutError:
            raise _unwelcome(f"not let in within {self._lease_s:g} s") from None

    async def _conversation(self, call: _Call) -> bool:
        reader = asyncio.create_task(self._read(call), name="link-reader")
        writer = asyncio.create_task(self._write(call), name="link-writer")
        try:
            if await self._outlived(reader, writer):
                return False
            if writer.done():
                writer.result()  # ended by a fault of ours, or the call is over: the reader knows why; or we have left
            return await self._last_word(reader)
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.wait({reader, writer})

    async def _outlived(self, *tasks: "asyncio.Task[Any]") -> bool:
        """Wait for the end of the first of the connection's tasks; True if a new connection takes over before."""
        address, tls = self._identity.scheduler_address, self._identity.tls
        async with Renewal(address, who="the scheduler", tls=tls) as renewal:
            await asyncio.wait({*tasks, renewal.due}, return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in tasks) and not self._loop.leaving:
                self._fresh = renewal.take()
                return True
        if not any(task.done() for task in tasks):  # it goes soon: not worth a new one
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return False

    async def _last_word(self, reader: "asyncio.Task[bool]") -> bool:
        """What the reader ends with, now that one of the two tasks has ended."""
        try:
            async with asyncio.timeout(self._lease_s):
                return await reader
        except TimeoutError:
            raise _unwelcome(f"the scheduler did not end the link within {self._lease_s:g} s") from None

    # ---- reader

    async def _read(self, call: _Call) -> bool:
        """Until the stream ends; True when it ended with `Stop`."""
        await self._await_welcome(call)
        try:
            while (command := await call.read()) is not grpc.aio.EOF:
                if command.WhichOneof("command") == "stop":
                    return True
                self._obey(command)
        finally:
            self._seen_s = time.monotonic()  # it may have had nothing to say for long: keep-alive saw to it until now
        self.fault = "the scheduler ended the link"
        return False

    async def _await_welcome(self, call: _Call) -> None:
        try:
            async with asyncio.timeout(self._lease_s):
                command = await call.read()
        except TimeoutError:
            raise _unwelcome(f"no welcome within {self._lease_s:g} s") from None
        if command is grpc.aio.EOF or command.WhichOneof("command") != "welcome":
            raise _unwelcome("the first command was no welcome")
        self._lease_s = command.welcome.lease_seconds or self._lease_s
        self._seen_s = time.monotonic()
        self._welcomed = self._ever_welcomed = True
        self._backoff.reset()
        self.fault = ""
        self._loop.connected()

    def _obey(self, command: pb.GeneratorCommand) -> None:
        match command.WhichOneof("command"):
            case "issue":
                self._loop.issue([to_request(item) for item in command.issue.items])
            case "cancel":
                self._loop.cancel(command.cancel.leases)
            case "weights":
                self._loop.announce(Announced(version=command.weights.version, address=command.weights.address))
            case "idle":
                self._loop.idle(command.idle.cause)
            case "queue":
                self._loop.queue_state(waiting=command.queue.waiting)
            case "drain":
                self._loop.drain()
            case other:  # a newer scheduler's; what we do not know we cannot do
                _log.warning("command not understood: %s", other)

    # ---- writer

    async def _write(self, call: _Call) -> None:
        """Hello, then whatever the outbox holds; heartbeats and partial progress by the clock."""
        try:
            self._outbox.open()
            self._linked = True
            await call.write(self._hello())
            partials_s = heartbeat_s = time.monotonic()
            while True:
                now_s = time.monotonic()
                running = now_s >= partials_s
                events = self._outbox.pop(running=running)
                if running:
                    partials_s = now_s + _PARTIALS_INTERVAL_S
                if now_s >= heartbeat_s or (running and self._loop.counts().active):
                    heartbeat_s = now_s + self._lease_s / _HEARTBEATS_PER_LEASE
                    events.append(self._heartbeat())
                for event in events:
                    await call.write(event)
                if self._loop.leaving and any(event.HasField("drained") for event in events):
                    await call.done_writing()
                    return
                if events:
                    self._loop.sent()
                await self._await_filled(min(partials_s, heartbeat_s) - time.monotonic())
        except asyncio.InvalidStateError:
            return  # the call is over; its status is the reader's to tell

    async def _await_filled(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._outbox.filled.wait()
        except TimeoutError:
            return

    def _hello(self) -> pb.GeneratorEvent:
        hello = pb.GeneratorHello(
            generator_id=self._identity.generator_id,
            instance=self._identity.instance,
            pool=self._identity.pool,
            slots=self._loop.slots,
            version=self._loop.counts().version,
        )
        return pb.GeneratorEvent(hello=hello)

    def _heartbeat(self) -> pb.GeneratorEvent:
        wall_s, parts = self._recorder.totals()
        counts = self._loop.counts()
        heartbeat = pb.Heartbeat(
            active=counts.active,
            waiting=counts.waiting,
            bubble_seconds=parts,
            wall_seconds=wall_s,
            tokens=counts.tokens,
            step_times={
                bucket: pb.StepTimes(steps=round(of.steps), tokens=round(of.tokens), seconds=of.seconds)
                for bucket, of in self._loop.step_times().items()
            },
        )
        return pb.GeneratorEvent(heartbeat=heartbeat)


def refusal(error: grpc.aio.AioRpcError, *, address: str, tls: Tls | None) -> UserError | None:
    """What is wrong with our token or certificate, if that is why the scheduler ended a call."""
    if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return None
    if tls is None:
        return UserError(
            field=ENV_TOKEN,
            rule=f"is not the token of the scheduler at {address}",
            fix="start all processes of a run with one token",
        )
    return UserError(
        field=ENV_TLS_DIR,
        rule=f"the scheduler at {address} does not take its certificate: {error.details()}",
        fix="give each role the leaf of its own job",
    )


def _unwelcome(text: str) -> grpc.aio.AioRpcError:
    """A break of the link that gRPC itself does not notice."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=text)
