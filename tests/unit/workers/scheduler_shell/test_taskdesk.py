"""The desk between core and task pool."""

import asyncio
from collections.abc import Sequence

from streamrl_workers.scheduler.effects import NeedPrompts, Prompt, Split
from streamrl_workers.scheduler.shell.taskdesk import TaskDesk
from streamrl_workers.tasks.values import PromptItem, ScoreRequest, ScoreResult

GAPS = 100
DEADLINE_S = 10.0


class Pool:
    """Makes every prompt at once."""

    async def prompts(self, *, split: Split, first_index: int, count: int) -> Sequence[PromptItem]:
        return [PromptItem(split=split, index=first_index + i, text="p") for i in range(count)]

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        raise AssertionError(f"nothing is to be scored: {requests}")


async def test_all_gaps_of_a_recovery_wait_for_the_loop() -> None:
    """A recovered core asks once for each gap between scored groups, before the prompt loop has begun."""
    got: list[int] = []
    whole = asyncio.Event()

    def take(prompts: Sequence[Prompt]) -> None:
        got.extend(prompt.index for prompt in prompts)
        if len(got) == GAPS:
            whole.set()

    desk = TaskDesk(Pool(), on_prompts=take, on_scores=lambda _: None)
    for gap in range(GAPS):
        desk.need_prompts(NeedPrompts(split="train", first_index=2 * gap, count=1))
    loop = asyncio.create_task(desk.run_prompts(), name="prompt-loop")
    try:
        async with asyncio.timeout(DEADLINE_S):
            await whole.wait()
    finally:
        loop.cancel()
        await asyncio.wait({loop})
    assert got == list(range(0, 2 * GAPS, 2))
