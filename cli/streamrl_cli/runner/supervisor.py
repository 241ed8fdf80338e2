"""Starts the workers of a run, keeps them alive, adds and removes members of pools, and stops all in order.

        run.py ──▶ SUPERVISOR ──▶ units: scheduler | trainer ranks | generator-<pool>-<i> ... | agents-<i> ...
                       ▲   └─ every unit is watched by a task of its own (unit.py); processes: workers.py
        scaling.py ────┘ resize(pool, replicas)

Loops (all owned by `Supervisor.run`): a watch for each unit (`unit.py`) and one for frozen workers (`workers.py`); a farewell for each member of a pool that was told to
leave: waits for its end, unblocked by its exit or, after `LEAVE_GRACE_S`, by SIGKILL.

Invariants: restarts of all workers together stay within the failure policy; the scheduler comes back on the port it
had, so that the others find it again; of a pool the highest ordinals leave first, and an ordinal that is leaving is not
started again before it is gone.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.errors import UserError
from streamrl.files import read_json
from streamrl_cli.runner.folder import RunFolder
from streamrl_cli.runner.plan import ProcessPlan, RunPlan
from streamrl_cli.runner.unit import Failures, Unit
from streamrl_cli.runner.workers import Liveness, RunFailedError, Workers

START_TIMEOUT_S = 900.0
"""The scheduler is ready in about a second, but it reads a journal of many gigabytes first. One that is frozen is noticed before (`workers.py`)."""
POLL_S = 0.05
"""How often the endpoint file is looked for."""
END_TIMEOUT_S = 10.0
"""The scheduler has told the others to stop when it ends; one that was just being started again did not hear it."""
TERMINATE_TIMEOUT_S = 45.0
"""After SIGTERM: the trainer writes a checkpoint in this time."""
FOLLOWER_TIMEOUT_S = 5.0
"""Rank 0's checkpoint needs the other ranks; it tells them when it is done. Those that did not hear are ended then."""
GENERATOR_TIMEOUT_S = 5.0
"""A generator that is told to end now keeps nothing back; a model that is being loaded may hold its signal up."""
LEAVE_GRACE_S = 60.0
"""For a generator that leaves to finish its samples; what it has not finished then is issued again to the others."""


class Supervisor:
    """The workers of one run on this machine."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        plan: RunPlan,
        shared_env: dict[str, str],
        max_restarts: int,
        liveness_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Nothing is started yet."""
        self.folder = folder
        self.plan = plan
        self.workers = Workers(folder=folder, shared_env=shared_env)
        self.failures = Failures(workers=self.workers, max_restarts=max_restarts, say=say)
        self.liveness = Liveness(workers=self.workers, bound_s=liveness_s)
        self.members: dict[str, Unit] = {}
        """By name; those that are leaving included."""
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """The watches and farewells of all units but the scheduler's."""

    async def run(self, *, replicas: Mapping[str, int], scaling: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start everybody, each pool with so many generators, and return when the run has ended well.

        `scaling` runs beside them, and calls `resize`, until then.

        Raises:
            RunFailedError: a worker refused its input, or too many died.
            UserError: a file cannot be written.
        """
        self.workers.open()
        refusals: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._endpoint.unlink(missing_ok=True)  # an earlier scheduler's
                watchdog = group.create_task(self.liveness.run(), name="watch for frozen workers")
                scheduler = group.create_task(self._unit(self.plan.scheduler).watch(), name="watch the scheduler")
                if await self._scheduler_listens(scheduler):
                    await self._until_end(scheduler, replicas=replicas, scaling=scaling)
                watchdog.cancel()
        except* (RunFailedError, UserError) as failures:
            refusals.extend(failures.exceptions)
        finally:
            self._group = None
            await self.workers.close()
        if refusals:  # behind `except*`, in which Python before 3.11.4 wraps what is raised into a group
            raise refusals[0]

    def resize(self, pool: str, *, replicas: int) -> None:
        """Start the members of the pool that are missing, and tell those beyond `replicas` to leave."""
        if self._group is None or self.workers.stopping or self.failures.run_ended:
            return
        for ordinal in range(replicas):
            plan = self.plan.member(pool, ordinal=ordinal)
            if plan.name not in self.members:
                unit = self.members[plan.name] = self._unit(plan)
                self._own(self._watch_member(unit), name=f"watch {plan.name}")
        wanted = {self.plan.member(pool, ordinal=ordinal).name for ordinal in range(replicas)}
        for name, unit in self.members.items():
            if unit.plans[0].env[keys.ENV_POOL] == pool and name not in wanted and not unit.leaving:
                unit.leaving = True
                self._own(unit.leave(grace_s=LEAVE_GRACE_S), name=f"farewell of {name}")

    async def stop(self) -> None:
        """Ask everybody to stop: the trainer first, since its checkpoint needs the scheduler."""
        self.workers.stopping = True
        await self._end_trainer(grace_s=TERMINATE_TIMEOUT_S)
        await self._end_members()
        await self.workers.end([self.plan.scheduler.name], by=signal.SIGTERM, grace_s=TERMINATE_TIMEOUT_S)

    async def _finish(self) -> None:
        """The run has ended: all others were told so by the scheduler; end those that did not hear it."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_TIMEOUT_S)
        self.workers.stopping = True
        await self._end_trainer(grace_s=TERMINATE_TIMEOUT_S)
        await self._end_members()
        for task in self._tasks:
            task.cancel()

    async def _end_trainer(self, *, grace_s: float) -> None:
        first, *others = [plan.name for plan in self.plan.ranks]
        await self.workers.end([first], by=signal.SIGTERM, grace_s=grace_s)
        await self.workers.await_end(others, timeout_s=FOLLOWER_TIMEOUT_S)
        await self.workers.end(others, by=signal.SIGTERM, grace_s=FOLLOWER_TIMEOUT_S)

    async def _end_members(self) -> None:
        await self.workers.end(list(self.members), by=signal.SIGINT, grace_s=GENERATOR_TIMEOUT_S)

    async def _watch_member(self, unit: Unit) -> None:
        await unit.watch()
        if unit.leaving:
            del self.members[unit.names[0]]

    def _unit(self, *plans: ProcessPlan) -> Unit:
        return Unit(plans=plans, workers=self.workers, failures=self.failures)

    def _own(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        assert self._group is not None
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _scheduler_listens(self, watch: asyncio.Task[None]) -> bool:
        """Wait until it does, be it in its second life; False if the run is stopped meanwhile."""
        name = self.plan.scheduler.name
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not self._endpoint.exists():
                    if watch.done():
                        return False
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise RunFailedError(
                f"{name} was not ready within {START_TIMEOUT_S:.0f} s; see {self.workers.log_file(name)}"
            ) from None
        address = str(read_json(self._endpoint)["grpc"])
        self.workers.shared_env[keys.ENV_SCHEDULER_ADDRESS] = address
        self.workers.shared_env[keys.ENV_GRPC_PORT] = address.rsplit(":", 1)[1]
        return True

    async def _until_end(
        self,
        scheduler: asyncio.Task[None],
        *,
        replicas: Mapping[str, int],
        scaling: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Start the others, and end them when the scheduler has ended for good."""
        assert self._group is not None
        self._own(self._unit(*self.plan.ranks).watch(), name="watch the trainer")
        for pool, count in replicas.items():
            self.resize(pool, replicas=count)
        scaler = self._group.create_task(scaling(), name="scaling")
        await scheduler
        scaler.cancel()
        await self._finish()

    @property
    def _endpoint(self) -> Path:
        return self.folder.file(keys.DIR_ENDPOINTS, f"{self.plan.scheduler.name}.json")


def check_port(port: int, *, flag: str) -> None:
    """A port that the user names must be one that can exist. Raises `UserError`: it is not between 0 and 65535."""
    if not 0 <= port <= 65_535:  # noqa: PLR2004 - the range of TCP ports
        raise UserError(field=flag, rule="must be between 0 and 65535", got=port, fix="0 takes any free port")
