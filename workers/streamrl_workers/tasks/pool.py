"""The task pool: makes prompts, answers turns, scores completions in processes of its own, each under a time limit.

```
  scheduler ──▶ TaskPool ──▶ Backlog ──▶ Lane 0 ══ worker process 0      (worker.py)
                                   └───▶ Lane 1 ══ worker process 1
```
Owns the lanes and the nursery. Does not import the data set or user code (the scheduler stays small), does not pickle.
Invariant: every request gets exactly one result, whatever the user's functions do: raise, hang (also in C), print,
exit, fill the memory. Only a pool that cannot start processes raises, and says what was awaited.

Loops: one per lane (`lane.py`) and the nursery's listener (`nursery.py`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl_workers.tasks.backlog import Backlog
from streamrl_workers.tasks.lane import Lane, LaneParts, Limit
from streamrl_workers.tasks.nursery import NurseryProcess
from streamrl_workers.tasks.progress import ProgressTable
from streamrl_workers.tasks.values import (
    PlayTurn,
    Prompt,
    Score,
    ScoreSample,
    Split,
    TaskPoolError,
    Turn,
    TurnAnswer,
    WorkRequest,
)

MEMORY_LIMIT_BYTES = 4 << 30
"""Growth of one worker's address space; generous, so that only leaks meet it."""
CLOSED = "the task pool is closed"


class TaskPool:
    """Prompts and scores of one job."""

    def __init__(
        self,
        job: RLJob,
        *,
        base_dir: Path,
        processes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        """`processes` None: as the job says. `clock` must be `time.monotonic` where real processes run."""
        self._job = job
        self._base_dir = base_dir
        self._memory_limit_bytes = memory_limit_bytes
        self._count = processes or job.spec.task.processes
        self._names = [reward.name for reward in job.spec.task.rewards]
        environment = job.spec.task.environment
        self._backlog = Backlog(lanes=self._count)
        self._progress = ProgressTable(workers=self._count)
        self._nursery: NurseryProcess | None = None
        self._nursery_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self.failures: Counter[str] = Counter({"raised": 0, "timeout": 0, "died": 0, "bad_value": 0, "memory": 0})
        """Failures by kind, since the pool began."""
        self.held_out_size: int | None = None
        """Held-out items of the data set; None = endless (or not started)."""
        self._shared = LaneParts(
            backlog=self._backlog,
            progress=self._progress,
            limits=tuple(Limit(name=part.name, timeout_s=part.timeout_seconds) for part in job.spec.task.rewards),
            environment=None
            if environment is None
            else Limit(name="environment", timeout_s=environment.timeout_seconds),
            clock=clock,
            failures=self.failures,
            nursery=self._living_nursery,
        )

    async def start(self) -> None:
        """Open the data set and the rewards in the nursery, and have one worker say hello.

        Raises:
            UserError: the job's data set, rewards or functions cannot be used.
            TaskPoolError: the processes did not start in time.
        """
        lanes = [Lane(number, shared=self._shared) for number in range(self._count)]
        try:
            await lanes[0].connect()
        except BaseException:
            await self.close()
            raise
        self._tasks = [
            asyncio.create_task(self._keep(lane), name=f"task-pool-lane-{number}") for number, lane in enumerate(lanes)
        ]

    async def prompts(self, *, split: Split, first_index: int, count: int) -> list[Prompt]:
        """Prompts `first_index` .. `first_index + count - 1`.

        Raises:
            UserError: an item cannot be made (its generator or the format function failed).
            TaskPoolError: the pool cannot work.
        """
        indexes = range(first_index, first_index + count)
        rows = await self._backlog.run([WorkRequest(split, index) for index in indexes])
        for index, row in zip(indexes, rows, strict=True):
            if isinstance(row, dict):
                raise UserError(field="spec.task", rule=f"{split} prompt {index} cannot be made: {row['error']}")
        return [Prompt(split=split, index=index, text=row[0]) for index, row in zip(indexes, rows, strict=True)]

    async def score(self, requests: Sequence[ScoreSample]) -> list[Score]:
        """One result for each request, in their order. Waits while too many are outstanding.

        Raises:
            TaskPoolError: the pool cannot work. Never for what a reward does.
        """
        asked = [WorkRequest(r.split, r.prompt_index, r.completion, r.environment_reward) for r in requests]
        rows = await self._backlog.run(asked)
        return [self._result(request, row) for request, row in zip(requests, rows, strict=True)]

    async def play(self, requests: Sequence[PlayTurn]) -> list[TurnAnswer]:
        """The environment's answer to each turn, in their order. Waits while too much is outstanding.

        Raises:
            TaskPoolError: the pool cannot work. Never for what an environment does.
        """
        rows = await self._backlog.run([_turn_request(request) for request in requests])
        return [_turn_result(request, row) for request, row in zip(requests, rows, strict=True)]

    def _result(self, request: ScoreSample, row: Any) -> Score:  # noqa: ANN401 - a row of `scoring.py`
        group_id, sample_index = request.group_id, request.sample_index
        if isinstance(row, dict):
            return Score(
                group_id=group_id,
                sample_index=sample_index,
                reward=None,
                parts={},
                error=row["error"],
                kind=row["kind"],
            )
        parts = dict(zip(self._names, row[1:], strict=True))
        return Score(group_id=group_id, sample_index=sample_index, reward=row[0], parts=parts)

    async def close(self) -> None:
        """End all processes; calls that still wait raise `TaskPoolError`. May be called twice."""
        if self._closed:
            return
        self._closed = True
        await self._backlog.close(TaskPoolError(CLOSED))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._nursery is not None:
            await self._nursery.close()
        self._progress.close()

    async def _keep(self, lane: Lane) -> None:
        """Run a lane; if its worker cannot be had, the pool fails as a whole."""
        try:
            await lane.run()
        except (TaskPoolError, UserError) as error:
            await self._backlog.close(TaskPoolError(str(error)))
        except Exception as error:  # user code can write anything to its socket: nobody may wait for this lane for ever
            await self._backlog.close(TaskPoolError(f"a lane of the task pool failed: {error!r}"))
            raise

    async def _living_nursery(self) -> NurseryProcess:
        async with self._nursery_lock:
            if self._nursery is not None and self._nursery.alive:
                return self._nursery
            if self._nursery is not None:
                await self._nursery.close()
            self._nursery = NurseryProcess(
                self._job,
                base_dir=self._base_dir,
                progress=self._progress,
                workers=self._count,
                memory_limit_bytes=self._memory_limit_bytes,
            )
            self.held_out_size = await self._nursery.start()
            return self._nursery


def _turn_request(request: PlayTurn) -> WorkRequest:
    turn = Turn(request.group_id, request.sample_index, request.last_token, request.completions)
    return WorkRequest(request.split, request.prompt_index, turn=turn)


def _turn_result(request: PlayTurn, row: Any) -> TurnAnswer:  # noqa: ANN401 - a row of `scoring.py`
    group_id, sample_index, lease = request.group_id, request.sample_index, request.lease
    if isinstance(row, dict):
        return TurnAnswer(
            group_id=group_id, sample_index=sample_index, lease=lease, error=row["error"], kind=row["kind"]
        )
    observation, reward, done = row
    return TurnAnswer(
        group_id=group_id, sample_index=sample_index, lease=lease, observation=observation, reward=reward, done=done
    )
