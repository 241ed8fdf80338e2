"""One long computation in a thread of its own, awaited from the event loop.

Unlike an executor's, the thread is a daemon: an error elsewhere ends the process even while torch computes.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def run_in_thread(function: Callable[[], _T], *, name: str) -> _T:
    """The result of `function`, or its error."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type] # without an error it is a _T

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting task
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done
