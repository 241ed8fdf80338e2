"""The task pool's processes in a container of their own: `python -m streamrl_workers.tasks.host`.

```
  scheduler's container                         this container
  pool ── connects ──▶ Unix socket of both ──▶ HOST ── starts ──▶ fork server ── forks ──▶ workers
          the connection is the fork server's control socket; the sockets of the workers come over it
```
Owns the listening socket and the living fork server. It runs no code of the user's and reads nothing from a connection. The newest connection
counts: a scheduler that was started again has lost its own, and whatever the fork server before has left is killed first.

Loop: consumes connections; produces a fork server for each, one at a time; waits for connections; ended by SIGTERM. While a fork server
runs, a task watches its heartbeat.
"""

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path

from streamrl.errors import EXIT_DONE
from streamrl.keys import ENV_TASKS_SOCKET
from streamrl.text import log_to_stderr
from streamrl_workers.process.child import start_module
from streamrl_workers.process.heartbeat import beat_from, child_environment, kill_when_frozen, start_heartbeat
from streamrl_workers.process.orphans import adopt_orphans, kill_children
from streamrl_workers.tasks.fork_server import ENVIRONMENT, FORK_SERVER

log = logging.getLogger("streamrl.tasks")


def main() -> None:
    """Serve until told to end."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_DONE))  # as a container's first process it would be deaf
    log_to_stderr()
    start_heartbeat()
    adopt_orphans()
    path = Path(os.environ[ENV_TASKS_SOCKET])
    path.unlink(missing_ok=True)  # of the container's life before
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)  # noqa: FBT003 - positional in the standard library
        asyncio.run(_serve_all(listener))


async def _serve_all(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    beat_from(loop)
    serving: asyncio.Task[None] | None = None
    while True:
        connection, _ = await loop.sock_accept(listener)
        if serving is not None:
            serving.cancel()
            await asyncio.wait([serving])
        serving = asyncio.create_task(_serve(connection), name="fork-server")


async def _serve(connection: socket.socket) -> None:
    """A fork server that has this connection, until its end; then nothing that it has started is left."""
    connection.setblocking(True)  # noqa: FBT003 - the fork server's socket is this one, and its Python takes it for one that blocks
    heartbeat = child_environment("fork-server", environ=os.environ, watched_at_once=False)
    try:
        with connection:
            process = start_module(FORK_SERVER, connection, environment={**ENVIRONMENT, **heartbeat})
    except OSError as error:  # the pool hears of the closed connection, and tries again
        log.warning("the task pool's fork server cannot be started: %s", error)
        return
    frozen = kill_when_frozen("the fork server of the user's code", environ=heartbeat, kill=process.kill)
    watch = asyncio.create_task(frozen, name="fork-server-heartbeat")
    try:
        await asyncio.to_thread(process.wait)
    finally:
        watch.cancel()
        process.kill()
        process.wait()
        kill_children()


if __name__ == "__main__":
    main()
