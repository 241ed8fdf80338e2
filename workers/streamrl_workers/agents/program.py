"""Programs of the user's as processes: each in a session of its own, its output kept, its end seen, nothing of it left.

Owns the child processes of the agent host. Invariants:
- A program ends with the host, also when that is killed (the fork server kills what it leaves).
- When a program has ended, so has whatever it started: its process group, and what left that (on Linux).
- It cannot look into other programs, whose keys are in their environments, where the system has Landlock.
- Of its output the last `TAIL_BYTES` are kept; at `OUTPUT_BYTES` without a sample that ended well it is ended.

Loop: consumes ends (SIGCHLD) and output; produces calls of `on_end`; unblocked by the event loop.
"""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from streamrl_workers.process.landlock import enter_own_domain
from streamrl_workers.process.orphans import adopt_orphans, die_with, kill_children

TAIL_BYTES = 4096
OUTPUT_BYTES = 16 << 20
"""A program that writes more is a loop, and reading it would hold up the others."""
_READ_BYTES = 1 << 16
MAX_LINE_CHARS = 300
RESERVED_FILES = 64
"""That no start takes: a program that is there must be able to connect."""
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}


class NoRoomError(OSError):
    """The machine has no room for one more process, or this process for its pipes; later there may be."""


class Program:
    """One process."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, on_end: Callable[[int], None]) -> None:
        self._process = process
        self._on_end = on_end
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self._said = bytearray()
        self._said_all = False
        self._tail = b""
        self._written = 0
        self.killed = False
        self.deaf = False
        """It reads no more of its standard input."""
        os.set_blocking(self._input.fileno(), False)
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

    def say(self, data: bytes, *, last: bool) -> None:
        """Write to its standard input, which ends behind the `last`."""
        self._said += data
        self._said_all = last
        self._write()

    def _write(self) -> None:
        if self._input.closed:
            return
        try:
            while self._said:
                del self._said[: os.write(self._input.fileno(), self._said)]
        except BlockingIOError:
            asyncio.get_running_loop().add_writer(self._input.fileno(), self._write)
            return
        except BrokenPipeError:
            self.deaf = self._said_all = (
                True  # it does not read: its next request, its end or its time limit tells more
            )
        asyncio.get_running_loop().remove_writer(self._input.fileno())
        if self._said_all:
            self._input.close()

    def forget_output(self) -> None:
        """Count anew what it writes: what it was to do it has done."""
        self._written = 0

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
        if not self._input.closed:
            asyncio.get_running_loop().remove_writer(self._input.fileno())
            self._input.close()
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


def _bind(host_pid: int, files: tuple[int, int]) -> None:
    """In the new process: it ends with the host, and what its children leave is its own, until it ends.

    Its address space is not bounded as the host's: other runtimes than Python's reserve much more than they use.
    `files`: how many it may have open.
    """
    die_with(host_pid)
    adopt_orphans()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    enter_own_domain()


class Programs:
    """All of them."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Program] = {}
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # a system may have a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._files[1], self._files[1]))
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def start(
        self,
        command: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        on_end: Callable[[int], None],
    ) -> Program:
        """Start one. Raises `NoRoomError` if it cannot be started just now, `OSError` if it cannot at all."""
        lowest = os.dup(0)
        os.close(lowest)
        if lowest + RESERVED_FILES > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            raise NoRoomError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                bufsize=0,
                preexec_fn=partial(_bind, os.getpid(), self._files),  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise NoRoomError(error.errno, error.strerror) from error
            raise
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
