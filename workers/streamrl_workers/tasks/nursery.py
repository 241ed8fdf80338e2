"""The pool's side of the nursery process: starts it, asks it for workers, hears of their deaths.

Owns the process, the control socket and the task that reads it. Does not score.
Invariant: after `close` no process of the nursery is left.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl_workers.stream.model_place import ModelTimeoutError, await_model_place
from streamrl_workers.tasks import commands, framing
from streamrl_workers.tasks.progress import ProgressTable
from streamrl_workers.tasks.values import TaskPoolError

START_TIMEOUT_S = 120.0
"""Imports and one reading of the data file; a busy laptop needs 10 s for the imports."""
MODEL_TIMEOUT_S = 600.0
"""For the model's place to be written, in a pod; in a local run it is known before."""
SPAWN_TIMEOUT_S = 30.0
"""A fork takes milliseconds; this is for machines that swap."""
CLOSE_TIMEOUT_S = 5.0
STREAM_LIMIT_BYTES = 1 << 20

ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # a pool of threads per worker helps no verifier
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # five data sets of reasoning-gym iterate over sets; an item must be the same in every process
}


@dataclass(slots=True, kw_only=True)
class Connection:
    """A living worker."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sent: int = 0
    """Requests sent since the worker began."""
    exit_code: asyncio.Future[int | None]
    """Set when the nursery has seen its end; None if the nursery itself ended."""

    def drop(self) -> None:
        """Close at once; a worker that hangs would never read what is still to be sent."""
        self.writer.transport.abort()


class NurseryProcess:
    """One nursery."""

    def __init__(
        self, job: RLJob, *, base_dir: Path, progress: ProgressTable, workers: int, memory_limit_bytes: int
    ) -> None:
        self._config = {
            "task": job.spec.task.model_dump_json(by_alias=True, exclude_none=True),
            "seed": job.spec.seed,
            "base_dir": str(base_dir),
            "workers": workers,
            "progress_fd": progress.fd,
            "memory_limit_bytes": memory_limit_bytes,
            "start_timeout_s": START_TIMEOUT_S,
        }
        self._needs_model = job.spec.task.chat is not None
        self._progress_fd = progress.fd
        self._connections: dict[int, Connection] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._lost = False  # a command met a closed socket; the listener hears of the end a moment later

    @property
    def alive(self) -> bool:
        """It has started and has not ended, as far as we know."""
        return self._listener is not None and not self._listener.done() and not self._lost

    async def start(self) -> int | None:
        """Start the process and wait until it is ready. Returns the number of held-out items (None = endless)."""
        config = {**self._config, "model_path": await self._model_path()}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond; no pipe is waited for
                [sys.executable, "-m", "streamrl_workers.tasks.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._progress_fd),
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        ours.setblocking(False)  # noqa: FBT003 - positional in the standard library
        self._control = ours.dup()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT_BYTES)
        self._writer.write(framing.encode(config))
        answer = await self._first_answer(reader)
        self._listener = asyncio.create_task(self._listen(reader), name="task-pool-nursery")
        return answer["held_out_size"]  # type: ignore[no-any-return] # JSON

    async def _model_path(self) -> str:
        """Of the tokenizer whose chat template is used; "" where there is no chat."""
        if not self._needs_model:
            return ""
        try:
            return await await_model_place(os.environ, timeout_s=MODEL_TIMEOUT_S) or ""
        except ModelTimeoutError as error:
            raise TaskPoolError(str(error)) from None

    async def _first_answer(self, reader: asyncio.StreamReader) -> Any:  # noqa: ANN401 - JSON
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await framing.read(reader)
        except TimeoutError:
            raise TaskPoolError(
                f"the task processes did not open the data set and the rewards within {START_TIMEOUT_S:g} s"
            ) from None
        if answer is None:
            raise TaskPoolError(
                f"the task process ended{await self._how_it_ended()} while it opened the data set and rewards"
            )
        if "user_error" in answer:
            raise UserError(**answer["user_error"])
        return answer["ready"]

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f" with status {await asyncio.to_thread(self._process.wait, CLOSE_TIMEOUT_S)}"
        return ""

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Consumes `exited` notices; produces ends of connections; waits for the nursery; ends with it."""
        while (notice := await framing.read(reader)) is not None:
            self._end(notice["exited"], exit_code=notice["code"])
        for worker in list(self._connections):
            self._end(worker, exit_code=None)

    def _end(self, worker: int, *, exit_code: int | None) -> None:
        connection = self._connections.pop(worker, None)
        if connection is None:
            return
        if not connection.exit_code.done():
            connection.exit_code.set_result(exit_code)
        # A process that the user's code left behind may hold the socket open: the notice is what counts. Results that
        # wait in the socket are still read.
        with contextlib.suppress(OSError):
            connection.writer.get_extra_info("socket").shutdown(socket.SHUT_RD)

    async def spawn(self, worker: int) -> Connection:
        """A new worker. Raises `TaskPoolError` if it does not say hello."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._command(commands.SPAWN, worker, fds=[theirs.fileno()])
        ours.setblocking(False)  # noqa: FBT003 - positional in the standard library
        reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT_BYTES)
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        connection = Connection(reader=reader, writer=writer, exit_code=ended)
        self._connections[worker] = connection
        try:
            async with asyncio.timeout(SPAWN_TIMEOUT_S):
                hello = await framing.read(reader)
        except TimeoutError:
            hello = None
        except asyncio.CancelledError:
            connection.drop()
            raise
        if hello is None:
            connection.drop()
            raise TaskPoolError(f"worker {worker} of the task pool did not say hello within {SPAWN_TIMEOUT_S:g} s")
        return connection

    def kill(self, worker: int) -> None:
        """SIGKILL to a worker; its connection ends."""
        with contextlib.suppress(TaskPoolError):  # a nursery that is gone has taken its workers along
            self._command(commands.KILL, worker, fds=[])

    def _command(self, command: bytes, worker: int, *, fds: list[int]) -> None:
        if self._control is None or not self.alive:
            raise TaskPoolError("the task process has ended")
        try:
            socket.send_fds(self._control, [commands.encode(command, worker)], fds)
        except OSError as error:
            self._lost = True
            raise TaskPoolError(f"the task process cannot be reached: {error.strerror}") from error

    async def close(self) -> None:
        """End the nursery and its workers: politely by closing the socket, else by SIGKILL."""
        if self._writer is not None:
            self._writer.transport.abort()
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
        if self._listener is not None:
            await asyncio.wait([self._listener], timeout=CLOSE_TIMEOUT_S)
            self._listener.cancel()
        if self._process is not None:
            await asyncio.to_thread(_reap, self._process)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(CLOSE_TIMEOUT_S)
