"""The trainer's link to the scheduler, `Scheduler.Train`.

Owns: heartbeats, events on their way out. Does not own: the connection and its breaks (`stream/scheduler_link.py`), what is said
(`session.py`). Runs in the process's event loop.

    loop       consumes            produces              waits for           unblocked by
    receive    TrainerCommand      session state         the stream          command | break | close
    send       outbox              TrainerEvent          outbox, flow ctrl   event | break | close
    heartbeat  bubble clock        outbox                its interval        time
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.stream.channel import SchedulerLostError
from streamrl_workers.stream.messages import Joiner, ProtocolError, RefusedError, read, write
from streamrl_workers.stream.scheduler_link import Call, SchedulerAddress, SchedulerLink, broken
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

_Joiner = Joiner[pb.TrainerCommand]


class SchedulerConnection(SchedulerLink):
    """Keeps a session connected until it ends."""

    def __init__(self, session: Session, *, address: SchedulerAddress, recorder: Recorder) -> None:
        super().__init__(address, method="Train", patience_s=address.lost_after_s)
        self._session = session
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()

    async def run(self) -> None:
        """Until the session has ended or `close` was called. What ends the link, but a mistake of the user, ends the session."""
        try:
            await super().run()
        except SchedulerLostError as error:
            self._session.end(RetryError(str(error)))
        except RefusedError as error:
            self._session.end(RetryError(f"the scheduler refuses this trainer: {error}"))
        except ProtocolError as error:
            self._session.end(RetryError(f"the scheduler does not keep to the protocol: {error}"))

    def close(self) -> None:
        """Send what waits, then end."""
        self._closing.set()

    @property
    def _is_over(self) -> bool:
        return self._session.ending is not None or self._closing.is_set()

    def _disconnected(self) -> None:
        self._session.disconnected()

    async def _converse(self, call: Call) -> bool:
        outbox, joiner = EventQueue(), Joiner(pb.TrainerCommand)
        outbox.put([pb.TrainerEvent(hello=self._session.hello())])
        lease_s = await self._patiently(self._welcome(call, outbox, joiner), missing="no welcome")
        await self._exchange(call, outbox, joiner, heartbeat_s=lease_s / _BEATS_PER_LEASE)
        return False

    async def _welcome(self, call: Call, outbox: "EventQueue", joiner: _Joiner) -> float:
        """Say hello and hand the first answer to the session; the lease in seconds."""
        await outbox.send_next(call)
        command = await read(call, joiner)
        if command is None:
            raise broken("the scheduler closed the stream before its welcome")
        self._received(command, outbox)
        if command.WhichOneof("command") not in ("welcome", "stop", "restart"):
            raise broken(f"the scheduler said {command.WhichOneof('command')} before its welcome")
        self._welcomed()
        return max(_LEAST_LEASE_S, float(command.welcome.lease_seconds))

    async def _exchange(self, call: Call, outbox: "EventQueue", joiner: _Joiner, *, heartbeat_s: float) -> None:
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
            self._seen_s = time.monotonic()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        _raise_first(results)

    async def _receive(self, call: Call, outbox: "EventQueue", joiner: _Joiner) -> None:
        while not self._session.ending:
            command = await read(call, joiner)
            if command is None:
                raise broken("the scheduler closed the stream")
            self._received(command, outbox)

    def _received(self, command: pb.TrainerCommand, outbox: "EventQueue") -> None:
        def send(events: Sequence[pb.TrainerEvent]) -> None:
            self._loop.call_soon_threadsafe(outbox.put, events)

        self._session.received(command, send=send)

    async def _send(self, call: Call, outbox: "EventQueue") -> None:
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

    async def send_next(self, call: Call) -> None:
        """Write the next event."""
        event = await self._queue.get()
        if self._overflowed:
            raise broken(f"the scheduler read none of {_MAX_OUTBOX} events that wait for it")
        try:
            await write(call, event)
        except asyncio.InvalidStateError:
            raise broken("the stream to the scheduler broke") from None
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
