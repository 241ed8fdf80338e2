"""The process's life: its background loops, and how it ends.

Owns the loops' tasks: each has a name, all end together, and the failure of one ends the process in a way that says why.
Owns the process's end: decided once, by whoever sees the reason first. Does not own what the loops do.
"""

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl_workers.scheduler.journal.store import JournalFaultError
from streamrl_workers.tasks.values import TaskPoolError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """Exit code and the line that says why ("" if nothing needs saying)."""

    exit_code: int
    line: str = ""
    finished_step: int | None = None
    """Set when the run is over: training steps done."""


class ExitDecision:
    """Holds the ending until somebody waits for it; the first one counts."""

    def __init__(self) -> None:
        self._future: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self.was_asked = False
        """Whether somebody has asked the process to end, before or after it knew that it would."""

    def finished(self, step: int) -> None:
        """The run has ended well."""
        self._set(ProcessExit(exit_code=EXIT_DONE, finished_step=step))

    def user_error(self, line: str) -> None:
        """Something that the user wrote cannot be honoured."""
        self._set(ProcessExit(exit_code=EXIT_USER_ERROR, line=line))

    def retry(self, line: str) -> None:
        """The process can be started again and goes on from the journal."""
        self._set(ProcessExit(exit_code=EXIT_RETRY, line=line))

    def asked(self, line: str) -> None:
        """SIGTERM."""
        self.was_asked = True
        self.retry(line)

    def fault(self, error: BaseException) -> None:
        """A mistake of our own: go no further in a state that nobody understands."""
        trace = "".join(traceback.format_exception(error))
        self._set(ProcessExit(exit_code=EXIT_FAULT, line=f"internal error\n{trace}"))

    @property
    def ending(self) -> ProcessExit | None:
        """The ending, if it is decided."""
        return self._future.result() if self._future.done() else None

    async def wait(self) -> ProcessExit:
        """Wait for the run's end: the one wait without a deadline, as a run takes as long as it takes."""
        return await asyncio.shield(self._future)

    def _set(self, ending: ProcessExit) -> None:
        if not self._future.done():
            self._future.set_result(ending)


_TICKS_PER_LEASE = 10
_LONGEST_TICK_S = 0.25


class Loops:
    """Owner of the background tasks."""

    def __init__(self, ending: ExitDecision) -> None:
        self._ending = ending
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, loops: Mapping[str, Coroutine[Any, Any, None]]) -> None:
        """Start all loops, by name."""
        self._tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End all loops and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            report(error, ending=self._ending)


def report(error: BaseException, *, ending: ExitDecision) -> None:
    """End the process as `error` demands."""
    if isinstance(error, UserError | UserErrors):
        ending.user_error(str(error))
    elif isinstance(error, TaskPoolError | JournalFaultError):
        ending.retry(str(error))
    else:
        ending.fault(error)


async def tick_forever(tick: Callable[[], None], *, lease_s: float) -> None:
    """Several times a lease."""
    pause_s = min(_LONGEST_TICK_S, lease_s / _TICKS_PER_LEASE)
    while True:
        await asyncio.sleep(pause_s)
        tick()
