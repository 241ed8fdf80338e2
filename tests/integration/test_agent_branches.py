"""Programs that edit their history, in a real task pool: what the model reads, what is played again, what bounds them."""

import asyncio
from pathlib import Path

import pytest

from streamrl_workers.tasks.values import TurnAnswer
from support.agent_pools import agents, begun, hosts
from support.task_pools import wait_ended

BRANCHING = """
def turn(text):
    messages.append(ask().choices[0].message)
    messages.append({"role": "user", "content": text})

turn("|go on|")
turn("|sum up|")
del messages[:2]
turn("|more|")
turn("left out")
messages[:] = [{"role": "system", "content": "a second "}, {"role": "user", "content": "conversation"}]
ask()
"""
WORDS = ("one", "two", "three", "four", "five")
READ = [
    ("|go on|", False),
    ("|go on|two|sum up|", True),
    ("|more|", False),
    ("a second conversation", True),
    ("", False),
]
"""What follows each turn, and whether it begins a context."""


def read(answer: TurnAnswer) -> tuple[str, bool]:
    assert not answer.error
    return answer.observation, answer.context


async def test_what_continues_nothing_is_read_as_a_whole(tmp_path: Path) -> None:
    async with agents(tmp_path, BRANCHING) as pool:
        sample = await begun(pool)
        assert [read(await sample.say(word)) for word in WORDS] == READ


@pytest.mark.parametrize("turns", range(1, len(WORDS)))
async def test_a_branch_whose_host_is_killed_is_played_again(tmp_path: Path, turns: int) -> None:
    async with agents(tmp_path, BRANCHING) as pool:
        sample = await begun(pool)
        told = [read(await sample.say(word)) for word in WORDS[:turns]]
        (host,) = hosts()
        programs = host.children()
        host.kill()
        await wait_ended([host, *programs])
        told += [read(await sample.say(word)) for word in WORDS[turns:]]
        assert told == READ


UNSTEADY = """
import os
answer = ask().choices[0].message
first = not os.path.exists("played")
open("played", "w").close()
if first:
    messages[:] = []
else:
    messages.append(answer)
messages.append({"role": "user", "content": "next"})
messages.append(ask().choices[0].message)
ask()
"""


async def test_a_program_that_branches_once_and_goes_on_the_other_time_fails(tmp_path: Path) -> None:
    async with agents(tmp_path, UNSTEADY) as pool:
        sample = await begun(pool)
        assert read(await sample.say("x")) == ("next", True)
        (host,) = hosts()
        host.kill()
        answer = await sample.say("y")
        assert (answer.kind, "at turn 1 of 2 it went on otherwise" in answer.error) == ("bad_value", True), answer


LONG = """
from openai import BadRequestError

def ask_of(text):
    messages[:] = [{"role": "user", "content": text}]
    ask()

def refused(text, *, code, why):
    try:
        ask_of(text)
    except BadRequestError as error:
        assert error.code == code and why in str(error), error
    else:
        raise AssertionError("it was taken")

ask()
refused("x" * 201, code="context_length_exceeded", why="200 are left")
ask_of("x" * 150)
refused("x" * 51, code="context_length_exceeded", why="50 are left")
ask_of("y")
ask_of("z")
refused("z", code="max_turns", why="its 4 turns")
earn(1)
"""


async def test_contexts_have_the_bounds_of_their_sample(tmp_path: Path) -> None:
    """A refused one changes nothing; turns count in whichever context."""
    async with agents(tmp_path, LONG, maxObservationChars=50, maxTurns=4) as pool:
        sample = await begun(pool)
        assert read(await sample.say("one")) == ("x" * 150, True)
        assert read(await sample.say("two")) == ("y", True)
        assert read(await sample.say("three")) == ("z", True)
        last = await sample.say("four")
        assert (last.reward, last.observation, last.error) == (1.0, "", "")


@pytest.mark.soak
async def test_samples_that_branch_do_not_meet(tmp_path: Path) -> None:
    async with agents(tmp_path, BRANCHING, sessions=2) as pool:
        samples = [await begun(pool, index=index) for index in range(4)]
        for place, word in enumerate(WORDS):
            answers = await asyncio.gather(*(sample.say(word) for sample in samples))
            assert [read(answer) for answer in answers] == [READ[place]] * len(samples)
