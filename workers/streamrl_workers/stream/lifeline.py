"""How a worker process learns that it must end: its parent died, or somebody asked it to.

Owns the lifeline (a pipe whose other end the parent holds) and the handling of SIGTERM. Does not
own what is done at the end: callers pass it.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Mapping

from streamrl.errors import EXIT_RETRY, UserError
from streamrl.keys import ENV_LIFELINE_FD


def end_now() -> None:
    """End this process at once, without any clean-up: what matters is already on disk."""
    os._exit(EXIT_RETRY)


def watch_lifeline(environ: Mapping[str, str], *, on_lost: Callable[[], None] = end_now) -> threading.Thread | None:
    """Call `on_lost` in a thread when the parent is gone; None where there is no lifeline.

    A thread, so that it also works while the main thread is deep inside a computation.
    """
    text = environ.get(ENV_LIFELINE_FD)
    if not text:
        return None
    if not text.isdigit():
        raise UserError(field=ENV_LIFELINE_FD, rule="must be a file descriptor", got=text)
    thread = threading.Thread(target=_wait_for_end, args=(int(text), on_lost), name="lifeline", daemon=True)
    thread.start()
    return thread


def _wait_for_end(handle: int, on_lost: Callable[[], None]) -> None:
    while os.read(handle, 1):
        pass
    on_lost()


def on_terminate(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call `callback` on `loop` at SIGTERM; SIGINT is left to the parent, which shares our terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop.add_signal_handler(signal.SIGTERM, callback)
