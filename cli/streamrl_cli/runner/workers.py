"""The one door to the worker processes of this machine: starts them, asks them to end, kills them.

Owns the lifeline (every worker ends itself when this process is gone), environments and logs. Does not own what
an end means (`unit.py`). Invariant: a worker never outlives the runner.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from streamrl import keys
from streamrl_cli.runner.folder import RunFolder
from streamrl_cli.runner.plan import ProcessPlan


@dataclass(slots=True, kw_only=True)
class Workers:
    """The worker processes of one run."""

    folder: RunFolder
    shared_env: dict[str, str]
    stopping: bool = False
    """The run is being ended: no end of a worker is a death any more, and none is started again."""
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    """The newest process of each name, alive or not."""
    log_starts: dict[str, int] = field(default_factory=dict)
    """Bytes that its log had when it began: earlier processes of the name wrote them."""
    _lifeline: tuple[int, int] | None = None

    def open(self) -> None:
        """Make the lifeline."""
        self._lifeline = os.pipe()

    async def close(self) -> None:
        """End whatever still runs, at once."""
        self.stopping = True
        alive = self._alive(self.processes)
        for process in alive:
            process.kill()
        for process in alive:
            await process.wait()
        if self._lifeline is not None:
            for end in self._lifeline:
                os.close(end)
            self._lifeline = None

    async def spawn(self, plan: ProcessPlan, *, env: Mapping[str, str]) -> asyncio.subprocess.Process:
        """Start a worker; `env` is added to what its plan says."""
        assert self._lifeline is not None
        read_end = self._lifeline[0]
        whole = {**os.environ, **self.shared_env, **plan.env, **env, keys.ENV_LIFELINE_FD: str(read_end)}
        if plan.role != "scheduler":
            whole[keys.ENV_GRPC_PORT] = "0"
        with self.log_file(plan.name).open("ab") as log:
            self.log_starts[plan.name] = log.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", plan.module),
                env=whole,
                cwd=self.folder.path,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(read_end,),
                start_new_session=True,  # Ctrl-C reaches the runner alone; it stops the workers in order
            )
        self.processes[plan.name] = process
        return process

    async def end(self, names: Iterable[str], *, by: signal.Signals, grace_s: float) -> None:
        """Send the signal and return when all have ended; those that live on after the grace are killed."""
        alive = self._alive(names)
        for process in alive:
            with suppress(ProcessLookupError):  # it has just ended by itself
                process.send_signal(by)
        late = await wait_for_ends(alive, timeout_s=grace_s)
        for process in late:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def await_end(self, names: Iterable[str], *, timeout_s: float) -> None:
        """Until all have ended, at most so long."""
        await wait_for_ends(self._alive(names), timeout_s=timeout_s)

    def _alive(self, names: Iterable[str]) -> list[asyncio.subprocess.Process]:
        known = [self.processes[name] for name in names if name in self.processes]
        return [process for process in known if process.returncode is None]

    def log_file(self, name: str) -> Path:
        """Where a worker's output goes."""
        return self.folder.file(keys.DIR_LOGS, f"{name}.log")


async def wait_for_ends(
    processes: Iterable[asyncio.subprocess.Process], *, timeout_s: float
) -> list[asyncio.subprocess.Process]:
    """Wait until all have ended, at most `timeout_s`; returns those that have not."""
    waits = {asyncio.create_task(process.wait(), name="wait for a worker's end"): process for process in processes}
    if not waits:
        return []
    try:
        _, late = await asyncio.wait(waits, timeout=timeout_s)
    finally:
        for task in waits:
            task.cancel()
    return [waits[task] for task in late]
