"""Calls in threads that keep nothing waiting: a caller who stops to wait does not stop them, and no process waits for them at its end.

For calls that may hang, such as those to a disk or a mount, and for those that outlive an error elsewhere. An executor's threads are joined at exit.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def begin_in_thread(call: Callable[[], _T], *, name: str) -> "Future[_T]":
    """Its result or its error, once a thread of its own has it; a RuntimeError where there is no thread. To cancel it changes nothing."""
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            done.set_exception(error)

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        done.set_exception(error)
    return done


async def run_in_thread(call: Callable[[], _T], *, name: str) -> _T:
    """The same, awaited."""
    return await asyncio.wrap_future(begin_in_thread(call, name=name))
