"""Agents in processes of their own: what is lost is played again, and what need not be is not."""

import asyncio
import signal
from pathlib import Path

import pytest

from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from streamrl.keys import ENV_MODEL_PATH
from streamrl_workers.tasks.values import NeedPrompts
from support.agent_links import linked
from support.agent_pools import SEVERAL_TURNS, Sample, agents, begun
from support.chat_models import TOOL_TEMPLATE, save_tokenizer
from support.runs import wait_for
from support.task_jobs import CHAIN_SUM
from support.task_pools import running_pool, wait_ended

NOTED = """
import os, pathlib
with (pathlib.Path(__file__).parent / "starts").open("a") as file:
    file.write(f"{os.getpid()}\\n")
"""
TOLD = {"one": ("0:one", False), "two": ("1:two", False), "three": ("", True)}


async def play(samples: list[Sample], text: str) -> None:
    answers = await asyncio.gather(*(sample.say(text) for sample in samples))
    assert {(one.observation, one.reward, one.done, one.error) for one in answers} == {
        (TOLD[text][0], 0.75, TOLD[text][1], "")
    }


@pytest.mark.parametrize("victim", ["link", "host", "programs"])
async def test_what_is_killed_is_played_again(tmp_path: Path, victim: str) -> None:
    async with linked(tmp_path, SEVERAL_TURNS) as links:
        samples = [await begun(links.pool, index=index) for index in range(4)]
        await play(samples, "one")
        programs = links.programs("a")
        assert programs
        assert links.programs("b"), "both play some"
        if victim == "link":
            links.processes["a"].kill()
            links.processes["a"].wait(60)
            links.start("a")
        else:
            for process in [links.host("a")] if victim == "host" else programs:
                process.kill()
        await wait_ended(programs)
        await play(samples, "two")
        await play(samples, "three")


async def test_broken_connections_cost_nothing(tmp_path: Path) -> None:
    async with linked(tmp_path, NOTED + SEVERAL_TURNS) as links:
        samples = [await begun(links.pool, index=index) for index in range(3)]
        for text in TOLD:
            await links.shut()
            playing = asyncio.create_task(play(samples, text), name="play")
            await links.open(same_life=True)
            await playing
    assert len((tmp_path / "starts").read_text().split()) == 3, "no program was started again"


async def test_a_scheduler_of_another_life_has_all_begin_anew(tmp_path: Path) -> None:
    async with linked(tmp_path, NOTED + SEVERAL_TURNS, names=("a",)) as links:
        samples = [await begun(links.pool, index=index) for index in range(2)]
        await play(samples, "one")
        programs = links.programs("a")
        await links.shut()
        await links.open()
        await wait_ended(programs)
        await play(samples, "two")
        await play(samples, "three")
    assert len((tmp_path / "starts").read_text().split()) == 4


SLOW = """
import os, time
messages.append(ask().choices[0].message)
open(GATE + str(os.getpid()), "w").close()
while not os.path.exists(GATE + "open"):
    time.sleep(0.05)
messages.append({"role": "user", "content": "go on"})
ask()
"""


async def test_a_host_that_is_told_to_end_answers_what_it_works_on_and_others_go_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate-"
    async with linked(tmp_path, f"GATE = {str(gate)!r}\n{SLOW}", names=("a",)) as links:
        sample = await begun(links.pool)
        answer = asyncio.create_task(sample.say("x"), name="first turn")
        await asyncio.to_thread(wait_for, lambda: list(tmp_path.glob("gate-[0-9]*")), what="a program at work")
        links.processes["a"].send_signal(signal.SIGTERM)
        links.start("b")
        await links.until(hosts=2)
        other = await begun(links.pool, index=1)
        assert links.programs("b"), "what is new goes to the other"
        (tmp_path / "gate-open").touch()
        first = await answer
        assert (first.observation, first.error) == ("go on", "")
        assert await links.ended("a") == EXIT_DONE
        last = await sample.say("y")
        assert (last.done, last.error) == (True, "")
        assert not (await other.say("x")).error


CHAT = """
answer = ask(tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}])
earn(float(bool(answer.choices[0].message.tool_calls)))
"""


async def test_the_chat_template_comes_from_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tokenizer(tmp_path / "model", template=TOOL_TEMPLATE)
    monkeypatch.setenv(ENV_MODEL_PATH, model)  # of the task pool; the links are not told
    async with linked(tmp_path, CHAT, names=(), chat={}, model_path=model) as links:
        socket = tmp_path / "tasks" / "socket"
        socket.parent.mkdir()
        links.start_container("agents", socket=socket)
        links.start("a", socket=socket)
        await links.until(hosts=1)
        assert {path.name for path in socket.parent.iterdir()} == {"socket"}, "programs can write here"
        sample = await begun(links.pool)
        assert sample.prompt.endswith("+1=<|im_end|>\n<|im_start|>assistant\n")
        assert '"name": "add"' in sample.prompt
        last = await sample.say('<tool_call>{"name": "add", "arguments": {}}</tool_call>')
        assert (last.reward, last.done) == (1.0, True)


async def test_a_program_that_is_not_there_ends_its_link_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="streamrl.scheduler")
    async with linked(tmp_path, SEVERAL_TURNS, names=()) as links:
        job = (links.folder / "job.json").read_text()
        (links.folder / "job.json").write_text(job.replace('["python","agent.py"]', '["no-such-program"]'))
        links.start("a")
        assert await links.ended("a") == EXIT_USER_ERROR
        assert "spec.task.agent.command: must begin with a program on the PATH" in links.logs()
    assert not any("has joined" in line for line in caplog.messages), "nothing is asked of a host that is not up"


CRASHING = """
import os
from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

def crash(self, index):
    os._exit(9)

def value(*, prompt, completion, answer, metadata):
    return 0.0

ChainSumDataset.__getitem__ = crash
"""


async def test_an_item_whose_reading_ends_its_reader_is_named(tmp_path: Path) -> None:
    agent = {"command": ["python", "agent.py"], "pool": {}}
    rewards = [{"name": "own", "python": {"function": "crashing:value"}}]
    async with running_pool(
        tmp_path, modules={"crashing": CRASHING}, rewards=rewards, agent=agent, dataset=CHAIN_SUM
    ) as pool:
        with pytest.raises(UserError, match="train prompt 4 cannot be made: the item reader ended twice"):
            await pool.prompts(split="train", first_index=4, count=3)


async def test_a_turn_does_not_wait_for_items_that_are_read_ahead(tmp_path: Path) -> None:
    async with agents(tmp_path, SEVERAL_TURNS, pool={}) as pool:
        hosts = pool.agent_hosts
        assert hosts is not None
        pool.put(NeedPrompts(split="train", first_index=0, count=1))
        await asyncio.to_thread(wait_for, lambda: hosts.numbers["waiting_prompts"], what="an item that is read")
        pool.put(NeedPrompts(split="train", first_index=1, count=50))
        pool.put(Sample(pool, "0+1=").request())
        assert hosts.numbers["waiting"] == 1
