"""Virtual time: events to come, in order."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Act = Callable[[Any], None]
_Entry = tuple[float, int, Act, Any, bool]


class VirtualClock:
    """Events to come."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        """Events that have happened."""
        self.coming = 0
        """Events to come that are not in the background."""
        self._heap: list[_Entry] = []
        self._serial = 0

    def at(self, at_s: float, act: Act, what: Any = None, *, background: bool = False) -> None:  # noqa: ANN401 - the act's own
        """`act(what)` happens at `at_s`, or now if that is past."""
        self._serial += 1
        if not background:
            self.coming += 1
        heappush(self._heap, (max(at_s, self.now_s), self._serial, act, what, background))

    def after(self, delay_s: float, act: Act, what: Any = None, *, background: bool = False) -> None:  # noqa: ANN401 - as above
        """The same so many seconds from now."""
        self.at(self.now_s + delay_s, act, what, background=background)

    @property
    def next_s(self) -> float:
        """When the next event happens."""
        return self._heap[0][0]

    def step(self) -> None:
        """The next event happens."""
        self.now_s, _, act, what, background = heappop(self._heap)
        self.events += 1
        if not background:
            self.coming -= 1
        act(what)
