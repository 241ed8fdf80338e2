"""A helper process that answers frames on a socket pair: `python -m MODULE FD`. The task pool's fork server and the ranker are such.

Owns the process, our end of the socket, and the watch over its heartbeat. A helper runs the user's code, or a package's: it is given no secret of the run. It ends by itself when our end closes; one that does not is killed,
with what it has left in its process group. Invariant: behind `close` none of them is left. `begin_as_child` is the other end.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from streamrl.keys import SECRET_VARIABLES
from streamrl.text import log_to_stderr
from streamrl_workers.process import framing
from streamrl_workers.process.framing import Frames
from streamrl_workers.process.heartbeat import child_environment, kill_when_frozen, start_heartbeat

CLOSE_TIMEOUT_S = 5.0
_DIE_FIRST = "1000"
"""If memory runs out the kernel ends a helper rather than the process that it helps."""


def begin_as_child(*, most_bytes: int | None = None) -> socket.socket:
    """In a helper that is no more than that: its end of the socket. Standard output is standard error here: nothing gets between the frames.

    `most_bytes`: of memory that it, and each process that it starts, may write to; beyond it there is a `MemoryError`.
    """
    if most_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    control = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)
    log_to_stderr()
    start_heartbeat()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_DIE_FIRST, encoding="ascii")
    return control


def start_module(
    module: str, control: socket.socket, *, environment: Mapping[str, str], stderr: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """`python -m module` in a session of its own, with `control` as its end of the socket. `environment`: beside ours, of which secrets are left out."""
    ours = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-m", module, str(control.fileno())],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(control.fileno(),),
        env={**ours, **environment},
        start_new_session=True,
    )


class ProcessLostError(Exception):
    """The process is gone, or is as good as gone; the text says what happened."""


class ChildProcess:
    """A living one."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        *,
        transport: asyncio.Transport,
        frames: Frames,
        watch: "asyncio.Task[None]",
    ) -> None:
        self.frames = frames
        """What it says."""
        self.transport = transport
        self._process = process
        self._watch = watch

    @classmethod
    async def start(
        cls,
        module: str,
        *,
        name: str,
        what: str,
        environment: Mapping[str, str],
        stderr: IO[bytes] | None = None,
    ) -> "ChildProcess":
        """Start it. Its heart is watched from its first beat: until then its first answer has a deadline.

        Args:
            module: that it runs.
            name: of its heartbeat file.
            what: it is, for people.
            environment: beside ours.
            stderr: where it prints; None: where we do.
        """
        heartbeat = child_environment(name, environ=os.environ, watched_at_once=False)
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unused:
            unused.callback(ours.close)
            process = start_module(module, theirs, environment={**environment, **heartbeat}, stderr=stderr)
            unused.pop_all()
        try:
            transport, frames = await framing.open_frames(ours)
        except BaseException:  # cancelled in most cases: nobody else knows of it, and it has no helpers yet
            ours.close()
            process.kill()
            process.wait()
            raise
        watch = kill_when_frozen(what, environ=heartbeat, kill=process.kill)
        return cls(
            process, transport=transport, frames=frames, watch=asyncio.create_task(watch, name=f"{name}-heartbeat")
        )

    def send(self, frame: object) -> None:
        """Write a frame; one that is gone is seen when its answer is read."""
        framing.send(self.transport, frame)

    async def exchange(self, frame: Mapping[str, Any], *, limit_s: float, what: str) -> dict[str, Any]:
        """Its answer to one frame. Raises `ProcessLostError`; `what` says what it did not do in time."""
        self.send(frame)
        try:
            answer: dict[str, Any] | None = await self.frames.read(limit_s=limit_s)
        except TimeoutError:
            raise ProcessLostError(f"{what} within {limit_s:g} s") from None
        if answer is None:
            raise ProcessLostError(f"ended{await self.how_it_ended()}")
        return answer

    async def how_it_ended(self) -> str:
        """For a sentence; "" if it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._process.wait, CLOSE_TIMEOUT_S)
            return f" by signal {-code}" if code < 0 else f" with status {code}"
        return ""

    async def close(self) -> None:
        """End it: politely by closing the socket, else by SIGKILL. It has ended afterwards, also where this task is cancelled meanwhile."""
        self._watch.cancel()
        self.transport.abort()
        reaping = asyncio.create_task(asyncio.to_thread(_reap, self._process), name="reap-child")
        cancelled: asyncio.CancelledError | None = None
        while not reaping.done():
            try:
                await asyncio.wait({reaping})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        reaping.result()


def _reap(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it, or helpers that it has left: one that was killed ends none
    process.wait()  # a killed process ends, if only when it gets a core
