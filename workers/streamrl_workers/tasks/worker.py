"""A process of the task pool: `python -m streamrl_workers.tasks.worker FD`.

```
  pool (in the scheduler) ── control socket: job, spawn, kill ──▶ NURSERY ── fork ──▶ worker 0, 1, ...
          ▲                 ◀── ready, exited ──────────────────                          │
          └──────────── one socket for each worker: requests, results ────────────────────┘
```
The nursery imports everything and opens the data set once; workers are forks of it, so a killed one is replaced
in milliseconds and memory is shared. The nursery runs user code only while it imports; workers run it all the time.

- Nursery loop: consumes control commands and the deaths of workers; produces workers and `exited` notices; waits for
  either; unblocked by the pool, by SIGCHLD, and by the end of the control socket (the pool is gone): then it kills all
  workers and ends.
- Worker loop (`serve`): consumes batches of requests; produces results, in order, at least every `FLUSH_S` while it makes
  progress; waits for the pool; unblocked by the end of its socket. If the nursery dies the kernel kills it.

Standard output is standard error here: what user code prints cannot get between the frames.
"""

import contextlib
import ctypes
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from streamrl.errors import UserError
from streamrl.spec.task import Task
from streamrl_workers.environments.registry import open_environment
from streamrl_workers.rewards.registry import make_parts
from streamrl_workers.tasks import commands, framing
from streamrl_workers.tasks.progress import ProgressTable
from streamrl_workers.tasks.registry import open_dataset
from streamrl_workers.tasks.scoring import Scoring
from streamrl_workers.tasks.values import WorkRequest

FLUSH_S = 0.005
"""Results wait so long at most for the next ones; less would cost a system call for each cheap sample."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Be the nursery until the pool is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)
    config = framing.receive(control)
    if config is None:
        return
    # Imports of user code may hang in C; this ends the process even then.
    faulthandler.dump_traceback_later(config["start_timeout_s"], exit=True)
    try:
        nursery = _open(config, control)
    except UserError as error:
        control.sendall(framing.encode({"user_error": _plain(error)}))
        return
    faulthandler.cancel_dump_traceback_later()
    nursery.run()
    os._exit(0)  # taking down the user's modules can take long, and their exit handlers belong to nobody


def _open(config: dict[str, Any], control: socket.socket) -> "Nursery":
    task = Task.model_validate_json(config["task"])
    base_dir = Path(config["base_dir"])
    dataset = open_dataset(task, seed=config["seed"], base_dir=base_dir, model_path=config["model_path"])
    parts = make_parts(task.rewards, verify=dataset.verify, base_dir=base_dir)
    environments = open_environment(task.environment, seed=config["seed"], base_dir=base_dir)
    progress = ProgressTable(workers=config["workers"], fd=config["progress_fd"])
    control.sendall(framing.encode({"ready": {"held_out_size": dataset.held_out_size}}))

    def make_scoring(worker: int) -> Scoring:
        return Scoring(dataset=dataset, parts=parts, environments=environments, progress=progress, worker=worker)

    return Nursery(control, make_scoring=make_scoring, memory_limit_bytes=config["memory_limit_bytes"])


def _plain(error: UserError) -> dict[str, Any]:
    got = error.got if isinstance(error.got, str | int | float | dict | None) else repr(error.got)
    return {"field": error.field, "rule": error.rule, "got": got, "fix": error.fix}


class Nursery:
    """Forks workers on command and tells the pool when one has ended."""

    def __init__(
        self, control: socket.socket, *, make_scoring: Callable[[int], Scoring], memory_limit_bytes: int
    ) -> None:
        self._control = control
        self._make_scoring = make_scoring
        self._memory_limit_bytes = memory_limit_bytes
        self._worker_of_pid: dict[int, int] = {}
        self._deaths, wake = socket.socketpair()
        self._deaths.setblocking(False)  # noqa: FBT003 - positional in the standard library
        wake.setblocking(False)  # noqa: FBT003
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve the pool until it is gone, then kill all workers."""
        with contextlib.suppress(ConnectionError):
            while self._serve_once():
                pass
        for pid in self._worker_of_pid:
            _kill(pid)

    def _serve_once(self) -> bool:
        ready, _, _ = select.select([self._control, self._deaths], [], [])
        if self._deaths in ready:
            self._deaths.recv(4096)
            self._report_deaths()
        return self._control not in ready or self._obey()

    def _obey(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, commands.SIZE, 1)
        if len(data) != commands.SIZE:
            return False
        command, worker = commands.decode(data)
        if command == commands.SPAWN:
            self._spawn(worker, fds[0])
        else:
            for pid in [pid for pid, other in self._worker_of_pid.items() if other == worker]:
                _kill(pid)
        return True

    def _spawn(self, worker: int, fd: int) -> None:
        nursery_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_worker(worker, fd, nursery_pid=nursery_pid)
        os.close(fd)
        self._worker_of_pid[pid] = worker

    def _be_worker(self, worker: int, fd: int, *, nursery_pid: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._control, self._deaths, self._wake):
                inherited.close()
            os.setpgid(0, 0)
            _die_with(nursery_pid)
            _limit_memory(self._memory_limit_bytes)
            status = serve(socket.socket(fileno=fd), self._make_scoring(worker))
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _report_deaths(self) -> None:
        while self._worker_of_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _kill_group(pid)  # what the user's code may have left behind
            worker = self._worker_of_pid.pop(pid, None)
            if worker is not None:
                code = os.waitstatus_to_exitcode(status)
                self._control.sendall(framing.encode({"exited": worker, "code": code, "pid": pid}))


def serve(connection: socket.socket, scoring: Scoring) -> int:
    """Answer batches until the pool closes the socket. Returns the exit status."""
    connection.sendall(framing.encode({"pid": os.getpid()}))
    while True:
        batch = framing.receive(connection)
        if batch is None:
            return 0
        rows: list[Any] = []
        flushed = time.monotonic()
        for request in map(WorkRequest._make, batch):
            row = scoring.answer(request)
            rows.append(row)
            now = time.monotonic()
            if request.turn is not None or now - flushed > FLUSH_S:  # a model waits for a turn's answer
                connection.sendall(framing.encode(rows))
                rows, flushed = [], now
            if isinstance(row, dict) and row["kind"] == "memory":
                # What filled the memory may still be held by the user's module: go on in a fresh fork.
                connection.sendall(framing.encode(rows))
                return 0
        if rows:
            connection.sendall(framing.encode(rows))


def _kill(pid: int) -> None:
    """Kill a worker that has not been waited for yet."""
    os.kill(pid, signal.SIGKILL)
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, also in a hang that holds the interpreter lock."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _limit_memory(limit_bytes: int) -> None:
    """Let the address space grow by `limit_bytes` from here."""
    used_bytes = 0
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        used_bytes = pages * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used_bytes + limit_bytes
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
