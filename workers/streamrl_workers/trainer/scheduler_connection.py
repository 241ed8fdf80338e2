"""The connection to the scheduler: `Scheduler.Train`, opened again with pauses when it breaks.

Owns: the channel, the stream, heartbeats, the overall deadline without a scheduler. Does not own: what is said
(`session.py`). Runs in the process's event loop.

    loop       consumes            produces              waits for           unblocked by
    receive    TrainerCommand      session state         the stream          command | break | close
    send       outbox              TrainerEvent          outbox, flow ctrl   event | break | close
    heartbeat  bubble clock        outbox                its interval        time

With certificates a connection gives way to a new one before it is too old (`channel.Dialler`): a break without a pause.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from streamrl.liveness import SCHEDULER_LOST_S
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.stream.auth import await_admission, call_metadata
from streamrl_workers.stream.channel import (
    LASTING_S,
    MAX_BREAKS,
    Backoff,
    ConnectTimeoutError,
    Dialler,
    refusal_of,
)
from streamrl_workers.stream.messages import Joiner, ProtocolError, RefusedError, read, write
from streamrl_workers.stream.services import SCHEDULER, client
from streamrl_workers.stream.tls import Tls
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.session import Session

_MAX_OUTBOX = 1024
"""Events that wait for a slow stream; a scheduler that reads none of so many hangs."""
_BEATS_PER_LEASE = 3
"""Two heartbeats may be lost before the lease ends."""
_LEAST_LEASE_S = 0.3
"""A shorter lease (or none, with a Stop) is not worth a heartbeat's bytes."""
_FAREWELL_S = 1.0
"""For the last events to be read when this process ends."""

log = logging.getLogger(__name__)
_Call = Any  # grpc.aio.StreamStreamCall; grpc ships no types
_Joiner = Joiner[pb.TrainerCommand]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerAddress:
    """Where the scheduler is and how long to look for it."""

    scheduler: str  # host:port
    token: str
    lost_after_s: float = SCHEDULER_LOST_S
    tls: Tls | None = None


class ConnectionBrokenError(ConnectionError):
    """The stream ended without a word of why."""


class SchedulerConnection:
    """Keeps a session connected until it ends."""

    def __init__(self, session: Session, *, address: SchedulerAddress, recorder: Recorder) -> None:
        self._session = session
        self._address = address
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._away_since_s = self._loop.time()
        self._welcomed_s = math.inf
        self._closing = asyncio.Event()
        self._dialler = Dialler(address.scheduler, tls=address.tls)
        self._fault = ""

    async def run(self) -> None:
        """Connect, converse, connect again; returns when the session has ended or `close` was called."""
        backoff = Backoff()
        while not self._over():
            self._welcomed_s = math.inf
            try:
                await self._converse()
            except (grpc.RpcError, ConnectTimeoutError, ConnectionBrokenError) as error:
                self._lost(error)
            except RefusedError as error:
                self._session.end(RetryError(f"the scheduler refuses this trainer: {error}"))
            except ProtocolError as error:
                self._session.end(RetryError(f"the scheduler does not keep to the protocol: {error}"))
            finally:
                self._session.disconnected()
            lasted_s = self._away_since_s - self._welcomed_s
            if lasted_s > 0 and not self._dialler.has_successor and backoff.ended(after_s=lasted_s):
                reason = f"the connection to the scheduler broke {MAX_BREAKS} times, each within {LASTING_S:g} s"
                self._session.end(RetryError(reason))
            if not (self._over() or self._dialler.has_successor):
                await backoff.pause()
        await self._dialler.close()

    def close(self) -> None:
        """Send what waits, then end."""
        self._closing.set()

    def _over(self) -> bool:
        return self._session.ending is not None or self._closing.is_set()

    def _lost(self, error: grpc.RpcError | ConnectionError | ConnectTimeoutError) -> None:
        reason = str(error)
        if isinstance(error, grpc.RpcError):
            if (refused := refusal_of(error, address=self._address.scheduler, tls=self._address.tls)) is not None:
                raise refused
            reason = f"{error.code().name}: {error.details()}"
        away_s = self._loop.time() - self._away_since_s
        if reason != self._fault:
            log.warning("no connection to the scheduler for %.1f s: %s", away_s, reason)
        self._fault = reason
        if away_s >= self._address.lost_after_s:
            self._session.end(RetryError(f"waited {away_s:.0f} s in vain for the scheduler: {reason}"))

    async def _converse(self) -> None:
        left_s = max(0.1, self._away_since_s + self._address.lost_after_s - self._loop.time())
        channel = await self._dialler.channel(timeout_s=left_s)
        async with channel:
            call = client(channel, SCHEDULER).Train(metadata=call_metadata(self._address.token))
            outbox, joiner = EventQueue(), Joiner(pb.TrainerCommand)
            outbox.put([pb.TrainerEvent(hello=self._session.hello())])
            try:
                lease_s = await self._welcome(call, outbox, joiner, timeout_s=left_s)
                self._welcomed_s, self._fault = self._loop.time(), ""
                await self._exchange(call, outbox, joiner, heartbeat_s=lease_s / _BEATS_PER_LEASE)
            finally:
                call.cancel()

    async def _welcome(self, call: _Call, outbox: "EventQueue", joiner: _Joiner, *, timeout_s: float) -> float:
        """Say hello and hand the first answer to the session; the lease in seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await await_admission(call)
                await outbox.send_next(call)
                command = await read(call, joiner)
        except TimeoutError:
            raise ConnectTimeoutError(f"the scheduler did not welcome this trainer within {timeout_s:.0f} s") from None
        if command is None:
            raise ConnectionBrokenError("the scheduler closed the stream before its welcome")
        self._received(command, outbox)
        if command.WhichOneof("command") not in ("welcome", "stop", "restart"):
            raise ConnectionBrokenError(f"the scheduler said {command.WhichOneof('command')} before its welcome")
        return max(_LEAST_LEASE_S, float(command.welcome.lease_seconds))

    async def _exchange(self, call: _Call, outbox: "EventQueue", joiner: _Joiner, *, heartbeat_s: float) -> None:
        """Until the session ends, the link closes, the first of the loops fails, or a new connection takes over."""
        tasks = [
            asyncio.create_task(self._receive(call, outbox, joiner), name="trainer-link-receive"),
            asyncio.create_task(self._send(call, outbox), name="trainer-link-send"),
            asyncio.create_task(self._beat(outbox, interval_s=heartbeat_s), name="trainer-link-heartbeat"),
            asyncio.create_task(self._closing.wait(), name="trainer-link-closing"),
        ]
        try:
            await self._dialler.outlived(*tasks)
            if self._closing.is_set():
                await outbox.drained(timeout_s=_FAREWELL_S)
        finally:
            self._away_since_s = self._loop.time()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        _raise_first(results)

    async def _receive(self, call: _Call, outbox: "EventQueue", joiner: _Joiner) -> None:
        while not self._session.ending:
            command = await read(call, joiner)
            if command is None:
                raise ConnectionBrokenError("the scheduler closed the stream")
            self._received(command, outbox)

    def _received(self, command: pb.TrainerCommand, outbox: "EventQueue") -> None:
        def send(events: Sequence[pb.TrainerEvent]) -> None:
            self._loop.call_soon_threadsafe(outbox.put, events)

        self._session.received(command, send=send)

    async def _send(self, call: _Call, outbox: "EventQueue") -> None:
        while True:
            await outbox.send_next(call)

    async def _beat(self, outbox: "EventQueue", *, interval_s: float) -> None:
        while True:
            wall_s, parts = self._recorder.totals()
            outbox.put([pb.TrainerEvent(heartbeat=pb.TrainerHeartbeat(bubble_seconds=parts, wall_seconds=wall_s))])
            await asyncio.sleep(interval_s)


class EventQueue:
    """Events of one connection on their way out; too many break the connection, the next one says the state again."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[pb.TrainerEvent] = asyncio.Queue(_MAX_OUTBOX)
        self._overflowed = False

    def put(self, events: Sequence[pb.TrainerEvent]) -> None:
        """Queue `events` in order."""
        for event in events:
            if self._queue.full():
                self._overflowed = True
                return
            self._queue.put_nowait(event)

    async def send_next(self, call: _Call) -> None:
        """Write the next event."""
        event = await self._queue.get()
        if self._overflowed:
            raise ConnectionBrokenError(f"the scheduler read none of {_MAX_OUTBOX} events that wait for it")
        try:
            await write(call, event)
        except asyncio.InvalidStateError:
            raise ConnectionBrokenError("the stream to the scheduler broke") from None
        self._queue.task_done()

    async def drained(self, *, timeout_s: float) -> None:
        """Until all is written; a scheduler that is gone is not waited for longer."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._queue.join(), timeout_s)


def _raise_first(results: Sequence[object]) -> None:
    """Raise the first real error; the other tasks were cancelled by us."""
    for result in results:
        if isinstance(result, Exception):
            raise result
