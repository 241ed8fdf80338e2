"""Data sets, chat and rewards through the real pool and a real run: what misbehaves is bounded and counted, the run goes on."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
from datasets import Dataset

from streamrl import keys
from support.chat_models import save_tokenizer
from support.endpoints import say, serving
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun
from support.task_pools import AskedPool, running_pool, scored, wait_ended

MEMORY_LIMIT_BYTES = 512 << 20
LEAK_BYTES = 100 << 20

REWARDS = f'''
import os, signal, time

kept = []

def act(*, prompt, completion, answer, metadata):
    """Does what the completion says."""
    if completion == "leak":
        kept.append(b"x" * {LEAK_BYTES})
        return float(len(kept))
    if completion == "kill the parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    if completion == "leave children":
        for _ in range(5):
            if os.fork() == 0:
                time.sleep(1000)
    return 1.0

def by_metadata(*, prompt, completion, answer, metadata):
    """Fails on some questions in every way, whatever is answered."""
    number = int(prompt.split()[-1])
    if number % 20 == 1:
        raise RuntimeError("odd")
    if number % 20 == 2:
        while True:
            pass
    if number % 20 == 3:
        os._exit(7)
    if number % 20 == 4:
        kept.append(b"x" * {LEAK_BYTES})
    return 1.0
'''
ACT = {"name": "act", "timeoutSeconds": 120.0, "python": {"function": "misbehaving:act"}}


def running(base_dir: Path, **task: Any) -> AbstractAsyncContextManager[AskedPool]:
    modules = {"misbehaving": REWARDS}
    return running_pool(base_dir, modules=modules, memory_limit_bytes=MEMORY_LIMIT_BYTES, **task)


async def test_a_leak_ends_at_the_limit_and_the_next_process_begins_anew(tmp_path: Path) -> None:
    async with running(tmp_path, rewards=[ACT]) as pool:
        results = await scored(pool, *["leak"] * 14)
        kinds = [result.kind for result in results]
        most = MEMORY_LIMIT_BYTES // LEAK_BYTES
        assert set(kinds) == {None, "memory"}
        assert 14 // (most + 1) <= kinds.count("memory") <= 14 // 3
        assert max(result.reward or 0 for result in results) <= most
        assert pool.failures["memory"] == kinds.count("memory")
        assert [result.reward for result in await scored(pool, "fine")] == [1.0]


async def test_a_reward_that_kills_its_parent_costs_itself_alone(tmp_path: Path) -> None:
    async with running(tmp_path, rewards=[ACT]) as pool:
        results = await scored(pool, *["fine"] * 10, "kill the parent", *["fine"] * 10)
        assert results.pop(10).kind == "died"
        assert {result.reward for result in results} == {1.0}
        assert [result.reward for result in await scored(pool, "fine")] == [1.0]


async def test_children_of_a_reward_end_with_its_process(tmp_path: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    async with running(tmp_path, rewards=[ACT]) as pool:
        assert [result.reward for result in await scored(pool, "leave children", "fine")] == [1.0, 1.0]
        family = {*psutil.Process().children(recursive=True)} - before
        assert len(family) >= 7, "fork server, worker and five children"
    await wait_ended(list(family))


async def test_a_number_too_large_to_compare_is_ended_by_the_time_limit(tmp_path: Path) -> None:
    rewards = [{"name": "right", "timeoutSeconds": 15.0, "mathVerify": {}}]
    async with running(tmp_path, rewards=rewards) as pool:
        fine, huge, after = await scored(pool, "\\boxed{1}", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{1}")
        assert {fine.kind, after.kind} == {None}
        assert huge.kind in {"timeout", "memory"} or huge.reward == 0.0
        assert huge.error in {"right: took longer than 15 s", "right: ran out of memory", ""}


async def test_a_part_that_fails_fails_the_sample_with_its_name(tmp_path: Path) -> None:
    def judge(handler: BaseHTTPRequestHandler, number: int) -> None:
        refused = endpoint.bodies[number]["completion"] == "refuse this"
        say(handler, 404 if refused else 200, '{"reward": 0.5}')

    with serving(judge) as endpoint:
        rewards = [
            {"name": "right", "weightPercent": 60, "exactMatch": {}},
            {"name": "judge", "weightPercent": 40, "timeoutSeconds": 120.0, "http": {"url": endpoint.url}},
        ]
        async with running(tmp_path, rewards=rewards) as pool:
            good, bad = await scored(pool, "judge this", "refuse this")
    assert (good.reward, dict(good.parts)) == (0.2, {"right": 0.0, "judge": 0.5})
    assert (bad.kind, bad.reward, dict(bad.parts)) == ("raised", None, {})
    assert bad.error == "judge: raised EndpointError: answered with status 404"


async def test_an_endpoint_that_is_late_is_a_timeout(tmp_path: Path) -> None:
    released = asyncio.Event()

    def hang(handler: BaseHTTPRequestHandler, _: int) -> None:
        while not released.is_set():
            handler.rfile.read(1)  # until the client goes
            return

    with serving(hang) as endpoint:
        rewards = [{"name": "judge", "timeoutSeconds": 0.5, "http": {"url": endpoint.url, "retries": 0}}]
        async with running(tmp_path, rewards=rewards) as pool:
            (late,) = await scored(pool, "a")
        released.set()
    assert late.kind == "timeout"
    assert late.error == "judge: no answer within 0.5 s"


async def test_a_data_set_on_disk_and_a_chat_template_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"question": [f"{i}+1=" for i in range(40)], "answer": [f"#### {i + 1}" for i in range(40)]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "data")
    monkeypatch.setenv(keys.ENV_MODEL_PATH, save_tokenizer(tmp_path / "model"))
    dataset = {"huggingFace": {"path": "data", "promptField": "question", "answerField": "answer"}}
    job = {
        "dataset": dataset,
        "chat": {"systemPrompt": "Add."},
        "rewards": [{"name": "right", "timeoutSeconds": 120.0, "mathVerify": {}}],
    }
    async with running(tmp_path, processes=2, **job) as pool:
        assert pool.held_out_size == 4
        items = await pool.prompts(split="train", first_index=0, count=36)
        head, tail = (
            "<|bos|><|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
        )
        texts = [item.text.removeprefix(head).removesuffix(tail) for item in items]
        assert set(texts) < set(rows["question"])
        assert len(set(texts)) == 36
        answers = [str(int(text.split("+")[0]) + 1) for text in texts]
        assert {result.reward for result in await scored(pool, *answers)} == {1.0}


@pytest.mark.soak
def test_a_run_goes_on_over_rewards_that_misbehave(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "misbehaving.py").write_text(REWARDS)
    job = simulated_job(steps=8)
    job["spec"]["task"]["rewards"] = [
        {"name": "act", "timeoutSeconds": 1.0, "python": {"function": "misbehaving:by_metadata"}}
    ]
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == 8
    lines = [json.loads(line) for line in (run.folder / "metrics/steps.jsonl").read_text().splitlines()]
    assert sum(line["dropped"].get("reward_failed", 0) for line in lines) > 0
    assert {line["reward_mean"] for line in lines} == {1.0}, "what failed has no reward, what did not has its own"
    evaluations = [json.loads(line) for line in (run.folder / "metrics/evaluations.jsonl").read_text().splitlines()]
    assert {line["mean_reward"] for line in evaluations} == {1.0}
    check = run.check()
    assert check.returncode == 0, check.stdout + check.stderr
    assert run.result()["status"] == "succeeded"
