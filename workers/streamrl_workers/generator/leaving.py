"""How a generator goes: what SIGTERM and SIGINT do to it.

    SIGTERM                        leave in peace: say so, finish what is active, end with exit code 0
    SIGTERM without a link         nothing to finish: the same, at once
    SIGINT, or a second SIGTERM    end now; the scheduler issues what is active again, from the tokens that had arrived

Owns the choice. Does not own how active samples are finished (`loop.py`, `link.py`), nor a deadline: who asked has it,
and asks a second time.
"""

import asyncio
import signal
from collections.abc import Callable


class Departure:
    """Ends the process, or has the link end it."""

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
