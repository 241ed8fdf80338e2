"""Questions to a ranker that wait for it, and what a desk tells of itself.

The newest prompts are scored first: they begin last, so their scores come in time even where the ranker cannot keep up. Bounded: of prompts and
of pairs the oldest go.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from streamrl_workers.ranker.protocol import ProcessNumbers
from streamrl_workers.scheduler.effects import AskRanker

MOST_PROMPTS = 16_384
"""Twice what is looked ahead to at most; who adds them has cut their texts."""
MOST_PAIRS = 4096

RankerState = Literal["none", "starting", "ready", "down", "given_up"]
STATES: tuple[RankerState, ...] = ("none", "starting", "ready", "down", "given_up")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankerNumbers:
    """Of one scheduler's life."""

    state: RankerState = "none"
    waiting: int = 0
    """Prompts that are not scored yet."""
    dropped: int = 0
    """Prompts that waited so long that newer ones took their place."""
    scored: int = 0
    deaths: int = 0
    """Ends of its process that nobody asked for."""
    process: ProcessNumbers = field(default_factory=ProcessNumbers)


class Questions:
    """What waits."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[int, str]] = deque()
        self._pairs: deque[tuple[str, float]] = deque(maxlen=MOST_PAIRS)
        self._is_there = asyncio.Event()
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """Prompts."""
        return len(self._prompts)

    def add(self, question: AskRanker) -> None:
        """More."""
        self._prompts.extend(question.prompts)
        while len(self._prompts) > MOST_PROMPTS:
            self._prompts.popleft()
            self.dropped += 1
        self._pairs.extend(question.pairs)
        self._is_there.set()

    async def wait(self) -> None:
        """Until there is a question."""
        await self._is_there.wait()

    def prompts(self, most: int) -> list[tuple[int, str]]:
        """The newest."""
        taken = [self._prompts.pop() for _ in range(min(most, len(self._prompts)))]
        self._note()
        return taken

    def pairs(self, most: int) -> list[tuple[str, float]]:
        """The oldest."""
        taken = [self._pairs.popleft() for _ in range(min(most, len(self._pairs)))]
        self._note()
        return taken

    def put_back(self, prompts: Sequence[tuple[int, str]]) -> None:
        """Prompts that were taken, newest first, and got no answer."""
        self._prompts.extend(reversed(prompts))
        self._note()

    def _note(self) -> None:
        if self._prompts or self._pairs:
            self._is_there.set()
        else:
            self._is_there.clear()
