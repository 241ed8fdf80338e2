"""Which job is due, and when. Pure but for the clock: many changes make one reconcile, and a job that fails waits longer each time.

Invariant: a job is with one worker at a time. The queue is bounded by the number of jobs that there are.
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from streamrl_operator.kube.cache import Key, pause_s

SETTLE_S = 0.1
"""A change is looked at so long after it: changes come in bursts, and one reconcile serves them all."""
LONGEST_S = 60.0
"""Between two reconciles of a job that fails."""
BURST, REFILL_S = 40.0, 2.0
"""So many reconciles of one job may follow each other at once, and one more each `REFILL_S`: whatever fights with us over an object, or
changes without end, does not make us hot. What the job's owner asks for has a budget of its own, so that a fight delays no wish."""


@dataclass(slots=True)
class WorkQueue:
    """Jobs that wait to be looked at. `clock`: monotonic seconds."""

    clock: Callable[[], float]
    _due: dict[Key, float] = field(default_factory=dict)
    _calendar: list[tuple[float, Key]] = field(default_factory=list)
    """Entries that `_due` no longer agrees with are skipped."""
    _working: dict[Key, float | None] = field(default_factory=dict)
    """Job in work -> when it became due again meanwhile."""
    _changed: set[Key] = field(default_factory=set)
    """Jobs of which something has changed since the latest reconcile began."""
    _changed_before: set[Key] = field(default_factory=set)
    """Jobs in work of which something had changed before."""
    _failures: dict[Key, int] = field(default_factory=dict)
    _budgets: dict[tuple[Key, bool], tuple[float, float]] = field(default_factory=dict)
    """Job, and whether its owner asks -> (reconciles left, when that was)."""
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: Key, is_asked: bool = False) -> None:  # noqa: FBT001, FBT002 - as a store calls it
        """Something of the job has changed. A job that fails keeps its pause, unless its owner asks for something else.

        A change during the reconcile after such a pause counts: that reconcile may be the one that succeeds, and was too early to see it.
        """
        self._changed.add(key)
        if is_asked or key in self._working or not self._failures.get(key):
            self.add_after(key, SETTLE_S + max(0.0, 1.0 - self._budget_left(key, is_asked=is_asked)) * REFILL_S)
        if is_asked:
            self._spend(key, is_asked=True)

    def _budget_left(self, key: Key, *, is_asked: bool) -> float:
        left, at_s = self._budgets.get((key, is_asked), (BURST, 0.0))
        return min(BURST, left + (self.clock() - at_s) / REFILL_S)

    def _spend(self, key: Key, *, is_asked: bool) -> None:
        self._budgets[key, is_asked] = (max(0.0, self._budget_left(key, is_asked=is_asked) - 1.0), self.clock())

    def add_after(self, key: Key, seconds: float) -> None:
        """Look at it so long from now, or earlier if that is planned already."""
        at_s = self.clock() + seconds
        if key in self._working:
            planned = self._working[key]
            self._working[key] = at_s if planned is None else min(planned, at_s)
            return
        if at_s < self._due.get(key, float("inf")):
            self._due[key] = at_s
            heapq.heappush(self._calendar, (at_s, key))
            self._stirred.set()

    async def get(self) -> Key:
        """The next job that is due; it is the caller's until `done` or `failed`."""
        while True:
            now_s = self.clock()
            while self._calendar and self._due.get(self._calendar[0][1]) != self._calendar[0][0]:
                heapq.heappop(self._calendar)
            if self._calendar and self._calendar[0][0] <= now_s:
                _, key = heapq.heappop(self._calendar)
                del self._due[key]
                self._working[key] = None
                if key in self._changed:
                    self._changed.remove(key)
                    self._changed_before.add(key)
                self._spend(key, is_asked=False)
                return key
            self._stirred.clear()
            wait_s = self._calendar[0][0] - now_s if self._calendar else None
            try:
                await asyncio.wait_for(self._stirred.wait(), wait_s)
            except TimeoutError:
                continue

    def has_changed(self, key: Key) -> bool:
        """Return whether a job in work is due because of a change; else its time has come."""
        return key in self._changed_before

    def done(self, key: Key, *, requeue_after_s: float | None) -> None:
        """It was looked at."""
        self._failures.pop(key, None)
        self._finish(key, requeue_after_s)

    def failed(self, key: Key, *, asked_s: float | None = None) -> float:
        """It could not be brought about; the seconds until the next attempt."""
        self._failures[key] = self._failures.get(key, 0) + 1
        wait_s = pause_s(self._failures[key], asked_s=asked_s, longest_s=LONGEST_S)
        self._working[key] = None
        self._finish(key, wait_s)
        return wait_s

    def failures(self, key: Key) -> int:
        """How often in a row it could not be brought about."""
        return self._failures.get(key, 0)

    def _finish(self, key: Key, seconds: float | None) -> None:
        again_s = self._working.pop(key)
        self._changed_before.discard(key)
        if again_s is not None:
            self.add_after(key, max(0.0, again_s - self.clock()))
        if seconds is not None:
            self.add_after(key, seconds)

    def forget(self, key: Key) -> None:
        """The job is gone."""
        for is_asked in (False, True):
            self._budgets.pop((key, is_asked), None)

    def depth(self) -> int:
        """Jobs that are due and wait for a worker."""
        now_s = self.clock()
        return sum(at_s <= now_s for at_s in self._due.values())
