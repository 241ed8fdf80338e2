"""The processes of the pool over all their lives, one slot for each: what is with them, their time limits, their replacement.

A `WorkerSlot` gives its worker one item at a time. The `EndpointSlot` has many samples with the endpoint client: no more than every
endpoint allows, which the backlog holds. Each of its requests ends within its reward's time limit, held by the process itself; one that
says nothing for longer is replaced, and what it had is asked again, once.

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

from streamrl.spec.task import Reward
from streamrl_workers.process import framing
from streamrl_workers.process.framing import ForeignBytesError
from streamrl_workers.tasks import protocol
from streamrl_workers.tasks.fork_server import Connection, ForkServer
from streamrl_workers.tasks.protocol import MAKING_ITEM, check_row, failure, first_stage
from streamrl_workers.tasks.values import Request, TaskPoolError

MAX_DEATHS = 2
MAX_STARTS = 3
"""Tries in a row to have a process before the pool gives up."""
EXIT_NOTICE_TIMEOUT_S = 2.0
GRACE_S = 10.0
"""Beyond the longest time limit of an endpoint: a busy machine answers late."""


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


class PoolProcess:
    """A process of the fork server that is replaced when it ends."""

    def __init__(self, kind: bytes, *, fork_server: Callable[[], Awaitable[ForkServer]]) -> None:
        """`kind`: SPAWN or SPAWN_ENDPOINT_CLIENT. `fork_server` gives the living one; it starts another if it has ended."""
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
        if self._server is not None:
            self._server.kill(self.connection)
        await asyncio.wait([self.connection.exit_code], timeout=EXIT_NOTICE_TIMEOUT_S)
        self.drop()

    def drop(self) -> None:
        """Close its socket, at which it ends."""
        if self.connection is not None:
            self.connection.drop()
            self.connection = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDuties:
    """What the workers of a pool do, for whom and within which limits."""

    rewards: Sequence[Reward]
    limits: Mapping[int, StageLimit]
    """By stage."""
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
        self._stage = duties.limits[MAKING_ITEM]

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
        connection.transport.write(protocol.encode_request(work.request))
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
        stage = first_stage(work.request)
        while True:
            if stage not in self._duties.limits:
                raise ForeignBytesError("a message names no stage")
            self._stage = self._duties.limits[stage]
            begun_s = time.monotonic()
            try:
                message = await connection.frames.read(limit_s=self._stage.timeout_s)
            finally:
                if 0 <= stage < len(self._duties.rewards):
                    self._duties.took(self._stage.name, time.monotonic() - begun_s)
            if not isinstance(message, int):
                break
            stage = message
        if message is not None:
            check_row(work.request, message, rewards=self._duties.rewards)
        return message

    async def _on_exit(self, work: WorkItem) -> None:
        how = await self._process.end()
        if work.died():
            self._duties.finish(work, failure("died", f"its process ended {how}"))
        else:
            self._duties.put_back(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSample:
    """A sample that waits for its endpoints."""

    work: WorkItem
    values: Sequence[float | None]
    """Of the parts; None where an endpoint is asked."""
    body: str
    since_s: float

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether these are what its endpoints can have said: a number of each."""
        return len(values) == self.values.count(None) and all(map(protocol.is_finite, values))


class EndpointSlot:
    """The endpoint client.

    Loop: consumes its answers; produces rows; waits for the process; unblocked by an answer, by its end and by the longest time limit.
    """

    def __init__(
        self, process: PoolProcess, *, timeout_s: float, finish: Finish, took: Callable[[float], None]
    ) -> None:
        """`timeout_s`: the longest time limit of an endpoint. `took`: told of the seconds until all endpoints of a sample had answered."""
        self._took = took
        self._process = process
        self._silence_s = timeout_s + GRACE_S
        self._finish = finish
        self._asked: dict[int, AskedSample] = {}
        self._next_number = 0

    def ask(self, work: WorkItem, values: Sequence[float | None], body: str) -> None:
        """Have the endpoints score a sample; its row is finished when all have answered."""
        sample = AskedSample(work=work, values=values, body=body, since_s=asyncio.get_running_loop().time())
        self._next_number += 1
        self._asked[self._next_number] = sample
        self._send(self._next_number, sample)

    def _send(self, number: int, sample: AskedSample) -> None:
        """What cannot be sent now is sent when the process is there."""
        if self._process.connection is not None:
            self._process.connection.transport.write(framing.encode([number, sample.body]))

    async def run(self) -> None:
        """Work until cancelled. Raises `TaskPoolError` when no process can be had."""
        try:
            while True:
                connection = await self._process.connect()
                for number, sample in self._asked.items():
                    self._send(number, sample)
                await self._read_all(connection)
                self._on_exit()
        finally:
            self._process.drop()

    async def _read_all(self, connection: Connection) -> None:
        """Until the process has ended, or has been ended because it is silent or talks nonsense."""
        try:
            while (message := await self._next(connection)) is not None:
                self._answered(message)
            await self._process.end()
        except (TimeoutError, ForeignBytesError):
            await self._process.kill()

    async def _next(self, connection: Connection) -> Any:  # noqa: ANN401 - JSON
        while True:
            try:
                return await connection.frames.read(limit_s=self._silence_s)
            except TimeoutError:
                oldest_s = min((sample.since_s for sample in self._asked.values()), default=float("inf"))
                if asyncio.get_running_loop().time() - oldest_s >= self._silence_s:
                    raise

    def _answered(self, message: Any) -> None:  # noqa: ANN401 - JSON
        match message:
            case [int(number), {"kind": str(), "error": str()} as row] if number in self._asked:
                self._finish(self._answered_sample(number).work, row)
            case [int(number), list(values)] if number in self._asked and self._asked[number].takes(values):
                sample, rest = self._answered_sample(number), iter(values)
                whole = [next(rest) if value is None else value for value in sample.values]
                self._finish(sample.work, [whole, None])
            case _:
                raise ForeignBytesError("a message is no answer to what was asked")

    def _answered_sample(self, number: int) -> AskedSample:
        sample = self._asked.pop(number)
        self._took(asyncio.get_running_loop().time() - sample.since_s)
        return sample

    def _on_exit(self) -> None:
        for number, sample in list(self._asked.items()):
            if sample.work.died():
                del self._asked[number]
                self._finish(sample.work, failure("died", "the process that asks endpoints ended twice"))
