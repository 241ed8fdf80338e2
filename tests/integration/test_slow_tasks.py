"""What is slow holds up itself alone: prompts, rewards, endpoints."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from streamrl_workers.tasks.pool import LEAST_PROCESSES
from streamrl_workers.tasks.values import NeedPrompts, Prompt, Score, ScoreSample
from support.endpoints import say, serving
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun
from support.task_pools import WAIT_S, AskedPool, running_pool

SLOW = 8
"""Rewards that sleep at once."""

WAITING = '''
import pathlib, time

HERE = pathlib.Path(__file__).parent

def until_told():
    while not (HERE / "go").exists():
        time.sleep(0.01)

def slow_format(*, question, answer, metadata):
    """Once, some prompt after the first 20 waits until it is told to go on; held-out and the data set's check are not it."""
    with (HERE / "asked").open("a+") as asked:
        asked.write("x")
        asked.flush()
        if asked.tell() == 30:
            until_told()
    return {"prompt": question, "target": answer}

def together(*, prompt, completion, answer, metadata):
    """Wait until as many rewards are under way as there are processes at least."""
    with (HERE / "together").open("a") as file:
        file.write("x")
    while (HERE / "together").stat().st_size < 4:
        time.sleep(0.01)
    return 1.0

def slow_reward(*, prompt, completion, answer, metadata):
    """The samples of three of ten prompts wait until they are told to go on."""
    if prompt.endswith(("0", "4", "8")) or completion == "slow":
        until_told()
    return 1.0
'''


def write_module(folder: Path) -> None:
    write_prompts(folder / "prompts.jsonl")
    (folder / "waiting.py").write_text(WAITING)


def run_beside_what_waits(folder: Path, job: dict[str, Any], *, steps: int) -> None:
    """So many steps are trained while something waits; then it goes on, and the run ends well."""
    run = LocalRun.start(job, folder=folder / "run", base_dir=folder)
    run.wait_steps(steps)
    assert run.steps() >= steps, run.logs()
    (folder / "go").touch()
    assert run.wait_end() == 0, run.logs()
    assert run.check().returncode == 0


@pytest.mark.soak
def test_a_run_trains_while_one_of_its_prompts_is_still_being_made(tmp_path: Path) -> None:
    write_module(tmp_path)
    job = simulated_job(steps=10, batch_groups=4)
    job["spec"]["task"] |= {"format": {"function": "waiting:slow_format"}, "processes": 2}
    run_beside_what_waits(tmp_path, job, steps=2)


def test_a_run_trains_while_as_many_rewards_sleep_as_there_were_loops(tmp_path: Path) -> None:
    write_module(tmp_path)
    job = simulated_job(steps=4, batch_groups=16)
    reward = {"name": "slow", "timeoutSeconds": 300.0, "python": {"function": "waiting:slow_reward"}}
    job["spec"]["task"] |= {"rewards": [reward], "groupSize": 2, "processes": 4 * SLOW}
    run_beside_what_waits(tmp_path, job, steps=1)


@asynccontextmanager
async def running(base_dir: Path, **task: Any) -> AsyncIterator[AskedPool]:
    async with running_pool(base_dir, modules={"waiting": WAITING}, **task) as pool, asyncio.timeout(WAIT_S):
        yield pool


def sample(number: int, completion: str) -> ScoreSample:
    return ScoreSample(group_id=number, sample_index=0, split="train", prompt_index=0, completion=completion)


async def test_a_job_that_names_no_number_of_processes_has_several(tmp_path: Path) -> None:
    reward = {"name": "together", "timeoutSeconds": 300.0, "python": {"function": "waiting:together"}}
    async with running(tmp_path, rewards=[reward], processes=None) as pool:
        scores = await pool.score([sample(number, "a") for number in range(LEAST_PROCESSES)])
        assert {score.reward for score in scores} == {1.0}


async def test_quick_rewards_pass_slow_ones_and_each_comes_as_it_is_done(tmp_path: Path) -> None:
    reward = {"name": "slow", "timeoutSeconds": 300.0, "python": {"function": "waiting:slow_reward"}}
    async with running(tmp_path, rewards=[reward], processes=SLOW + 1) as pool:
        slow = asyncio.create_task(pool.score([sample(number, "slow") for number in range(SLOW)]))
        await asyncio.sleep(0)  # they are asked first
        quick = await pool.score([sample(SLOW + number, "quick") for number in range(500)])
        assert {score.reward for score in quick} == {1.0}
        assert not slow.done()
        (tmp_path / "go").touch()
        assert {score.reward for score in await slow} == {1.0}


async def test_completions_are_scored_before_a_long_look_ahead_is_made(tmp_path: Path) -> None:
    async with running(tmp_path, rewards=[{"name": "right", "verifier": {}}]) as pool:
        pool.put(NeedPrompts(split="train", first_index=0, count=2**20))
        pool.put(sample(1, "a"))
        seen: list[type] = []
        while Score not in seen:
            seen += [type(result) for result in await pool.results()]
        assert seen.count(Prompt) < 10


async def test_one_process_asks_an_endpoint_about_many_samples_at_once(tmp_path: Path) -> None:
    """The endpoint answers nobody before all have asked."""
    at_once = 24
    meeting = threading.Barrier(at_once)

    def answer(handler: BaseHTTPRequestHandler, _: int) -> None:
        meeting.wait(WAIT_S)
        say(handler, 200, '{"reward": 0.5}')

    with serving(answer) as endpoint:
        reward = {"name": "judge", "timeoutSeconds": WAIT_S, "http": {"url": endpoint.url, "retries": 0}}
        async with running(tmp_path, rewards=[reward]) as pool:
            scores = await pool.score([sample(number, "a") for number in range(2 * at_once)])
    assert {(score.reward, score.error) for score in scores} == {(0.5, "")}


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_an_endpoint_is_asked_about_no_more_samples_at_once_than_it_may(tmp_path: Path, concurrency: int) -> None:
    lock, meeting = threading.Lock(), threading.Barrier(concurrency)
    active, most = 0, 0

    def answer(handler: BaseHTTPRequestHandler, _: int) -> None:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        meeting.wait(WAIT_S)
        with lock:
            active -= 1
        say(handler, 200, '{"reward": 0.5}')

    with serving(answer) as endpoint:
        options = {"url": endpoint.url, "concurrency": concurrency}
        reward = {"name": "judge", "timeoutSeconds": WAIT_S, "http": options}
        async with running(tmp_path, rewards=[reward], processes=2) as pool:
            scores = await pool.score([sample(number, "a") for number in range(6 * concurrency)])
    assert {score.reward for score in scores} == {0.5}
    assert most == concurrency
