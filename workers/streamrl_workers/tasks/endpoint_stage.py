"""The `http` rewards of a job: one process asks their endpoints, behind the parts of a sample's reward that a worker computes.

Owns that process, and the bounds of what endpoints are sent in a run (`rewards/budget.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from streamrl.spec.task import SingleTask
from streamrl_workers.rewards.budget import SampleBudget, sample_budget
from streamrl_workers.tasks.protocol import SPAWN_ENDPOINT_CLIENT
from streamrl_workers.tasks.worker_slots import ConcurrentSlot, Finish, PoolProcess, WorkItem, endpoint_row


class EndpointStage:
    """Has samples scored by endpoints."""

    def __init__(
        self,
        tasks: Sequence[SingleTask],
        *,
        process: Callable[[bytes], PoolProcess],
        finish: Finish,
        took: Callable[[WorkItem, float], None],
    ) -> None:
        """`tasks`: at least one has such a reward. `took`: told of an answered sample, and of the seconds until then."""
        self._tasks = tasks
        asked = [(reward.http, reward.timeout_seconds) for task in tasks for reward in task.rewards]
        endpoints = [(http, timeout_s) for http, timeout_s in asked if http is not None]
        self.most_at_once = min(http.most_at_once(timeout_s) for http, timeout_s in endpoints)
        """Samples that endpoints may have at once."""
        self._budgets: list[SampleBudget | None] = []
        """One for each task, since the start."""
        self._slot = ConcurrentSlot(
            process(SPAWN_ENDPOINT_CLIENT),
            name="the process that asks endpoints",
            timeout_s=max(http.longest_s(timeout_s) for http, timeout_s in endpoints),
            finish=finish,
            took=took,
        )

    def open(self, run_dir: Path | None) -> None:
        """Open the bounds, which are kept in `run_dir`; None: nothing is bounded.

        Raises:
            UserError: a bound's file holds no number.
        """
        self._budgets = [sample_budget(task, run_dir=run_dir) for task in self._tasks]

    async def run(self) -> None:
        """Loop of the process."""
        await self._slot.run()

    def ask(self, work: WorkItem, *, task: int, body: str, values: Sequence[float | None], raised: str | None) -> None:
        """Have the parts asked that are None in `values`.

        Raises:
            UserError: the task's bound is reached.
        """
        if (budget := self._budgets[task]) is not None:
            budget.take()
        self._slot.ask(work, [task, body], row_of=partial(endpoint_row, values=values, raised=raised))

    def close(self) -> None:
        """Close the bounds."""
        for budget in filter(None, self._budgets):
            budget.close()
