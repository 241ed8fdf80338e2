"""The processes of the pool over all their lives, one slot for each: what is with them, their time limits, their replacement.

A `WorkerSlot` gives its worker one item at a time. A `ConcurrentSlot` has many items with one process. That holds their time limits itself;
one that says nothing for longer is replaced, and what it had is asked again, once. The endpoint client has no more than every endpoint
allows, which the backlog holds; the agent host has all prompts and turns, and its own line of them.

Owns the failure class of an item whose process ends:
- a stage overran its limit: `timeout`;
- something else than an answer was written to the process's socket: `died`, with that text;
- the process ended: the item is tried once more, since a kill from outside looks the same; then `died`.
An item that fills the memory is told by the worker itself; what filled it may still be held by the user's module, so a fresh
fork goes on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.spec.task import SingleTask
from streamrl.spec.tasks.rewards import Reward
from streamrl_workers.process import framing
from streamrl_workers.process.framing import ForeignBytesError
from streamrl_workers.tasks import protocol
from streamrl_workers.tasks.fork_server import Connection, ForkServer
from streamrl_workers.tasks.protocol import MAKING_ITEM, PLAYING, check_row, failure, first_stage
from streamrl_workers.tasks.values import Request, TaskPoolError

MAX_DEATHS = 2
MAX_STARTS = 3
"""Tries in a row to have a process before the pool gives up."""
MAKE_ITEM_TIMEOUT_S = 60.0
"""Longest time to make one item, the user's format function included; slow ones take seconds."""
EXIT_NOTICE_TIMEOUT_S = 2.0
GRACE_S = 10.0
"""Beyond the longest time limit of an endpoint or an agent: a busy machine answers late."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkItem:
    """One prompt to make, turn to answer or completion to score. Mutable: it counts the deaths it was seen at."""

    request: Request
    deaths: int = 0

    def died(self) -> bool:
        """Count a death; whether it was the last that it may see."""
        self.deaths += 1
        return self.deaths >= MAX_DEATHS


Finish = Callable[[WorkItem, Any], None]
"""Takes the checked row of an item."""


Took = Callable[[str, float], None]
"""Told of the name of a reward, and of the seconds that it took for one sample, also where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """Time limit of one stage of the work."""

    name: str
    timeout_s: float


def limits_of(task: SingleTask) -> dict[int, StageLimit]:
    """Return the time limit of each stage."""
    limits = {
        stage: StageLimit(name=reward.name, timeout_s=reward.timeout_seconds)
        for stage, reward in enumerate(task.rewards)
    }
    limits[MAKING_ITEM] = StageLimit(name="making the item", timeout_s=MAKE_ITEM_TIMEOUT_S)
    if not task.rewards:
        limits[0] = limits[MAKING_ITEM]  # a score of no rewards is 0
    if task.environment is not None:
        limits[PLAYING] = StageLimit(name="environment", timeout_s=task.environment.timeout_seconds)
    return limits


class PoolProcess:
    """A process of the fork server that is replaced when it ends."""

    def __init__(self, kind: bytes, *, fork_server: Callable[[], Awaitable[ForkServer]]) -> None:
        """`kind`: a SPAWN of `protocol.py`. `fork_server` gives the living one; it starts another if it has ended."""
        self._kind = kind
        self._living_server = fork_server
        self._server: ForkServer | None = None
        self.connection: Connection | None = None

    async def connect(self) -> Connection:
        """The living process. Raises `TaskPoolError` after `MAX_STARTS` tries, `UserError` at once."""
        if self.connection is not None and self.connection.exit_code.done():
            self.drop()  # it ended while it had nothing to do: that is nobody's death
        for start in range(1, MAX_STARTS + 1):
            if self.connection is not None:
                break
            try:
                self._server = await self._living_server()
                self.connection = await self._server.spawn(self._kind)
            except TaskPoolError as error:
                if start == MAX_STARTS:
                    raise TaskPoolError(f"{error}; tried {MAX_STARTS} times") from error
        assert self.connection is not None
        return self.connection

    async def end(self) -> str:
        """Kill it if it still runs. Returns how it ended, in words."""
        connection = self.connection
        assert connection is not None
        # The socket can close a moment before the notice, or long before the end: user code can close any descriptor.
        await asyncio.wait([connection.exit_code], timeout=EXIT_NOTICE_TIMEOUT_S)
        if not connection.exit_code.done():
            await self.kill()
        code = connection.exit_code.result() if connection.exit_code.done() else None
        self.drop()
        if code is None:
            return "for an unknown reason"
        return f"by signal {-code}" if code < 0 else f"with status {code}"

    async def kill(self) -> None:
        """SIGKILL; waits a moment for its end, so that the next one begins alone."""
        assert self.connection is not None
        self.terminate()
        await asyncio.wait([self.connection.exit_code], timeout=EXIT_NOTICE_TIMEOUT_S)
        self.drop()

    def terminate(self) -> None:
        """SIGKILL; who reads its frames sees the end. Nothing if there is none."""
        if self._server is not None and self.connection is not None:
            self._server.kill(self.connection)

    def drop(self) -> None:
        """Close its socket, at which it ends."""
        if self.connection is not None:
            self.connection.drop()
            self.connection = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDuties:
    """What is done for one of the job's tasks, and within which limits."""

    rewards: Sequence[Reward]
    limits: Mapping[int, StageLimit]
    """By stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDuties:
    """What the workers of a pool do, and for whom."""

    of: Callable[[Request], TaskDuties]
    """Those of the task that a request is about."""
    take: Callable[[int], Awaitable[WorkItem]]
    """The next item for the slot of this number; waits for it."""
    put_back: Callable[[WorkItem], None]
    """Takes an item that another worker shall try."""
    finish: Finish
    took: Took


class WorkerSlot:
    """Worker number `number`.

    Loop: consumes work of the backlog; produces rows; waits for the backlog and for the worker; unblocked by work, by
    messages, by the worker's end and by the stage's time limit.
    """

    def __init__(self, number: int, *, process: PoolProcess, duties: WorkerDuties) -> None:
        self._number = number
        self._duties = duties
        self._process = process
        self._stage: StageLimit
        """That its worker is in."""

    async def run(self) -> None:
        """Work until cancelled. Raises `TaskPoolError` when no worker can be had."""
        try:
            while True:
                await self._process.connect()
                work = await self._duties.take(self._number)
                await self._serve(await self._process.connect(), work)
        finally:
            self._process.drop()

    async def _serve(self, connection: Connection, work: WorkItem) -> None:
        framing.send(connection.transport, protocol.worker_message(work.request))
        try:
            row = await self._row(connection, work)
        except TimeoutError:
            await self._process.kill()
            row = failure("timeout", f"{self._stage.name}: took longer than {self._stage.timeout_s:g} s")
        except ForeignBytesError:
            await self._process.kill()
            row = failure("died", "its process was ended: something else than an answer was written to its socket")
        if row is None:
            await self._on_exit(work)
            return
        if isinstance(row, dict) and row["kind"] == "memory":
            await self._process.kill()
        self._duties.finish(work, row)

    async def _row(self, connection: Connection, work: WorkItem) -> Any:  # noqa: ANN401 - a row of `protocol.py`
        """The worker's row, checked; None if it has ended. Each stage that it enters brings a limit of its own."""
        stage, duties = first_stage(work.request), self._duties.of(work.request)
        while True:
            if stage not in duties.limits:
                raise ForeignBytesError("a message names no stage")
            self._stage = duties.limits[stage]
            begun_s = time.monotonic()
            try:
                message = await connection.frames.read(limit_s=self._stage.timeout_s)
            finally:
                if 0 <= stage < len(duties.rewards):
                    self._duties.took(self._stage.name, time.monotonic() - begun_s)
            if not isinstance(message, int):
                break
            stage = message
        if message is not None:
            check_row(work.request, message, rewards=duties.rewards)
        return message

    async def _on_exit(self, work: WorkItem) -> None:
        how = await self._process.end()
        if work.died():
            self._duties.finish(work, failure("died", f"its process ended {how}"))
        else:
            self._duties.put_back(work)


RowOf = Callable[[Any], Any]
"""Makes the row of an item from what its process answered; raises `ForeignBytesError` for anything else."""


@dataclass(slots=True, kw_only=True)
class AskedItem:
    """An item that is with the process."""

    work: WorkItem
    message: Any
    """What it is asked; JSON."""
    row_of: RowOf
    since_s: float
    begun: bool
    """Whether the process works on it: then its end may be this item's doing."""


class ConcurrentSlot:
    """A process that has many items at once: the endpoint client, or the agent host.

    Loop: consumes its answers; produces rows; waits for the process; unblocked by an answer, by its end and by its silence.
    """

    def __init__(
        self,
        process: PoolProcess,
        *,
        name: str,
        timeout_s: float,
        finish: Finish,
        begins_at_once: bool = True,
        begins: Callable[[WorkItem], None] = lambda _: None,
        took: Callable[[WorkItem, float], None] = lambda _work, _seconds: None,
    ) -> None:
        """What it is.

        Args:
            process: the process.
            name: of it, for errors.
            timeout_s: within which something is heard while anything is asked.
            finish: takes rows.
            begins_at_once: False: it tells what it begins, by a number in the place of an answer.
            begins: told of an item that it begins.
            took: told of an item that was answered, and of the seconds until then.
        """
        self._took = took
        self._process = process
        self._name = name
        self._silence_s = timeout_s + GRACE_S
        self._finish = finish
        self._begins_at_once = begins_at_once
        self._begins = begins
        self._asked: dict[int, AskedItem] = {}
        self._next_number = 0
        self._mute_ends = 0
        """Ends in a row before which it had said nothing. Where all begins at once they are the items' deaths, and end the items."""

    def ask(self, work: WorkItem, message: object, *, row_of: RowOf) -> None:
        """Have an item done; its row is finished when the process has answered."""
        self._next_number += 1
        now_s = asyncio.get_running_loop().time()
        asked = AskedItem(work=work, message=message, row_of=row_of, since_s=now_s, begun=self._begins_at_once)
        self._asked[self._next_number] = asked
        self._send(self._next_number, asked)

    def forget(self) -> None:
        """Nobody waits for anything any more: the process ends, and another one begins."""
        self._asked.clear()
        self._process.terminate()

    def _send(self, number: int, asked: AskedItem) -> None:
        """What cannot be sent now is sent when the process is there."""
        if self._process.connection is not None:
            framing.send(self._process.connection.transport, [number, asked.message])

    async def run(self) -> None:
        """Work until cancelled. Raises `TaskPoolError` when no process can be had."""
        try:
            while True:
                connection = await self._process.connect()
                for number, asked in self._asked.items():
                    self._send(number, asked)
                await self._read_all(connection)
                self._on_exit()
        finally:
            self._process.drop()

    async def _read_all(self, connection: Connection) -> None:
        """Until the process has ended, or has been ended because it is silent or talks nonsense."""
        self._mute_ends += 1
        try:
            while (message := await self._next(connection)) is not None:
                self._answered(message)
                self._mute_ends = 0
            await self._process.end()
        except (TimeoutError, ForeignBytesError):
            await self._process.kill()

    async def _next(self, connection: Connection) -> Any:  # noqa: ANN401 - JSON
        while True:
            try:
                return await connection.frames.read(limit_s=self._silence_s)
            except TimeoutError:
                oldest_s = min((asked.since_s for asked in self._asked.values()), default=float("inf"))
                if asyncio.get_running_loop().time() - oldest_s >= self._silence_s:
                    raise

    def _answered(self, message: Any) -> None:  # noqa: ANN401 - JSON
        match message:
            case [int(number), int()] if number in self._asked and not self._begins_at_once:
                self._asked[number].begun = True
                self._begins(self._asked[number].work)
            case [int(number), answer] if number in self._asked:
                row = self._asked[number].row_of(answer)
                asked = self._asked.pop(number)
                self._took(asked.work, asyncio.get_running_loop().time() - asked.since_s)
                self._finish(asked.work, row)
            case _:
                raise ForeignBytesError("a message is no answer to what was asked")

    def _on_exit(self) -> None:
        if self._mute_ends >= MAX_STARTS and self._asked and not self._begins_at_once:
            raise TaskPoolError(f"{self._name} ended {MAX_STARTS} times before it said anything")
        for number, asked in list(self._asked.items()):
            if asked.begun and asked.work.died():
                del self._asked[number]
                self._finish(asked.work, failure("died", f"{self._name} ended twice"))
            asked.begun = self._begins_at_once


def endpoint_row(answer: Any, *, values: Sequence[float | None], raised: str | None) -> Any:  # noqa: ANN401 - JSON
    """Row of a sample whose endpoints have answered: `values` of the parts, None where one was asked; `raised` as in its row before.

    Raises `ForeignBytesError`.
    """
    match answer:
        case {"kind": str(), "error": str()}:
            return answer
        case list() if len(answer) == values.count(None) and all(map(protocol.is_finite, answer)):
            rest = iter(answer)
            return [[next(rest) if value is None else value for value in values], None, raised]
    raise ForeignBytesError("a message is no answer to what was asked")
