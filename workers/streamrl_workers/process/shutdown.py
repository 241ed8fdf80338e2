"""How a worker process ends: its parent dies, somebody asks with SIGTERM, or the run is over.

    parent watch        a pipe whose other end the parent holds: when it closes, this process ends at once
    serve until told    in a pod an ended process stays and shows its status, since one that exits is started again
    graceful shutdown   a generator's: SIGTERM finishes what is active, then exits 0 (at once where there is no link);
                        SIGINT or a second SIGTERM ends now: the scheduler issues what is active again

Does not own what is finished at the end (callers pass it), nor a deadline: who asked has it, and asks a second time.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import EXIT_DONE, EXIT_RETRY, UserError
from streamrl.keys import ENV_PARENT_WATCH_FD
from streamrl_workers.metrics.signals import Signals, SignalsServer
from streamrl_workers.process.heartbeat import beat_from
from streamrl_workers.stream.run_folder import write_endpoint


def watch_parent(environ: Mapping[str, str]) -> None:
    """End this process at once when the parent is gone, without any clean-up: what matters is already on disk.

    In a thread, so that it also works while the main thread is deep inside a computation. Nothing where there is no lifeline.
    """
    text = environ.get(ENV_PARENT_WATCH_FD)
    if not text:
        return
    if not text.isdigit():
        raise UserError(field=ENV_PARENT_WATCH_FD, rule="must be a file descriptor", got=text)
    threading.Thread(target=_end_with, args=(int(text),), name="parent-watch", daemon=True).start()


def _end_with(handle: int) -> None:
    while os.read(handle, 1):
        pass
    os._exit(EXIT_RETRY)


def on_terminate(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call `callback` on `loop` at SIGTERM; SIGINT is left to the parent, which shares our terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop.add_signal_handler(signal.SIGTERM, callback)


async def serve_until_told(*, run_dir: Path, process: str, host: str, port: int, status: Mapping[str, Any]) -> None:
    """Be healthy and show `status` on the signals port (0 = any) until SIGTERM; no deadline: who runs the pods ends them.

    Raises:
        UserError: the port is in use.
    """
    asked = asyncio.Event()
    on_terminate(asyncio.get_running_loop(), asked.set)
    signals = SignalsServer(Signals(metrics=lambda: b"", status=lambda: status))
    bound = await signals.start(host=host, port=port)
    try:
        write_endpoint(run_dir, process=process, signals=f"{host}:{bound}")
        await asked.wait()
    finally:
        await signals.close()


class GracefulShutdown:
    """Ends a generator's process, or has its link end it."""

    def __init__(self, *, leave: Callable[[], bool]) -> None:
        """`leave` begins to leave in peace; False where there is nothing to finish."""
        self._leave = leave
        self.was_asked = False
        """Somebody wants this process to end."""
        self._now = asyncio.Event()
        self.cut_short = False
        """Active samples were not finished."""

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take both signals from now on."""
        loop.add_signal_handler(signal.SIGTERM, self.asked)
        loop.add_signal_handler(signal.SIGINT, self.cut)

    def asked(self) -> None:
        """SIGTERM."""
        if self.was_asked:
            self.cut()
            return
        self.was_asked = True
        if not self._leave():
            self._now.set()

    def cut(self) -> None:
        """SIGINT."""
        self.was_asked = self.cut_short = True
        self._now.set()

    async def wait(self) -> None:
        """Until the process is to end without its link (no deadline: a generator that nobody asks stays)."""
        await self._now.wait()


async def first_of(**parts: Coroutine[Any, Any, Any]) -> None:
    """Run all until the first ends, maybe with an error, which is raised. The others are cancelled and awaited."""
    tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def live(
    work: Awaitable[GracefulShutdown], *, stays: bool, run_dir: Path, process: str, host: str, port: int
) -> int:
    """The work of a process that may be asked to leave; then, if it `stays` (in a pod) and nobody asked, its page. The exit code."""
    beat_from(asyncio.get_running_loop())
    shutdown = await work
    if not shutdown.was_asked and stays:
        await serve_until_told(run_dir=run_dir, process=process, host=host, port=port, status={"ended": True})
    return EXIT_RETRY if shutdown.cut_short else EXIT_DONE
