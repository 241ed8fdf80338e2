"""The loops that keep the scheduler going while its connections bring events.

Owns their tasks: each has a name, all end together, and the failure of one ends the process in a
way that says why. Does not own what they do.

Tick loop: consumes time; produces ticks of the core; waits for the next tick.
Prompt loop, score and turn loops: see `taskdesk.py`. Portions and process of the ranker: see `ranker_desk.py`.
"""

import asyncio
from collections.abc import Callable

from streamrl.errors import UserError, UserErrors
from streamrl_workers.scheduler.journal_store import JournalFaultError
from streamrl_workers.scheduler.shell.ending import EndingBox
from streamrl_workers.scheduler.shell.ranker_desk import RankerDesk
from streamrl_workers.scheduler.shell.taskdesk import SCORE_LOOPS, TURN_LOOPS, TaskDesk, TaskTimeoutError
from streamrl_workers.tasks.values import TaskPoolError

_TICKS_PER_LEASE = 10
_LONGEST_TICK_S = 0.25


class Loops:
    """Owner of the background tasks."""

    def __init__(self, ending: EndingBox) -> None:
        self._ending = ending
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *, desk: TaskDesk, ranking: RankerDesk, tick: Callable[[], None], lease_s: float) -> None:
        """Start all loops."""
        pause_s = min(_LONGEST_TICK_S, lease_s / _TICKS_PER_LEASE)
        self._tasks = [
            asyncio.create_task(_ticks(tick, pause_s), name="tick"),
            asyncio.create_task(desk.run_prompts(), name="prompts"),
            asyncio.create_task(ranking.run_portions(), name="ranker portions"),
            asyncio.create_task(ranking.run_process(), name="ranker process"),
            *(asyncio.create_task(desk.run_scores(), name=f"score {number}") for number in range(SCORE_LOOPS)),
            *(asyncio.create_task(desk.run_turns(), name=f"turn {number}") for number in range(TURN_LOOPS)),
        ]
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


def report(error: BaseException, *, ending: EndingBox) -> None:
    """End the process as `error` demands."""
    if isinstance(error, UserError | UserErrors):
        ending.user_error(str(error))
    elif isinstance(error, TaskPoolError | TaskTimeoutError | JournalFaultError):
        ending.retry(str(error))
    else:
        ending.fault(error)


async def _ticks(tick: Callable[[], None], pause_s: float) -> None:
    while True:
        await asyncio.sleep(pause_s)
        tick()
