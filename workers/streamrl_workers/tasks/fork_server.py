"""The pool's side of the fork server (`fork_server_process.py`): starts it, asks it for workers, hears of their ends.

It is our child, or that of a host in a container of its own (`host.py`), which starts one for each connection.
Owns the process, the control socket and the task that reads it. Does not score.
Invariants: after `close` no process of the fork server is left. What it says is checked: user code can speak in its place.
"""

import asyncio
import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from streamrl.spec import RLJob
from streamrl.text import say
from streamrl_workers.process import framing
from streamrl_workers.process.child import CLOSE_TIMEOUT_S, ChildProcess
from streamrl_workers.process.framing import ForeignBytesError, Frames
from streamrl_workers.stream.run_folder import ModelTimeoutError, await_model_path
from streamrl_workers.tasks.protocol import COMMAND, KILL, check_exit, opened_data
from streamrl_workers.tasks.values import OpenedData, TaskPoolError

FORK_SERVER = "streamrl_workers.tasks.fork_server_process"
CONNECT_TIMEOUT_S = 120.0
"""For a host that is starting, or is started again after its end."""
_CONNECT_AGAIN_S = 0.2
START_TIMEOUT_S = 600.0
"""Imports, and one reading of all data files for their hashes: 60 GB from a disk of 100 MB/s. A busy laptop needs 10 s for the imports."""
MODEL_TIMEOUT_S = 600.0
"""For the model's place to be written, in a pod; in a local run it is known before."""
SPAWN_TIMEOUT_S = 30.0
"""A fork takes milliseconds; this is for machines that swap."""
STREAM_LIMIT_BYTES = 1 << 20
OUTPUT_BYTES = 16 << 20
"""What the processes print is kept up to here, or a talkative reward would fill the disk with its log."""
MARK = "tasks: "
"""Begin of each line that the processes print."""

ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # a pool of threads per worker helps no verifier
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # five data sets of reasoning-gym iterate over sets; an item must be the same in every process
}


@dataclass(slots=True, kw_only=True)
class Connection:
    """A living worker."""

    number: int
    """Of the process, counted by the fork server's handle: a slot has many processes in its life."""
    frames: Frames
    transport: asyncio.Transport
    exit_code: asyncio.Future[int | None]
    """Set when the fork server has seen its end; None if the fork server itself ended."""

    def drop(self) -> None:
        """Close at once; a worker that hangs would never read what is still to be sent."""
        self.transport.abort()


class HostedProcess:
    """A fork server that a host has started for us: there is nothing but its socket."""

    def __init__(self, transport: asyncio.Transport, frames: Frames) -> None:
        self.transport, self.frames = transport, frames

    @classmethod
    async def connect(cls, path: Path) -> "HostedProcess":
        """By the host that listens there. Raises `TaskPoolError` if none does in time."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await _connected(path)
        except TimeoutError:
            raise TaskPoolError(
                f"nobody listens for the task pool at {path} for {CONNECT_TIMEOUT_S:g} s; is the container tasks running?"
            ) from None
        return cls(*await framing.open_frames(connection))

    def send(self, frame: object) -> None:
        """Write a frame; one that is gone is seen when its answer is read."""
        framing.send(self.transport, frame)

    async def how_it_ended(self) -> str:
        """Only its host knows."""
        return ""

    async def close(self) -> None:
        """It ends when its socket is closed, or its host ends it when the next one comes."""
        self.transport.abort()


async def _connected(path: Path) -> socket.socket:
    """As soon as somebody listens there."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)  # noqa: FBT003 - positional in the standard library
        with contextlib.ExitStack() as unused:
            unused.callback(connection.close)
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_connect(connection, str(path))
                unused.pop_all()
                return connection
        await asyncio.sleep(_CONNECT_AGAIN_S)


class ForkServer:
    """One fork server and its workers."""

    def __init__(
        self,
        job: RLJob,
        *,
        base_dir: Path,
        memory_limit_bytes: int,
        host: Path | None,
        only_agents: bool = False,
        model_path: str | None = None,
        output: Path | None = None,
    ) -> None:
        """What it is started with.

        Args:
            job: its task.
            base_dir: where the user's files are, as it sees them.
            memory_limit_bytes: growth of one worker's address space.
            host: the socket of who starts it; None: we do.
            only_agents: it opens neither data set nor rewards.
            model_path: of the tokenizer; None: the environment says it, as soon as it is there.
            output: file for what our child's processes print; None: our standard error.
        """
        supervised = job.spec.algorithm.supervised
        self._host = host
        self._output_file = output
        self._given_model = model_path
        self._config = {
            "task": job.spec.task.model_dump_json(by_alias=True, exclude_none=True),
            "seed": job.spec.seed,
            "base_dir": str(base_dir),
            "memory_limit_bytes": memory_limit_bytes,
            "start_timeout_s": START_TIMEOUT_S,
            "only_agents": only_agents,
            "supervised": None if supervised is None else supervised.model_dump_json(by_alias=True, exclude_none=True),
        }
        self._needs_model = job.spec.task.has_chat or supervised is not None
        self._connections: dict[int, Connection] = {}
        self._spawned = 0
        self._child: ChildProcess | HostedProcess | None = None
        self._control: socket.socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._output: asyncio.Task[None] | None = None
        self._lost = False  # a command met a closed socket; the listener hears of the end a moment later

    @property
    def alive(self) -> bool:
        """It has started and has not ended, as far as we know."""
        return self._listener is not None and not self._listener.done() and not self._lost

    async def start(self) -> OpenedData:
        """Start the process and wait until it has opened the data."""
        config = {**self._config, "model_path": await self._model_path()}
        self._child = await (self._start_child() if self._host is None else HostedProcess.connect(self._host))
        self._control = self._child.transport.get_extra_info("socket").dup()
        self._child.send(config)
        opened = await self._first_answer(self._child)
        self._listener = asyncio.create_task(self._listen(self._child.frames), name="task-pool-fork-server")
        return opened

    async def _start_child(self) -> ChildProcess:
        printed, printing = os.pipe()
        self._output = asyncio.create_task(_forward(printed, to=self._output_file), name="task-pool-output")
        with open(printing, "wb") as said:  # noqa: ASYNC230, PTH123 - a descriptor that is open
            return await ChildProcess.start(
                FORK_SERVER,
                name="task-pool",
                what="the fork server of agents" if self._config["only_agents"] else "the task pool's fork server",
                environment=ENVIRONMENT,
                stderr=said,
            )

    async def _model_path(self) -> str:
        """Of the tokenizer whose chat template is used; "" where there is no chat."""
        if not self._needs_model or self._given_model is not None:
            return self._given_model or ""
        try:
            return await await_model_path(os.environ, timeout_s=MODEL_TIMEOUT_S) or ""
        except ModelTimeoutError as error:
            raise TaskPoolError(str(error)) from None

    async def _first_answer(self, child: ChildProcess | HostedProcess) -> OpenedData:
        try:
            answer = await child.frames.read(limit_s=START_TIMEOUT_S)
            if answer is not None:
                return opened_data(answer)
        except ForeignBytesError:
            raise TaskPoolError("something else than an answer was written to the fork server's socket") from None
        except TimeoutError:
            raise TaskPoolError(
                f"the task processes did not open the data set and the rewards within {START_TIMEOUT_S:g} s"
            ) from None
        raise TaskPoolError(
            f"the task process ended{await child.how_it_ended()} while it opened the data set and rewards"
        )

    async def _listen(self, frames: Frames) -> None:
        """Consumes `exited` notices; produces ends of connections; waits for the fork server; ends with it."""
        with contextlib.suppress(ForeignBytesError):
            while (notice := await frames.read(limit_s=framing.FOREVER_S)) is not None:
                self._end(*check_exit(notice))
        for number in list(self._connections):
            self._end(number, None)

    def _end(self, number: int, exit_code: int | None) -> None:
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        if not connection.exit_code.done():
            connection.exit_code.set_result(exit_code)
        # A process that the user's code left behind may hold the socket open: the notice is what counts. Results that
        # wait in the socket are still read.
        with contextlib.suppress(OSError):
            connection.transport.get_extra_info("socket").shutdown(socket.SHUT_RD)

    async def spawn(self, kind: bytes) -> Connection:
        """A new process, by a SPAWN of `protocol.py`. Raises `TaskPoolError` if it does not say hello."""
        self._spawned += 1
        number = self._spawned
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unused:
            unused.callback(ours.close)
            self._command(kind, number, fds=[theirs.fileno()])
            unused.pop_all()
        transport, frames = await framing.open_frames(ours)
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        connection = Connection(number=number, frames=frames, transport=transport, exit_code=ended)
        self._connections[number] = connection
        try:
            hello = await frames.read(limit_s=SPAWN_TIMEOUT_S)
        except (TimeoutError, ForeignBytesError):
            hello = None
        except asyncio.CancelledError:
            connection.drop()
            raise
        if hello is None:
            connection.drop()
            raise TaskPoolError(f"a worker of the task pool did not say hello within {SPAWN_TIMEOUT_S:g} s")
        return connection

    def kill(self, connection: Connection) -> None:
        """SIGKILL to a process; its connection ends."""
        with contextlib.suppress(TaskPoolError):  # a fork server that is gone has taken its workers along
            self._command(KILL, connection.number, fds=[])

    def _command(self, command: bytes, number: int, *, fds: list[int]) -> None:
        if self._control is None or not self.alive:
            raise TaskPoolError("the fork server of the task pool has ended")
        try:
            socket.send_fds(self._control, [COMMAND.pack(command, number)], fds)
        except OSError as error:
            self._lost = True
            raise TaskPoolError(f"the fork server of the task pool cannot be reached: {error.strerror}") from error

    async def close(self) -> None:
        """End the fork server and its workers: politely by closing the socket, else by SIGKILL."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
        if self._listener is not None:
            await asyncio.wait([self._listener], timeout=CLOSE_TIMEOUT_S)
            self._listener.cancel()
        if self._child is not None:
            await self._child.close()
        if self._output is not None:
            await asyncio.wait([self._output], timeout=CLOSE_TIMEOUT_S)
            self._output.cancel()


async def _forward(printed: int, *, to: Path | None) -> None:
    """Consumes what the processes print; produces marked lines in a file or on our standard error, up to the bound; ends with the last process."""
    reader = asyncio.StreamReader(limit=STREAM_LIMIT_BYTES)
    with contextlib.ExitStack() as opened:
        pipe = opened.enter_context(open(printed, "rb"))  # noqa: ASYNC230 - a descriptor that is open
        log = sys.stderr
        with contextlib.suppress(OSError):  # no file is no reason to leave the pipe unread
            log = sys.stderr if to is None else opened.enter_context(to.open("a", encoding="utf-8"))
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            printed_bytes, rest = 0, b""
            while data := await reader.read(STREAM_LIMIT_BYTES):
                whole, _, rest = (rest + data[: max(0, OUTPUT_BYTES - printed_bytes)]).rpartition(b"\n")
                if len(rest) > STREAM_LIMIT_BYTES:
                    whole, rest = whole + b"\n" + rest, b""
                _say_marked(whole, to=log)
                if printed_bytes <= OUTPUT_BYTES < printed_bytes + len(data):
                    _say_marked(rest + b"\nstreamrl: more output of the task processes is left out", to=log)
                    rest = b""
                printed_bytes += len(data)
            _say_marked(rest, to=log)
        finally:
            transport.close()


def _say_marked(data: bytes, *, to: TextIO) -> None:
    """Write what the task processes have printed. Without room on the disk it is lost: processes whose output is not read would hang."""
    with contextlib.suppress(OSError):
        say(*(f"{MARK}{line}" for line in data.decode("utf-8", "replace").splitlines()), to=to)
