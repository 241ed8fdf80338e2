"""One worker of the pool, over all its lives: feeds it, watches its time limits, replaces it.

Owns which sample is to blame when a worker ends:
- it overran a limit: the sample it was at (read from its progress row after its death) has kind `timeout`;
- it ended by itself: the sample it was at is tried once more, since a kill from outside looks the same; then `died`;
- it ended clean between samples (its memory was full and it has said so): nobody.
All others of the batch go back to the backlog. So every sample ends exactly once, and each death uses up a try.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl_workers.tasks import framing
from streamrl_workers.tasks.backlog import Backlog, Work
from streamrl_workers.tasks.nursery import Connection, NurseryProcess
from streamrl_workers.tasks.progress import PLAYING, Doing, ProgressTable
from streamrl_workers.tasks.values import TaskPoolError

BATCH_S = 0.05
"""Work given at once; little enough that lanes stay even and that a death repeats little."""
MAX_BATCH = 1024
FIRST_SECONDS_PER_SAMPLE = 0.002
EMA_WEIGHT = 0.3
MAKE_ITEM_TIMEOUT_S = 60.0
"""Longest time to make one item, the user's format function included; slow generators take seconds."""
STALL_TIMEOUT_S = 60.0
"""A worker that has work and neither begins nor answers for so long is replaced."""
MIN_CHECK_S = 0.01
MAX_DEATHS = 2
MAX_STARTS = 3
"""Tries in a row to have a worker before the pool gives up."""
EXIT_NOTICE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Time limit of one part of the reward, or of one call of the environment."""

    name: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneParts:
    """What lanes share."""

    backlog: Backlog
    progress: ProgressTable
    limits: tuple[Limit, ...]
    """Of the parts of the reward, by stage."""
    environment: Limit | None
    clock: Callable[[], float]
    failures: Counter[str]
    nursery: Callable[[], Awaitable[NurseryProcess]]
    """Gives the living nursery; starts another if it has ended."""


class Lane:
    """Worker number `number`.

    Loop: consumes work of the backlog; produces rows; waits for the backlog and for the worker; unblocked by work,
    results, the worker's end, and the watch timer, which kills a worker that overruns.
    """

    def __init__(self, number: int, *, shared: LaneParts) -> None:
        self._number = number
        self._shared = shared
        self._nursery: NurseryProcess | None = None
        self._connection: Connection | None = None
        self._seconds_per_sample = FIRST_SECONDS_PER_SAMPLE
        self._heard = 0.0
        self._overran = False
        self._timer: asyncio.TimerHandle | None = None

    async def connect(self) -> None:
        """Have a living worker. Raises `TaskPoolError` after `MAX_STARTS` tries, `UserError` at once."""
        for start in range(1, MAX_STARTS + 1):
            if self._connection is not None:
                return
            try:
                self._nursery = await self._shared.nursery()
                self._connection = await self._nursery.spawn(self._number)
            except TaskPoolError as error:
                if start == MAX_STARTS:
                    raise TaskPoolError(f"{error}; tried {MAX_STARTS} times") from error

    async def run(self) -> None:
        """Work until cancelled. Raises `TaskPoolError` when no worker can be had."""
        try:
            while True:
                await self.connect()
                wanted = max(1, min(MAX_BATCH, int(BATCH_S / self._seconds_per_sample)))
                works = await self._shared.backlog.take(wanted, lane=self._number)
                await self._serve(works)
        finally:
            self._drop()

    async def _serve(self, works: Sequence[Work]) -> None:
        connection = self._connection
        assert connection is not None
        first_number = connection.sent
        connection.sent += len(works)
        connection.writer.write(framing.encode([work.request for work in works]))
        began = self._heard = self._shared.clock()
        self._watch()
        done = 0
        while done < len(works):
            rows = await framing.read(connection.reader)
            if rows is None:
                await self._bury(connection, works[done:], first_number=first_number + done)
                return
            self._heard = self._shared.clock()
            await self._finish(works[done : done + len(rows)], rows)
            done += len(rows)
        self._unwatch()
        self._measure((self._shared.clock() - began) / len(works))

    async def _finish(self, works: Sequence[Work], rows: Sequence[Any]) -> None:
        for row in rows:
            if isinstance(row, dict):
                self._shared.failures[row["kind"]] += 1
        await self._shared.backlog.finish(works, rows)

    def _measure(self, seconds_per_sample: float) -> None:
        change = seconds_per_sample - self._seconds_per_sample
        self._seconds_per_sample += EMA_WEIGHT * change

    # ---- time limits

    def _watch(self) -> None:
        now = self._shared.clock()
        doing = self._shared.progress.doing(self._number)
        due = self._heard + STALL_TIMEOUT_S if doing is None else doing.started + self._limit(doing).timeout_s
        if now >= due:
            self._overran = True
            assert self._nursery is not None
            self._nursery.kill(self._number)
            return
        shortest = min(limit.timeout_s for limit in (*self._shared.limits, self._shared.environment) if limit)
        wait_s = max(MIN_CHECK_S, min(due - now, shortest))
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._watch)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit(self, doing: Doing) -> Limit:
        if 0 <= doing.stage < len(self._shared.limits):
            return self._shared.limits[doing.stage]
        if doing.stage == PLAYING and self._shared.environment is not None:
            return self._shared.environment
        return Limit(name="making the item", timeout_s=MAKE_ITEM_TIMEOUT_S)

    # ---- death

    async def _bury(self, connection: Connection, works: Sequence[Work], *, first_number: int) -> None:
        """The worker has ended with `works` undone; the first of them is its sample `first_number`."""
        self._unwatch()
        exit_code = await self._exit_code(connection)
        doing = self._shared.progress.doing(self._number)
        overran, self._overran = self._overran, False
        self._drop()
        self._shared.progress.leave(self._number)
        at = doing.number - first_number if doing is not None else 0
        row = self._verdict(works[at], doing=doing, overran=overran, exit_code=exit_code) if at < len(works) else None
        if row is None:
            self._shared.backlog.put_back(works)
            return
        self._shared.backlog.put_back([*works[:at], *works[at + 1 :]])
        await self._finish([works[at]], [row])

    def _verdict(
        self, work: Work, *, doing: Doing | None, overran: bool, exit_code: int | None
    ) -> dict[str, str] | None:
        """The failure of the sample that the worker was at; None: it is tried again."""
        if overran:
            if doing is None or self._shared.clock() - doing.started < self._limit(doing).timeout_s:
                return None  # it had just gone on to another sample
            limit = self._limit(doing)
            return {"kind": "timeout", "error": f"{limit.name}: took longer than {limit.timeout_s:g} s"}
        if doing is None and exit_code == 0:
            return None
        work.deaths += 1
        if work.deaths < MAX_DEATHS:
            return None
        return {"kind": "died", "error": f"its process ended {_how(exit_code)}"}

    async def _exit_code(self, connection: Connection) -> int | None:
        # The socket can close a moment before the notice, or long before the end: user code can close any descriptor.
        done, _ = await asyncio.wait([connection.exit_code], timeout=EXIT_NOTICE_TIMEOUT_S)
        if not done:
            self._kill()
            await asyncio.wait([connection.exit_code], timeout=EXIT_NOTICE_TIMEOUT_S)
        return connection.exit_code.result() if connection.exit_code.done() else None

    def _kill(self) -> None:
        if self._nursery is not None:
            self._nursery.kill(self._number)

    def _drop(self) -> None:
        self._unwatch()
        if self._connection is not None:
            self._connection.drop()
            self._connection = None


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "for an unknown reason"
    return f"by signal {-exit_code}" if exit_code < 0 else f"with status {exit_code}"
