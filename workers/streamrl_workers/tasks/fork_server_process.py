"""The fork server of the task pool: `python -m streamrl_workers.tasks.fork_server_process FD`.

```
  pool (in the scheduler) ── control socket: job, spawn, kill ──▶ FORK SERVER ── fork ──▶ worker 0, 1, ..., endpoint client, agent host, item reader
          ▲                 ◀── ready, exited ──────────────────                              │
          └──────────── one socket for each: requests, stages, rows ─────────────────────────┘
```
It imports everything and opens the data set once. Workers are forks of it, so a killed one is replaced in milliseconds and
memory is shared. It runs user code only while it imports. What the forks do is `worker.py` and `agent_host.py`.

Loop: consumes control commands and the ends of workers; produces workers and `exited` notices; waits for either; unblocked
by the pool, by SIGCHLD, and by the end of the control socket (the pool is gone): then it kills all children and ends.

Owns what binds a worker and everything that it starts:
- Standard output is standard error, and of the pool's descriptors a worker holds its own socket alone.
- Each worker is a session of its own that ends with the fork server, its memory bounded.
- Worker and fork server are "subreapers" of Linux. A process that leaves its group (`setsid`) or whose parent has ended
  becomes the worker's child, and the fork server's when the worker has ended. Then the fork server kills its children but
  for its workers and those older than its first fork; at its own end, all. Elsewhere than on Linux the process group is
  killed, which a process that leaves it survives.
- No protection against code that wants to escape: it runs as the same user.
"""

import contextlib
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from streamrl.errors import UserError
from streamrl.keys import ENV_HEARTBEAT_FILE, ENV_UMASK
from streamrl.liveness import INTERVAL_S
from streamrl.spec.algorithm import SupervisedSpec
from streamrl.spec.task import Task
from streamrl_workers.environments.registry import open_environment
from streamrl_workers.process import framing
from streamrl_workers.process.heartbeat import touch
from streamrl_workers.process.orphans import adopt_orphans, children, die_with, kill_children, kill_orphans
from streamrl_workers.rewards.registry import make_parts
from streamrl_workers.tasks.dataset import MixedDataset, errors_of, open_dataset, open_no_dataset
from streamrl_workers.tasks.protocol import (
    COMMAND,
    KILL,
    SPAWN,
    SPAWN_AGENT_HOST,
    SPAWN_ENDPOINT_CLIENT,
    SPAWN_ITEM_READER,
)
from streamrl_workers.tasks.worker import TaskSources, ask_endpoints, serve

if TYPE_CHECKING:
    from streamrl_workers.agents.session import AgentSource


def main() -> None:
    """Be the fork server until the pool is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    adopt_orphans()
    os.dup2(2, 1)
    if umask := os.environ.get(ENV_UMASK):
        os.umask(int(umask, 8))
    config = framing.receive(control)
    if config is None:
        return
    # Imports of user code may hang in C; this ends the process even then.
    faulthandler.dump_traceback_later(config["start_timeout_s"], exit=True)
    try:
        sources = _open(config)
    except UserError as error:
        control.sendall(framing.encode({"user_error": error.parts}))
        kill_children()
        return
    faulthandler.cancel_dump_traceback_later()
    fingerprint = sources.dataset.data | {"spec.seed": str(config["seed"])}
    ready = {"held_out_size": sources.dataset.held_out_size, "fingerprint": fingerprint}
    control.sendall(framing.encode({"ready": ready}))
    Forks(control, sources, memory_limit_bytes=config["memory_limit_bytes"]).run()
    os._exit(0)  # taking down the user's modules can take long, and their exit handlers belong to nobody


def _open(config: dict[str, Any]) -> TaskSources:
    task = Task.model_validate_json(config["task"])
    base_dir = Path(config["base_dir"])
    if config["only_agents"]:
        dataset = open_no_dataset(task, model_path=config["model_path"])
        return TaskSources(dataset=dataset, parts=(), agents=_open_agents(config, task, dataset))
    dataset = open_dataset(
        task,
        seed=config["seed"],
        base_dir=base_dir,
        model_path=config["model_path"],
        supervised=_supervised(config),
    )
    parts, environments = [], []
    for one, questions in zip(task.tasks, dataset.tasks, strict=True):
        with errors_of(one):
            parts.append(make_parts(one.rewards, verify=questions.verify, base_dir=base_dir))
            environments.append(open_environment(one.environment, seed=config["seed"], base_dir=base_dir))
    apart = task.agent is None or task.agent.pool is not None
    agents = None if apart else _open_agents(config, task, dataset)
    return TaskSources(dataset=dataset, parts=parts, environments=environments, agents=agents)


def _supervised(config: dict[str, Any]) -> SupervisedSpec | None:
    return None if config["supervised"] is None else SupervisedSpec.model_validate_json(config["supervised"])


def _open_agents(config: dict[str, Any], task: Task, dataset: MixedDataset) -> "AgentSource | None":
    from streamrl_workers.agents.host import open_agents
    from streamrl_workers.agents.transcript import PlainTemplate

    template, base_dir = dataset.only.chat or PlainTemplate(), Path(config["base_dir"])
    return open_agents(task.agent, seed=config["seed"], base_dir=base_dir, template=template, stops=task.sampling.stop)


Serve = Callable[[socket.socket, TaskSources], int]


def _serve_agents(connection: socket.socket, sources: TaskSources) -> int:
    from streamrl_workers.tasks.agent_host import serve_agents

    return serve_agents(connection, sources)


def _read_items(connection: socket.socket, sources: TaskSources) -> int:
    from streamrl_workers.tasks.agent_host import read_items

    return read_items(connection, sources)


SERVING: dict[bytes, Serve] = {
    SPAWN: serve,
    SPAWN_ENDPOINT_CLIENT: ask_endpoints,
    SPAWN_AGENT_HOST: _serve_agents,
    SPAWN_ITEM_READER: _read_items,
}
"""What a fork is started for."""


class Forks:
    """Forks workers on command and tells the pool when one has ended."""

    def __init__(self, control: socket.socket, sources: TaskSources, *, memory_limit_bytes: int) -> None:
        self._control = control
        self._sources = sources
        self._memory_limit_bytes = memory_limit_bytes
        self._number_of_pid: dict[int, int] = {}
        self._helpers = children()  # that the user's modules started at their import: they serve all workers
        self._heartbeat_file = os.environ.get(ENV_HEARTBEAT_FILE)
        """Touched by the loop: a thread does not go with forks."""
        self._ends, wake = socket.socketpair()
        self._ends.setblocking(False)  # noqa: FBT003 - positional in the standard library
        wake.setblocking(False)  # noqa: FBT003
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve the pool until it is gone, then end all workers and whatever else was started."""
        with contextlib.suppress(ConnectionError):
            while self._serve_once():
                pass
        for pid in self._number_of_pid:
            os.kill(pid, signal.SIGKILL)
        for pid in self._number_of_pid:
            os.waitpid(pid, 0)
            kill_orphans(pid, but=self._number_of_pid)
        kill_children()

    def _serve_once(self) -> bool:
        ready, _, _ = select.select([self._control, self._ends], [], [], INTERVAL_S)
        if self._heartbeat_file:
            touch(self._heartbeat_file)
        if self._ends in ready:
            self._ends.recv(4096)
            self._report_ends()
        return self._control not in ready or self._obey()

    def _obey(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if len(data) != COMMAND.size:
            return False
        command, number = COMMAND.unpack(data)
        if command == KILL:
            for pid in [pid for pid, other in self._number_of_pid.items() if other == number]:
                os.kill(pid, signal.SIGKILL)
        else:
            self._spawn(number, fds[0], serving=SERVING[command])
        return True

    def _spawn(self, number: int, fd: int, *, serving: Serve) -> None:
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_worker(fd, serving=serving, server_pid=server_pid)
        os.close(fd)
        self._number_of_pid[pid] = number

    def _be_worker(self, fd: int, *, serving: Serve, server_pid: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._control, self._ends, self._wake):
                inherited.close()
            isolate(parent_pid=server_pid, memory_limit_bytes=self._memory_limit_bytes)
            connection = socket.socket(fileno=fd)
            connection.sendall(framing.encode({"pid": os.getpid()}))
            status = serving(connection, self._sources)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _report_ends(self) -> None:
        while self._number_of_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._helpers.discard(pid)
            number = self._number_of_pid.pop(pid, None)
            if number is not None:
                kill_orphans(pid, but=self._number_of_pid.keys() | self._helpers)
                code = os.waitstatus_to_exitcode(status)
                self._control.sendall(framing.encode({"exited": number, "code": code}))


def isolate(*, parent_pid: int, memory_limit_bytes: int) -> None:
    """Make this fork a session of its own that ends with its parent, and let its memory grow by the limit at most."""
    os.setsid()
    adopt_orphans()
    die_with(parent_pid)
    _limit_memory(memory_limit_bytes)


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
