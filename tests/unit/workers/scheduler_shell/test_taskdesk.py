"""The desk between core and task pool."""

import asyncio
from collections.abc import Sequence

from streamrl_workers.scheduler.effects import NeedPrompts, Split
from streamrl_workers.scheduler.shell.taskdesk import TURN_LOOPS, TaskDesk
from streamrl_workers.tasks.values import PlayTurn, Prompt, Score, ScoreSample, TurnAnswer

GAPS = 100
DEADLINE_S = 10.0


class Pool:
    """Makes every prompt at once; answers every turn at once but that of sample 0, which waits for `slow`."""

    def __init__(self) -> None:
        self.slow = asyncio.Event()

    async def play(self, requests: Sequence[PlayTurn]) -> Sequence[TurnAnswer]:
        if any(request.sample_index == 0 for request in requests):
            await self.slow.wait()
        return [
            TurnAnswer(group_id=r.group_id, sample_index=r.sample_index, lease=r.lease, observation=r.completions[-1])
            for r in requests
        ]

    async def prompts(self, *, split: Split, first_index: int, count: int) -> Sequence[Prompt]:
        return [Prompt(split=split, index=first_index + i, text="p") for i in range(count)]

    async def score(self, requests: Sequence[ScoreSample]) -> Sequence[Score]:
        raise AssertionError(f"nothing is to be scored: {requests}")


async def test_all_gaps_of_a_recovery_wait_for_the_loop() -> None:
    """A recovered core asks once for each gap between scored groups, before the prompt loop has begun."""
    got: list[int] = []
    whole = asyncio.Event()

    def take(prompts: Sequence[Prompt]) -> None:
        got.extend(prompt.index for prompt in prompts)
        if len(got) == GAPS:
            whole.set()

    desk = TaskDesk(Pool(), on_prompts=take, on_scores=lambda _: None, on_turns=lambda _: None)
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


async def test_a_slow_turn_holds_up_no_other() -> None:
    got: list[TurnAnswer] = []
    arrived = asyncio.Event()

    def take(answers: Sequence[TurnAnswer]) -> None:
        got.extend(answers)
        arrived.set()

    async def until(count: int) -> None:
        while len(got) < count:
            arrived.clear()
            await arrived.wait()

    pool = Pool()
    desk = TaskDesk(pool, on_prompts=lambda _: None, on_scores=lambda _: None, on_turns=take)
    for sample in range(TURN_LOOPS):
        desk.play(
            PlayTurn(
                group_id=1,
                sample_index=sample,
                lease=100 + sample,
                split="train",
                prompt_index=1,
                completions=("a", f"said {sample}"),
                last_token=0,
            )
        )
    assert desk.waiting == TURN_LOOPS
    loops = [asyncio.create_task(desk.run_turns(), name=f"turn-loop-{number}") for number in range(TURN_LOOPS)]
    try:
        async with asyncio.timeout(DEADLINE_S):
            await until(TURN_LOOPS - 1)
            pool.slow.set()
            await until(TURN_LOOPS)
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
    assert got[-1].sample_index == 0
    assert {(answer.lease, answer.observation) for answer in got} == {(100 + n, f"said {n}") for n in range(TURN_LOOPS)}
    assert desk.waiting == 0
