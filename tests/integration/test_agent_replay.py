"""Programs that are started again, or cannot be: turns are played again, and what cannot be costs its own samples."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from streamrl.errors import UserError
from streamrl_workers.agents.program import RESERVED_FILES
from support.agent_pools import CLIENT, GAME, SEVERAL_TURNS, Sample, agents, begun, hosts
from support.runs import wait_for
from support.task_pools import fork_servers, running_pool, wait_ended


@pytest.mark.parametrize("victim", ["host", "programs", "fork server"])
async def test_what_is_killed_is_played_again(tmp_path: Path, victim: str) -> None:
    async with agents(tmp_path, SEVERAL_TURNS) as pool:
        samples = [await begun(pool, index=index) for index in range(3)]
        firsts = await asyncio.gather(*(sample.say("one") for sample in samples))
        (host,) = hosts()
        programs = host.children()
        doomed = {"host": [host], "programs": programs, "fork server": fork_servers()}[victim]
        for process in doomed:
            process.kill()
        await wait_ended([*doomed, *programs])
        seconds = await asyncio.gather(*(sample.say("two") for sample in samples))
        lasts = await asyncio.gather(*(sample.say("three") for sample in samples))
        told = [(answer.observation, answer.reward, answer.error) for answer in (*firsts, *seconds, *lasts)]
        assert told == [("0:one", 0.75, "")] * 3 + [("1:two", 0.75, "")] * 3 + [("", 0.75, "")] * 3


async def test_killed_while_it_works_it_is_played_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waits = f"""
import os, time
ask()
if not os.path.exists({str(gate)!r}):
    open({str(gate)!r}, "w").write(str(os.getppid()))
    time.sleep(1000)
earn(1)
"""
    async with agents(tmp_path, waits) as pool:
        sample = await begun(pool)
        answer = asyncio.create_task(sample.say("x"))
        await asyncio.to_thread(wait_for, lambda: gate.exists() and gate.read_text(), what="the program at work")
        os.kill(int(gate.read_text()), signal.SIGKILL)
        assert (await answer).reward == 1.0


async def test_few_places_for_many_samples(tmp_path: Path) -> None:
    """Each program that waits for the model may be ended and played again; none is lost, and never are there more."""
    async with agents(tmp_path, SEVERAL_TURNS, sessions=2) as pool:
        prompts = [await begun(pool, index=index) for index in range(3)]
        samples = [Sample(pool, one.prompt, index=one.index, sample=number) for one in prompts for number in range(2)]
        for text, reward in (("one", 0.75), ("two", 0.75), ("three", 0.75)):
            answers = await asyncio.gather(*(sample.say(text) for sample in samples))
            assert {(answer.reward, answer.error) for answer in answers} == {(reward, "")}
            assert sum(len(host.children()) for host in hosts()) <= 2
        assert {answer.done for answer in answers} == {True}


async def test_a_machine_without_room_for_one_more_program_plays_fewer_at_a_time(tmp_path: Path) -> None:
    async with agents(tmp_path, SEVERAL_TURNS) as pool:
        prompt = await begun(pool)
        (host,) = hosts()
        _, hard = host.rlimit(psutil.RLIMIT_NOFILE)
        host.rlimit(psutil.RLIMIT_NOFILE, (host.num_fds() + RESERVED_FILES + 8, hard))
        samples = [Sample(pool, prompt.prompt, sample=number) for number in range(8)]
        for text in ("one", "two"):
            answers = await asyncio.gather(*(sample.say(text) for sample in samples))
            assert {(answer.reward, answer.error) for answer in answers} == {(0.75, "")}


COUNTING = """
import pathlib
from streamrl_workers.tasks.dataset import TaskDataset

made, question = pathlib.Path(__file__).parent / "made", TaskDataset.question

def counted(self, split, index):
    with made.open("a") as file:
        file.write(f"{index}\\n")
    return question(self, split, index)

TaskDataset.question = counted

def nothing(**_):
    return 0.0
"""


async def test_an_item_is_made_once_for_all_turns_of_its_samples(tmp_path: Path) -> None:
    modules = {"agent": CLIENT + SEVERAL_TURNS, "counting": COUNTING}
    none = {"name": "none", "weightPercent": 50, "python": {"function": "counting:nothing"}}
    rewards, agent = [GAME | {"weightPercent": 50}, none], {"command": ["python", "agent.py"]}
    async with running_pool(tmp_path, modules=modules, rewards=rewards, agent=agent) as pool:
        prompt = await begun(pool)
        for number in range(2):
            sample = Sample(pool, prompt.prompt, sample=number)
            assert {(await sample.say(text)).error for text in ("one", "two", "three")} == {""}
    assert (tmp_path / "made").read_text() == "0\n"


CLOCK = """
import time
messages[0]["content"] += WHERE == "prompt" and str(time.time()) or ""
messages.append(ask().choices[0].message)
messages.append({"role": "user", "content": WHERE == "turn" and str(time.time()) or "go on"})
ask()
"""


@pytest.mark.parametrize(
    ("where", "text"), [("prompt", "first request differs"), ("turn", "at turn 1 of 2 it went on otherwise")]
)
async def test_a_program_that_asks_otherwise_when_it_is_started_again_fails(
    tmp_path: Path, where: str, text: str
) -> None:
    async with agents(tmp_path, f"WHERE = {where!r}\n{CLOCK}") as pool:
        sample = await begun(pool, sample=0)
        assert not (await sample.say("x")).error
        (host,) = hosts()
        host.kill()
        answer = await sample.say("y")
        assert (answer.kind, text in answer.error) == ("bad_value", True), answer


async def test_an_item_whose_program_asks_nothing_costs_its_own_samples(tmp_path: Path) -> None:
    program = "if int(item['answer']) % 2: raise SystemExit('never')\nask()\n"
    async with agents(tmp_path, program) as pool:
        prompts = [await begun(pool, index=index) for index in range(6)]
        answers = await asyncio.gather(*(sample.say("x") for sample in prompts))
        failed = [answer for answer in answers if answer.error]
        assert [(answer.kind, answer.error) for answer in failed] == [
            ("raised", "agent: ended with status 1: never")
        ] * len(failed)
        assert 0 < len(failed) < 6


async def test_a_prompt_whose_first_program_hangs_is_made_by_a_second(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    hangs = f"""
import os, time
if not os.path.exists({str(gate)!r}):
    open({str(gate)!r}, "w").close()
    time.sleep(1000)
ask()
"""
    async with agents(tmp_path, hangs, timeoutSeconds=15) as pool:
        sample = await begun(pool)
        answer = await sample.say("x")
        assert (answer.done, answer.error) == (True, "")


async def test_a_program_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"spec.task.agent.command: must begin with a program on the PATH"):
        async with running_pool(tmp_path, modules={}, rewards=[GAME], agent={"command": ["no-such-thing"]}):
            pass


async def test_a_program_beside_the_job_file_is_named_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\nexec python agent.py\n")
    script.chmod(0o755)
    async with agents(tmp_path, "ask()", command=["agent.sh"]) as pool:
        sample = await begun(pool)
        assert not (await sample.say("x")).error
