"""What waits for a worker of the pool: prompts first, then completions, each call's results together. No I/O.

Invariants: a work item ends exactly once (`finish`), and counts as outstanding until then; `room` blocks callers
while `MAX_OUTSTANDING` are.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrl_workers.tasks.values import Split, TaskPoolError

MAX_OUTSTANDING = 8192
"""Completions are held by the scheduler anyway; this bounds copies of them here."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """One prompt to make or completion to score. Mutable: it counts the deaths it was seen at."""

    call: "Call"
    position: int
    """Its place in the call's results."""
    request: tuple[Split, int, str | None]
    deaths: int = 0


class Call:
    """The results of one `score` or `prompts`, in order."""

    def __init__(self, size: int) -> None:
        self.rows: list[Any] = [None] * size
        self.remaining = size
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Backlog:
    """Waiting work, bounded."""

    def __init__(self) -> None:
        self._prompts: deque[Work] = deque()
        self._completions: deque[Work] = deque()
        self._calls: set[Call] = set()
        self._outstanding = 0
        self._changed = asyncio.Condition()
        self._closed: TaskPoolError | None = None

    def __len__(self) -> int:
        return len(self._prompts) + len(self._completions)

    async def run(self, requests: Sequence[tuple[Split, int, str | None]]) -> list[Any]:
        """Put the requests, wait for all, return their rows in order."""
        call = Call(len(requests))
        if not requests:
            return []
        self._calls.add(call)
        try:
            position = 0
            while position < len(requests):
                position += await self._put(call, requests, position)
            await call.done
        finally:
            self._calls.discard(call)
        return call.rows

    async def _put(self, call: Call, requests: Sequence[tuple[Split, int, str | None]], position: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._outstanding < MAX_OUTSTANDING)
            if self._closed:
                raise self._closed
            count = min(len(requests) - position, MAX_OUTSTANDING - self._outstanding)
            for at in range(position, position + count):
                line = self._prompts if requests[at][2] is None else self._completions
                line.append(Work(call=call, position=at, request=requests[at]))
            self._outstanding += count
            self._changed.notify_all()
            return count

    async def take(self, wanted: int, *, share: int) -> list[Work]:
        """At least one and at most `wanted` items, and no more than one `share`-th of what waits."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self) > 0)
            count = max(1, min(wanted, -(-len(self) // share)))
            return [(self._prompts or self._completions).popleft() for _ in range(count)]

    def put_back(self, works: Sequence[Work]) -> None:
        """What a worker that ended had not done; it goes first."""
        for work in reversed(works):
            (self._prompts if work.request[2] is None else self._completions).appendleft(work)

    async def finish(self, works: Sequence[Work], rows: Sequence[Any]) -> None:
        """The rows of some work."""
        for work, row in zip(works, rows, strict=True):
            call = work.call
            call.rows[work.position] = row
            call.remaining -= 1
            if call.remaining == 0 and not call.done.done():
                call.done.set_result(None)
        async with self._changed:
            self._outstanding -= len(works)
            self._changed.notify_all()

    async def close(self, error: TaskPoolError) -> None:
        """Every waiting and later call raises `error`."""
        async with self._changed:
            self._closed = self._closed or error
            self._changed.notify_all()
        for call in self._calls:
            if not call.done.done():
                call.done.set_exception(error)
                call.done.exception()  # a call that is still putting raises by itself
