"""An event loop whose clock counts only the time in which its process ran.

A process that was stopped (SIGSTOP, a frozen container) or held up by one long callback finds every deadline overdue,
while what its peers have sent meanwhile lies unread. On this loop a stall counts as `STALL_S` at most, for all timers and
for everybody who asks `loop.time()`: what has arrived is read before anybody is judged.

Cost: under a load whose every callback takes longer than `STALL_S`, deadlines come later than they say.
"""

import asyncio
import math
import selectors
import time
from collections.abc import Callable

STALL_S = 0.25
"""Counted of a time in which nothing was read; short beside every lease and deadline."""


class AwakeClock:
    """Seconds, by spans of which each counts up to its bound."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._base_s = self._since_s = clock_s()
        self._bound_s = STALL_S

    def time(self) -> float:
        """Now. Never falls."""
        return self._base_s + min(self._clock_s() - self._since_s, self._bound_s)

    def begin_span(self, bound_s: float) -> None:
        """What follows counts up to `bound_s`."""
        self._base_s, self._since_s, self._bound_s = self.time(), self._clock_s(), bound_s


class _Selector(selectors.DefaultSelector):
    """Between two waits callbacks run; a wait that takes longer than it was asked to is a stall."""

    def __init__(self, clock: AwakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._clock.begin_span(math.inf if timeout is None else max(timeout, 0.0) + STALL_S)
        try:
            return super().select(timeout)
        finally:
            self._clock.begin_span(STALL_S)


class AwakeLoop(asyncio.SelectorEventLoop):
    """`asyncio.Runner(loop_factory=AwakeLoop)`"""

    def __init__(self) -> None:
        self._awake = AwakeClock()
        super().__init__(_Selector(self._awake))

    def time(self) -> float:
        """Seconds that the process was awake, from an arbitrary origin."""
        return self._awake.time()
