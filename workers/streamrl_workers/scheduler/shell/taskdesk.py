"""Between the core and the task pool: asks for prompts, has turns answered and completions scored, hands the answers back.

Owns the requests that wait for the pool and the loops that carry them. Does not own the pool's processes.

Prompt loop: consumes requests for prompts; produces prompts for the core; waits for the pool.
Turn loops: consume turns of the model; produce the environment's answers; wait for the pool, whose time limits bound them.
Score loops: consume completions; produce scores; wait for the pool, whose time limits bound them.
They are unblocked by `need_prompts`, `play` and `score`. The core bounds what it asks for by its buffers.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from streamrl_workers.scheduler.effects import NeedPrompts, PlayTurn, Prompt, Score, ScoreSample, Split, TurnAnswer

_R = TypeVar("_R")

SCORE_LOOPS = 8
"""Batches of completions that are with the pool at once: one slow completion holds up its own batch only."""
TURN_LOOPS = 64
"""The same for turns. More, since a generator's slot may wait for each: with so many a slow turn seldom holds up another."""
SCORE_BATCH = 64
"""Most completions in one batch."""
MOST_PROMPT_NEEDS = 2**20
"""Requests for prompts that wait, three numbers each; after a restart there is one for each gap between scored groups."""
_PROMPTS_TIMEOUT_S = 300.0
"""For one request for prompts; a user's format function may be slow, but not so slow."""


class TaskSource(Protocol):
    """What the desk needs of the task pool."""

    async def prompts(self, *, split: Split, first_index: int, count: int) -> Sequence[Prompt]:
        """Make prompts."""

    async def score(self, requests: Sequence[ScoreSample]) -> Sequence[Score]:
        """Score completions."""

    async def play(self, requests: Sequence[PlayTurn]) -> Sequence[TurnAnswer]:
        """Have the environment answer turns."""


class TaskDesk:
    """The core's requests to the task pool."""

    def __init__(
        self,
        pool: TaskSource,
        *,
        on_prompts: Callable[[Sequence[Prompt]], None],
        on_scores: Callable[[Sequence[Score]], None],
        on_turns: Callable[[Sequence[TurnAnswer]], None],
    ) -> None:
        self._pool = pool
        self._on_prompts = on_prompts
        self._on_scores = on_scores
        self._on_turns = on_turns
        self._prompt_needs: asyncio.Queue[NeedPrompts] = asyncio.Queue(MOST_PROMPT_NEEDS)
        self._unscored: deque[ScoreSample] = deque()
        self._work = asyncio.Semaphore(0)
        self._unanswered: deque[PlayTurn] = deque()
        self._turns = asyncio.Semaphore(0)

    def need_prompts(self, need: NeedPrompts) -> None:
        """Queue a request for prompts."""
        self._prompt_needs.put_nowait(need)

    def score(self, sample: ScoreSample) -> None:
        """Queue a completion."""
        self._unscored.append(sample)
        self._work.release()

    def play(self, turn: PlayTurn) -> None:
        """Queue a turn."""
        self._unanswered.append(turn)
        self._turns.release()

    @property
    def waiting(self) -> int:
        """Completions and turns that wait for the pool."""
        return len(self._unscored) + len(self._unanswered)

    async def run_prompts(self) -> None:
        """The prompt loop."""
        while True:
            need = await self._prompt_needs.get()
            self._on_prompts(await self._ask(need))

    async def _ask(self, need: NeedPrompts) -> Sequence[Prompt]:
        try:
            async with asyncio.timeout(_PROMPTS_TIMEOUT_S):
                return await self._pool.prompts(split=need.split, first_index=need.first_index, count=need.count)
        except TimeoutError:
            raise TaskTimeoutError(
                f"the task pool did not make {need.count} prompts within {_PROMPTS_TIMEOUT_S:g} s"
            ) from None

    async def run_scores(self) -> None:
        """One score loop."""
        while True:
            await self._work.acquire()
            if batch := _share(self._unscored, loops=SCORE_LOOPS):
                self._on_scores(await self._pool.score(batch))

    async def run_turns(self) -> None:
        """One turn loop."""
        while True:
            await self._turns.acquire()
            if batch := _share(self._unanswered, loops=TURN_LOOPS):
                self._on_turns(await self._pool.play(batch))


def _share(waiting: deque[_R], *, loops: int) -> list[_R]:
    """A fair share of what waits; wake-ups of requests that another loop took find nothing."""
    share = max(1, min(SCORE_BATCH, len(waiting) // loops))
    return [waiting.popleft() for _ in range(min(share, len(waiting)))]


class TaskTimeoutError(TimeoutError):
    """The task pool did not answer; the text says what was awaited."""
