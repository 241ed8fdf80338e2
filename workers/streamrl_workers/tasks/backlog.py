"""What waits for a worker of the pool: prompts first, then turns, then completions, each call's results together. No I/O.

All turns of a sample go to one lane, where its environment lives; anything else goes to whoever is free.

Invariants: a work item ends exactly once (`finish`), and counts as outstanding until then; `room` blocks callers
while `MAX_OUTSTANDING` are.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrl_workers.tasks.values import TaskPoolError, WorkRequest

MAX_OUTSTANDING = 8192
"""Completions are held by the scheduler anyway; this bounds copies of them here."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """One prompt to make, turn to answer or completion to score. Mutable: it counts the deaths it was seen at."""

    call: "Call"
    position: int
    """Its place in the call's results."""
    request: WorkRequest
    deaths: int = 0


class Call:
    """The results of one `score`, `play` or `prompts`, in order."""

    def __init__(self, size: int) -> None:
        self.rows: list[Any] = [None] * size
        self.remaining = size
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Backlog:
    """Waiting work, bounded."""

    def __init__(self, *, lanes: int = 1) -> None:
        self._prompts: deque[Work] = deque()
        self._completions: deque[Work] = deque()
        self._turns: tuple[deque[Work], ...] = tuple(deque() for _ in range(lanes))
        self._calls: set[Call] = set()
        self._outstanding = 0
        self._changed = asyncio.Condition()
        self._closed: TaskPoolError | None = None

    async def run(self, requests: Sequence[WorkRequest]) -> list[Any]:
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

    async def _put(self, call: Call, requests: Sequence[WorkRequest], position: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._outstanding < MAX_OUTSTANDING)
            if self._closed:
                raise self._closed
            count = min(len(requests) - position, MAX_OUTSTANDING - self._outstanding)
            for at in range(position, position + count):
                self._line(requests[at]).append(Work(call=call, position=at, request=requests[at]))
            self._outstanding += count
            self._changed.notify_all()
            return count

    async def take(self, wanted: int, *, lane: int) -> list[Work]:
        """At least one and at most `wanted` items: a lane's own turns, and no more than its share of the rest."""
        turns, lanes = self._turns[lane], len(self._turns)
        async with self._changed:
            await self._changed.wait_for(lambda: self._prompts or turns or self._completions)
            anybodys = len(self._prompts) + len(self._completions)
            count = max(1, min(wanted, len(turns) + -(-anybodys // lanes)))
            return [(self._prompts or turns or self._completions).popleft() for _ in range(count)]

    def _line(self, request: WorkRequest) -> deque[Work]:
        if request.turn is not None:
            return self._turns[hash(request.turn[:2]) % len(self._turns)]
        return self._prompts if request.completion is None else self._completions

    def put_back(self, works: Sequence[Work]) -> None:
        """What a worker that ended had not done; it goes first."""
        for work in reversed(works):
            self._line(work.request).appendleft(work)

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
