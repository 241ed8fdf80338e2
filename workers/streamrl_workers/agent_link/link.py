"""The link of an agent host: what the scheduler asks goes to the host, what the host answers to the scheduler.

Owns which requests are with the host and which answers the scheduler may not have. Does not own the connection and its breaks
(`stream/scheduler_link.py`), nor the host's process, its ends and its silence (`tasks/worker_slots.py`).

Two tasks per connection:
- reader: consumes AgentsCommand; produces requests of the host; waits for the scheduler; unblocked by it or a broken connection.
- writer: consumes answers, and each second the notices of silent processes; produces AgentsEvent; waits for answers (no deadline: the host's own
  limits bound each) and for `leave`.

Invariants: a request is with the host once, however often it is asked. A break loses no answer: the scheduler asks again, and gets the
answer that there was. With another life of the scheduler nothing of before counts, and the host begins anew.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.liveness import INTERVAL_S
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.silences import MOST_NOTICES, read_silences
from streamrl_workers.stream.messages import Joiner, read, write
from streamrl_workers.stream.scheduler_link import Call, SchedulerAddress, SchedulerLink, broken
from streamrl_workers.tasks.protocol import MAX_ROW_BYTES, agent_row, decode_request, failure
from streamrl_workers.tasks.worker_slots import ConcurrentSlot, PoolProcess, WorkItem

_PATIENCE_S = 30.0
"""For the welcome, and for the scheduler to close a link that has left."""

_Joiner = Joiner[pb.AgentsCommand]
log = logging.getLogger("streamrl.agents")


class AgentLink(SchedulerLink):
    """Keeps an agent host linked until the scheduler says stop, or everything is answered after `leave`."""

    def __init__(
        self,
        address: SchedulerAddress,
        *,
        host_id: str,
        instance: str,
        process: PoolProcess,
        timeout_s: float,
        sessions: int,
        heartbeats: Sequence[Path] = (),
    ) -> None:
        """Who it is.

        Args:
            address: of the scheduler.
            host_id: name of this process.
            instance: new at each of its starts.
            process: the agent host.
            timeout_s: within which it says something while anything is asked.
            sessions: requests that are with it at most; so many answers are kept.
            heartbeats: folders with notices of silent processes that the scheduler cannot see.
        """
        super().__init__(address, method="Agents", patience_s=_PATIENCE_S)
        self._hello = pb.AgentsHello(host_id=host_id, instance=instance)
        self._sessions = sessions
        self._heartbeats = heartbeats
        self._process = process
        self._host_is_up = asyncio.Event()
        self._slot = ConcurrentSlot(
            process,
            name="the agent host",
            timeout_s=timeout_s,
            finish=self._on_row,
            begins_at_once=False,
            begins=self._on_begin,
        )
        self._life = ""
        """Of the scheduler."""
        self._numbers: dict[WorkItem, int] = {}
        """Of what is with the host."""
        self._answers: OrderedDict[int, bytes] = OrderedDict()
        """The newest."""
        self._begun: set[int] = set()
        """Of these, what programs work on."""
        self._unsent: dict[int, None] = {}
        """What there is something to say of."""
        self._filled = asyncio.Event()
        self._is_linked = self.leaving = False

    async def run_host(self) -> None:
        """Keep the host running. Raises `TaskPoolError`, `UserError`: it cannot be had, or the job's agent cannot be used."""
        await self._process.connect()
        self._host_is_up.set()
        await self._slot.run()

    async def run(self) -> None:
        """Dial once the host is up: who is connected is asked (no deadline: `run_host` has its own)."""
        await self._host_is_up.wait()
        self._seen_s = time.monotonic()
        await super().run()

    def leave(self) -> bool:
        """Take nothing more, and end when all is answered; False: there is no link, so nobody waits for anything."""
        self.leaving = True
        self._filled.set()
        return self._is_linked

    def ill(self) -> str:
        """What health checks hear."""
        return "" if self._is_linked else self.fault

    @property
    def numbers(self) -> dict[str, Any]:
        """For the status."""
        return {"linked": self._is_linked, "asked": len(self._numbers), "leaving": self.leaving}

    @property
    def _is_over(self) -> bool:
        return self.leaving

    def _disconnected(self) -> None:
        self._is_linked = False

    async def _converse(self, call: Call) -> bool:
        joiner = Joiner(pb.AgentsCommand)
        if not await self._patiently(self._greet(call, joiner), missing="no welcome"):
            return True
        return await self._read_and_write(self._read(call, joiner), self._write(call), is_leaving=lambda: self.leaving)

    async def _greet(self, call: Call, joiner: _Joiner) -> bool:
        """Say hello and hear the welcome; False: it was `Stop`, the run is over."""
        self._unsent.clear()  # what the scheduler lacks it asks again
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over, and reading says why
            await write(call, pb.AgentsEvent(hello=self._hello))
        command = await read(call, joiner)
        if command is not None and command.HasField("stop"):
            return False
        if command is None or not command.HasField("welcome"):
            raise broken("the first command was no welcome")
        if self._life not in ("", command.welcome.life):
            log.info("the scheduler was started again: all agents begin anew")
            self._numbers.clear()
            self._begun.clear()
            self._answers.clear()
            self._slot.forget()
        self._life = command.welcome.life
        self._welcomed()
        self._is_linked = True
        return True

    # ---- reader

    async def _read(self, call: Call, joiner: _Joiner) -> bool:
        """Until the stream ends; True when it ended with `Stop`."""
        try:
            while (command := await read(call, joiner)) is not None:
                if command.HasField("stop"):
                    return True
                if command.HasField("request"):
                    self._ask(command.request)
        finally:
            self._seen_s = time.monotonic()  # it may have had nothing to say for long: keep-alive saw to it until now
        self.fault = "the scheduler ended the link"
        return False

    def _ask(self, asked: pb.AgentsRequest) -> None:
        if asked.number in self._answers or asked.number in self._begun:
            self._say(asked.number)
        elif asked.number not in self._numbers.values():
            message = json.loads(asked.request)
            request = decode_request(message)
            work = WorkItem(request=request)
            self._numbers[work] = asked.number
            self._slot.ask(work, [*message, asked.item], row_of=partial(agent_row, request))

    # ---- writer

    def _on_begin(self, work: WorkItem) -> None:
        number = self._numbers.get(work)
        if number is not None and number not in self._begun:
            self._begun.add(number)
            self._say(number)

    def _on_row(self, work: WorkItem, row: Any) -> None:  # noqa: ANN401 - a checked row of `tasks/protocol.py`
        number = self._numbers.pop(work, None)
        if number is None:
            return
        self._begun.discard(number)
        self._answers[number] = _row_bytes(row)
        if len(self._answers) > self._sessions:
            self._answers.popitem(last=False)
        self._say(number)

    def _say(self, number: int) -> None:
        self._unsent[number] = None
        self._filled.set()

    def _silent(self) -> list[str]:
        return [one.message for one in read_silences(self._heartbeats).values() if one.holds][:MOST_NOTICES]

    async def _write(self, call: Call) -> None:
        """What begins and answers as they come; after `leave` that it leaves, and the end when all is answered."""
        told = False
        silent: list[str] = []
        try:
            while True:
                if (now_silent := self._silent()) != silent:
                    silent = now_silent
                    await write(call, pb.AgentsEvent(silences=pb.ProcessSilences(messages=silent)))
                if self.leaving and not told:
                    told = True
                    await write(call, pb.AgentsEvent(leaving=pb.Leaving()))
                while self._unsent:
                    del self._unsent[number := next(iter(self._unsent))]
                    if (row := self._answers.get(number)) is not None:
                        await write(call, pb.AgentsEvent(answer=pb.AgentsAnswer(number=number, row=row)))
                    elif number in self._begun:
                        await write(call, pb.AgentsEvent(started=pb.AgentsStarted(number=number)))
                if told and not self._numbers:
                    await call.done_writing()
                    return
                self._filled.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._filled.wait()
        except asyncio.InvalidStateError:
            return  # the call is over; its status is the reader's to tell


def _row_bytes(row: Any) -> bytes:  # noqa: ANN401 - a checked row
    """As the scheduler takes it."""
    data = json.dumps(row, separators=(",", ":")).encode()
    if len(data) <= MAX_ROW_BYTES:
        return data
    return _row_bytes(
        failure("bad_value", f"agent: what it asks has {len(data)} bytes, at most {MAX_ROW_BYTES} may be")
    )
