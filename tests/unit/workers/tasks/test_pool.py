"""What the pool's workers get, and in which order."""

import asyncio
from typing import Any

import pytest

from streamrl_workers.tasks.agent_stage import READING, ItemQueue
from streamrl_workers.tasks.pool import Backlog
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Prompt, Request, ScoreSample, TaskPoolError
from streamrl_workers.tasks.worker_slots import WorkItem

DEADLINE_S = 120.0


def prompts(first: int, count: int) -> NeedPrompts:
    return NeedPrompts(split="train", first_index=first, count=count)


def completion(number: int) -> ScoreSample:
    return ScoreSample(group_id=number, sample_index=0, split="train", prompt_index=number, completion="a")


def turn(sample: int) -> PlayTurn:
    return PlayTurn(
        group_id=1, sample_index=sample, lease=sample, split="train", prompt_index=1, completions=("a",), last_token=0
    )


async def test_turns_go_first_then_completions_then_prompts_in_order() -> None:
    backlog = Backlog()
    for request in (prompts(5, 2), completion(1), turn(0), completion(2), prompts(9, 1)):
        backlog.put(request)
    taken = []
    for _ in range(6):
        work = await backlog.take(0)
        taken.append(work.request)
        backlog.finish(work, Prompt(split="train", index=0, text="some result"))
    assert taken == [turn(0), completion(1), completion(2), prompts(5, 1), prompts(6, 1), prompts(9, 1)]
    assert len(await backlog.results()) == 6


async def test_all_gaps_of_a_recovery_are_asked_for_before_anybody_works() -> None:
    backlog = Backlog(slots=2)
    for gap in range(1000):
        backlog.put(prompts(2 * gap, 1))
    taken = [(await backlog.take(gap % 2)).request for gap in range(1000)]
    assert taken == [prompts(2 * gap, 1) for gap in range(1000)]


async def test_a_turn_wakes_its_own_slot_and_work_for_all_wakes_one() -> None:
    backlog = Backlog(slots=4)
    waiting = [asyncio.create_task(backlog.take(slot), name=f"slot {slot}") for slot in range(4)]
    await asyncio.sleep(0)
    backlog.put(turn(7))
    done, _ = await asyncio.wait(waiting, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    (first,) = done
    home = waiting.index(first)
    again = asyncio.create_task(backlog.take(home), name="again")
    backlog.put(turn(7))
    assert (await asyncio.wait_for(again, DEADLINE_S)).request == turn(7)
    rest = [task for task in waiting if task is not first]
    for number in range(3):
        backlog.put(completion(number))
    works = await asyncio.wait_for(asyncio.gather(*rest), DEADLINE_S)
    assert {work.request for work in works} == {completion(number) for number in range(3)}


async def test_no_more_completions_are_out_than_endpoints_allow() -> None:
    backlog = Backlog(slots=3, most_completions=2)
    for number in range(3):
        backlog.put(completion(number))
    one, two = await backlog.take(0), await backlog.take(1)
    third = asyncio.create_task(backlog.take(2), name="third")
    backlog.put(prompts(0, 1))
    assert (await asyncio.wait_for(third, DEADLINE_S)).request == prompts(0, 1)
    third = asyncio.create_task(backlog.take(2), name="third")
    await asyncio.sleep(0)
    assert not third.done()
    backlog.put_back(two)
    assert (await asyncio.wait_for(third, DEADLINE_S)) is two
    backlog.finish(one, Prompt(split="train", index=0, text="in place of a score"))
    assert (await asyncio.wait_for(backlog.take(0), DEADLINE_S)).request == completion(2)


async def test_the_first_error_is_what_everybody_hears() -> None:
    backlog = Backlog()
    waiting = asyncio.create_task(backlog.results(), name="results")
    await asyncio.sleep(0)
    backlog.close(TaskPoolError("first"))
    backlog.close(TaskPoolError("second"))
    for results in (waiting, backlog.results()):
        with pytest.raises(TaskPoolError, match="first"):
            await asyncio.wait_for(results, DEADLINE_S)


async def test_what_was_done_before_an_error_comes_first() -> None:
    backlog = Backlog()
    done = Prompt(split="train", index=0, text="made")
    backlog.finish(WorkItem(request=prompts(0, 1)), done)
    backlog.close(TaskPoolError("spent"))
    backlog.finish(WorkItem(request=prompts(1, 1)), Prompt(split="train", index=1, text="late"))
    assert await asyncio.wait_for(backlog.results(), DEADLINE_S) == [done]
    for _ in range(2):
        with pytest.raises(TaskPoolError, match="spent"):
            await asyncio.wait_for(backlog.results(), DEADLINE_S)


async def test_a_turn_waits_for_no_more_items_than_a_reader_has() -> None:
    asked: list[Request] = []

    class Reader:
        def ask(self, work: WorkItem, *_: Any, **__: Any) -> None:
            asked.append(work.request)

    reader: Any = Reader()
    items = ItemQueue(reader)
    for first in range(50):
        items.ask(WorkItem(request=prompts(first, 1)))
    items.ask(WorkItem(request=turn(3)))
    assert asked == [prompts(first, 1) for first in range(READING)]
    for _ in range(50):
        items.done()
    assert asked[READING] == turn(3)
    assert len(asked) == 51
