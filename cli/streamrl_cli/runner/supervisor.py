"""Starts the workers of a run, watches them, starts again what dies, and stops them in order.

        run.py ──▶ SUPERVISOR ──spawn──▶ scheduler, trainer-0, generator-<pool>-<i>
                       │  lifeline pipe: every worker ends itself when this process is gone

Loops (all owned by `Supervisor.run`):
  watch(process)  consumes: the process's end; produces: a restart, or the end of the run;
                  waits for: the process; unblocked by: its exit, or `stop`.

Invariants: a worker never outlives the runner; restarts of all workers together stay within the
failure policy; the scheduler comes back on the port it had, so that the others find it again.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl import keys
from streamrl.errors import UserError
from streamrl_cli.runner.failure import RunFailedError, failed
from streamrl_cli.runner.folder import RunFolder, read_json
from streamrl_cli.runner.plan import ProcessPlan
from streamrl_cli.runner.restarts import QUICK_DEATH_S, judge_exit

START_TIMEOUT_S = 60.0
"""The scheduler is ready in about a second; a minute allows for a very busy machine."""
POLL_S = 0.05
"""How often the endpoint file is looked for."""
END_TIMEOUT_S = 10.0
"""The scheduler has told the others to stop when it ends; one that was just being started again did not hear it."""
TERMINATE_TIMEOUT_S = 45.0
"""After SIGTERM: the trainer writes a checkpoint in this time."""


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """The workers of one run on this machine."""

    folder: RunFolder
    plans: Sequence[ProcessPlan]
    shared_env: dict[str, str]
    max_restarts: int
    say: Callable[[str], None]
    restarts: int = 0
    stopping: bool = False
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _lifeline: tuple[int, int] | None = None

    async def run(self) -> None:
        """Start everybody and return when the run has ended well.

        Raises:
            RunFailedError: a worker refused its input, or too many died.
        """
        self._lifeline = os.pipe()
        try:
            if not await self._start_scheduler():
                return
            async with asyncio.TaskGroup() as group:
                watchers = [group.create_task(self._watch(plan), name=f"watch {plan.name}") for plan in self.plans]
                await self._until_over(watchers)
        except* RunFailedError as failures:
            raise failures.exceptions[0] from None
        finally:
            await self.kill()
            self._close_lifeline()

    async def _until_over(self, watchers: Sequence[asyncio.Task[None]]) -> None:
        scheduler, *others = watchers
        await scheduler
        _, late = await asyncio.wait(others, timeout=END_TIMEOUT_S)
        if late:
            self.stopping = True
            await self._terminate([task.get_name().removeprefix("watch ") for task in late])
        for task in late:
            task.cancel()

    async def stop(self) -> None:
        """Ask everybody to stop: the trainer first, since its checkpoint needs the scheduler."""
        self.stopping = True
        for role in ("trainer", "generator", "scheduler"):
            await self._terminate([plan.name for plan in self.plans if plan.role == role])

    async def _terminate(self, names: Sequence[str]) -> None:
        alive = [
            self.processes[name] for name in names if name in self.processes and self.processes[name].returncode is None
        ]
        for process in alive:
            process.terminate()
        waits = [asyncio.create_task(process.wait(), name="wait for SIGTERM") for process in alive]
        if waits:
            _, late = await asyncio.wait(waits, timeout=TERMINATE_TIMEOUT_S)
            for task in late:
                task.cancel()

    async def kill(self) -> None:
        """End whatever still runs, at once."""
        self.stopping = True
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
        for process in self.processes.values():
            await process.wait()

    async def _watch(self, plan: ProcessPlan) -> None:
        if self.stopping:
            return
        if plan.name not in self.processes:
            await self._spawn(plan)
        quick_deaths = 0
        while True:
            born_s = time.monotonic()
            code = await self.processes[plan.name].wait()
            quick_deaths = quick_deaths + 1 if time.monotonic() - born_s < QUICK_DEATH_S else 1
            if self.stopping:
                return
            verdict = judge_exit(
                name=plan.name,
                exit_code=code,
                run_ended=self.folder.file(keys.FILE_RESULT).exists(),
                quick_deaths=quick_deaths,
                restarts=self.restarts,
                max_restarts=self.max_restarts,
            )
            if verdict.action == "finish":
                return
            if verdict.action == "fail":
                raise failed(reason=verdict.reason, exit_code=code, log=self.log_file(plan.name))
            self.restarts += 1
            self.say(f"{verdict.reason}; starting it again ({self.restarts} of {self.max_restarts})")
            await asyncio.sleep(verdict.backoff_s)
            if self.stopping:
                return  # `stop` has passed by: it would not see this one
            await self._spawn(plan)

    async def _start_scheduler(self) -> bool:
        """Until it listens; False if the run is being stopped meanwhile."""
        plan = self.plans[0]
        endpoint = self.folder.file(keys.DIR_ENDPOINTS, f"{plan.name}.json")
        endpoint.unlink(missing_ok=True)
        process = await self._spawn(plan)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not endpoint.exists():
                    if self.stopping:
                        return False
                    if process.returncode is not None:
                        raise failed(
                            reason=f"{plan.name} did not start",
                            exit_code=process.returncode,
                            log=self.log_file(plan.name),
                        )
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise RunFailedError(
                f"{plan.name} was not ready within {START_TIMEOUT_S:.0f} s; see {self.log_file(plan.name)}"
            ) from None
        address = str(read_json(endpoint)["grpc"])
        self.shared_env[keys.ENV_SCHEDULER_ADDRESS] = address
        self.shared_env[keys.ENV_GRPC_PORT] = address.rsplit(":", 1)[1]
        return True

    async def _spawn(self, plan: ProcessPlan) -> asyncio.subprocess.Process:
        assert self._lifeline is not None
        read_end = self._lifeline[0]
        env = {**os.environ, **self.shared_env, **plan.env, keys.ENV_LIFELINE_FD: str(read_end)}
        if plan.role != "scheduler":
            env[keys.ENV_GRPC_PORT] = "0"
        with self.log_file(plan.name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", plan.module),
                env=env,
                cwd=self.folder.path,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(read_end,),
                start_new_session=True,  # Ctrl-C reaches the runner alone; it stops the workers in order
            )
        self.processes[plan.name] = process
        return process

    def log_file(self, name: str) -> Path:
        """Where a worker's output goes."""
        return self.folder.file(keys.DIR_LOGS, f"{name}.log")

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            for end in self._lifeline:
                os.close(end)
            self._lifeline = None


def check_port(port: int, *, flag: str) -> None:
    """A port that the user names must be one that can exist.

    Raises:
        UserError: it is not between 0 and 65535.
    """
    if not 0 <= port <= 65_535:  # noqa: PLR2004 - the range of TCP ports
        raise UserError(field=flag, rule="must be between 0 and 65535", got=port, fix="0 takes any free port")
