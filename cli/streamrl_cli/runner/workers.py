"""The one door to the worker processes of this machine: starts them, watches that they live, asks them to end, kills them.

Owns the parent watch (every worker ends itself when this process is gone), environments, logs, and what a failed process
said of itself. Does not own what an end means (`unit.py`). Invariant: a worker never outlives the runner.

Loop `Liveness.run`  consumes: ages of heartbeat files; produces: notices (`process/silences.py`), a line in logs/<process>.log
for each, then SIGKILL; waits for: the next look; unblocked by: the clock. Ended by its owner, `Supervisor.run`. A kill is a
death like any other. Processes that a worker has started are that worker's to watch.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from streamrl import keys
from streamrl.errors import EXIT_FAULT, EXIT_USER_ERROR
from streamrl_cli.runner.folder import RunFolder
from streamrl_cli.runner.plan import LOOPBACK, ProcessPlan
from streamrl_workers.process.heartbeat import POLL_S, HeartbeatWatch

STREAM_LIMIT_BYTES = 2**20
"""Longest line that a child may print."""
_TAIL_BYTES = 64 * 1024
"""Of a log, which may be large: its last line is in them."""


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
    _watched: int | None = None
    """The end of the parent watch that workers are given."""
    _open: ExitStack = field(default_factory=ExitStack)

    def open(self) -> None:
        """Open the parent watch, and forget the heartbeats of an earlier life of the run."""
        self._watched = self._open.enter_context(open_parent_watch())
        for file in self.folder.file(keys.DIR_HEARTBEATS).glob("*"):
            file.unlink()

    async def close(self) -> None:
        """End whatever still runs, at once."""
        self.stopping = True
        alive = self._alive(self.processes)
        for process in alive:
            process.kill()
        for process in alive:
            await process.wait()
        self._open.close()

    async def spawn(self, plan: ProcessPlan, *, env: Mapping[str, str]) -> asyncio.subprocess.Process:
        """Start a worker; `env` is added to what its plan says."""
        assert self._watched is not None
        whole = {**os.environ, **self.shared_env, **plan.env, **env, keys.ENV_PARENT_WATCH_FD: str(self._watched)}
        heartbeat = self.heartbeat_file(plan.name)
        heartbeat.parent.mkdir(exist_ok=True)
        heartbeat.touch()  # from its start on a worker is watched, also if it never comes to touch the file
        whole[keys.ENV_HEARTBEAT_FILE] = str(heartbeat)
        with self.log_file(plan.name).open("ab") as log:
            self.log_starts[plan.name] = log.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", plan.module),
                env=whole,
                cwd=self.folder.path,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._watched,),
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

    def kill(self, name: str) -> None:
        """SIGKILL, which also ends a process that is stopped; what follows is `unit.py`'s."""
        for process in self._alive([name]):
            with suppress(ProcessLookupError):
                process.kill()

    def note(self, name: str, text: str) -> None:
        """A line of ours in a worker's log, where its failure is looked for."""
        with suppress(OSError), self.log_file(name).open("a", encoding="utf-8") as log:  # a full disk
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} streamrl run: {text}\n")

    def heartbeat_file(self, name: str) -> Path:
        """What a worker touches while it is not frozen."""
        return self.folder.file(keys.DIR_HEARTBEATS, name)

    def log_file(self, name: str) -> Path:
        """Where a worker's output goes."""
        return self.folder.file(keys.DIR_LOGS, f"{name}.log")


async def wait_for_ends(
    processes: Iterable[asyncio.subprocess.Process],
    *,
    timeout_s: float | None,
    return_when: str = asyncio.ALL_COMPLETED,
) -> list[asyncio.subprocess.Process]:
    """Wait until all (or the first) have ended, at most `timeout_s`; returns those that have not."""
    waits = {asyncio.create_task(process.wait(), name="wait for a worker's end"): process for process in processes}
    if not waits:
        return []
    try:
        _, late = await asyncio.wait(waits, timeout=timeout_s, return_when=return_when)
    finally:
        for task in waits:
            task.cancel()
    return [waits[task] for task in late]


@contextmanager
def open_parent_watch() -> Iterator[int]:
    """The end of a pipe at which a child sees that this process is gone."""
    ends = os.pipe()
    try:
        yield ends[0]
    finally:
        for end in ends:
            os.close(end)


@asynccontextmanager
async def child(
    module: str, *arguments: str, env: Mapping[str, str], log: Path, tells: bool = True, umask: int = -1
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m module` as a process that is no worker; it is killed at the end of the block.

    `tells`: its standard output is read, else it goes to `log` with the errors. `umask` -1: as ours.
    """
    with log.open("ab") as errors, open_parent_watch() as watched:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            # Some data sets of reasoning-gym iterate over sets of strings: their items follow the hash seed.
            env={**os.environ, **env, keys.ENV_PARENT_WATCH_FD: str(watched), "PYTHONHASHSEED": "0"},
            pass_fds=(watched,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if tells else errors,
            stderr=errors,
            umask=umask,
            limit=STREAM_LIMIT_BYTES,
            start_new_session=True,  # Ctrl-C reaches us alone
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


class RunFailedError(Exception):
    """The run cannot go on. The text is one line for the user.

    Args:
        text: the line.
        exit_code: of `streamrl run`: a worker that refused the user's input makes it `EXIT_USER_ERROR`.
    """

    def __init__(self, text: str, *, exit_code: int = EXIT_FAULT) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def failed(*, reason: str, exit_code: int, log: Path, since_bytes: int = 0) -> RunFailedError:
    """The failure of a process that left with `exit_code`; what it said stands in `log` behind `since_bytes`.

    A process that refused the user's input has said so in a whole line already.
    """
    said = last_line(log, since_bytes=since_bytes)
    if exit_code == EXIT_USER_ERROR:
        return RunFailedError(said, exit_code=EXIT_USER_ERROR)
    return RunFailedError(f"{reason}: {said}; see {log}")


def last_line(log: Path, *, since_bytes: int = 0) -> str:
    """The last line of a log that says something; what a failed process said of itself.

    `since_bytes`: size of the log when the process began, as earlier ones have written to it too.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(since_bytes, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"{log.name} cannot be read: {error.strerror}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


@dataclass(slots=True, kw_only=True)
class Liveness:
    """Watches all worker processes of a run."""

    workers: Workers
    bound_s: float
    """Silence after which a worker is killed."""
    _watches: dict[tuple[str, int], HeartbeatWatch] = field(default_factory=dict)
    """By name and process number."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._look(time.monotonic())
            await asyncio.sleep(POLL_S)

    def _look(self, now_s: float) -> None:
        """Look at every living worker once; those that have ended are forgotten."""
        before, self._watches = self._watches, {}
        for name, process in sorted(self.workers.processes.items()):
            if process.returncode is not None:
                continue
            file = self.workers.heartbeat_file(name)
            fresh = HeartbeatWatch(name=name, file=file, bound_s=self.bound_s, looked_s=now_s)
            watch = self._watches[name, process.pid] = before.get((name, process.pid), fresh)
            if line := watch.look(now_s):
                self.workers.note(name, line)
            if watch.frozen:
                self.workers.kill(name)
        for ended in before.keys() - self._watches.keys():
            before[ended].end()
