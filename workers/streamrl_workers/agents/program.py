"""Programs of the user's as processes: each in a session of its own, its output kept, its end seen, nothing of it left.

Owns the child processes of the agent host. Invariants:
- A program ends with the host, also when that is killed (the fork server kills what it leaves).
- When a program has ended, so has whatever it started: its process group, and what left that (on Linux).
- Of its output the last `TAIL_BYTES` are kept; at `OUTPUT_BYTES` it is ended.

Loop: consumes ends (SIGCHLD) and output; produces calls of `on_end`; unblocked by the event loop.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from streamrl_workers.process.orphans import die_with, kill_children

TAIL_BYTES = 4096
OUTPUT_BYTES = 16 << 20
"""A program that writes more is a loop, and reading it would hold up the others."""
_READ_BYTES = 1 << 16
MAX_LINE_CHARS = 300


class Program:
    """One process."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, on_end: Callable[[int], None]) -> None:
        self._process = process
        self._on_end = on_end
        assert process.stdout is not None
        self._output = process.stdout
        self._tail = b""
        self._written = 0
        self.killed = False
        os.set_blocking(self._output.fileno(), False)
        asyncio.get_running_loop().add_reader(self._output.fileno(), self._read)

    @property
    def pid(self) -> int:
        """Of the process and of its group."""
        return self._process.pid

    @property
    def flooded(self) -> bool:
        """Whether it was ended because it wrote too much."""
        return self._written > OUTPUT_BYTES

    @property
    def last_line(self) -> str:
        """Of its output, what is not empty."""
        lines = self._tail.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:MAX_LINE_CHARS]

    def kill(self) -> None:
        """SIGKILL to its group."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def ended(self, code: int) -> None:
        """It has been waited for."""
        self._process.returncode = code
        self._read()
        self.kill()  # what it started in its group
        asyncio.get_running_loop().remove_reader(self._output.fileno())
        self._output.close()
        self._on_end(code)

    def _read(self) -> None:
        try:
            data = os.read(self._output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._output.fileno())
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._written += len(data)
        if self.flooded:
            self.kill()


class Programs:
    """All of them."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Program] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    @property
    def running(self) -> int:
        """Programs that have not been told to end."""
        return sum(not program.killed for program in self._by_pid.values())

    def start(
        self,
        command: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        said: bytes,
        on_end: Callable[[int], None],
    ) -> Program:
        """Start one; `said` stands on its standard input. Raises `OSError` if it cannot be started."""
        with tempfile.TemporaryFile() as given:
            given.write(said)
            given.seek(0)
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=dict(environment),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                bufsize=0,
                preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - this process has one thread
            )
        program = self._by_pid[process.pid] = Program(process, on_end=on_end)
        return program

    def close(self) -> None:
        """End all and wait for them."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for program in self._by_pid.values():
            program.kill()
        for pid, program in list(self._by_pid.items()):
            os.waitpid(pid, 0)
            program.ended(-signal.SIGKILL)
        self._by_pid.clear()
        kill_children()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            program = self._by_pid.pop(pid, None)
            if program is not None:
                program.ended(os.waitstatus_to_exitcode(status))
                kill_children(but=self._by_pid)
