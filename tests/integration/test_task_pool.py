"""The task pool with real processes: whatever a reward does, every sample gets exactly one result."""

import asyncio
import contextlib
import logging
import re
import signal
import socket
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl import keys
from streamrl.errors import UserError
from streamrl.keys import ENV_HEARTBEAT_FILE, ENV_LIVENESS_SECONDS, SECRET_VARIABLES
from streamrl_workers.tasks.values import TaskPoolError
from streamrl_workers.tasks.worker import ITEMS_KEPT
from support.task_jobs import write_lines
from support.task_pools import WAIT_S, AskedPool, fork_servers, running_pool, samples, scored, wait_ended

TIMEOUT_S = 3.0
"""Of a reward that hangs, and of those that do not: a busy machine takes long for them, too."""
MEMORY_LIMIT_BYTES = 256 << 20

REWARDS = r'''
import ctypes, os, re, signal, sys, time

kept = []

def act(*, prompt, completion, answer, metadata):
    """Does what the completion says."""
    if completion == "raise":
        raise RuntimeError("two\nlines")
    if completion == "exit":
        sys.exit(3)
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "1"
    if completion == "loop":
        while True:
            pass
    if completion == "sleep":
        time.sleep(1000)
    if completion == "hold the interpreter":
        ctypes.PyDLL(None).usleep(900_000_000)
    if completion == "backtrack":
        re.search(r"(a+)+$", "a" * 60 + "b")
    if completion == "die":
        os._exit(7)
    if completion == "die clean":
        os._exit(0)
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "leave a child":
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(7)
    if completion == "eat":
        while True:
            kept.append(bytes(1 << 24))
    if completion == "print":
        print("\x00\x01 garbage" * 10)
        os.write(1, b"more garbage")
    if completion == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    return 1.0

def made(*, question, answer, metadata):
    if metadata["level"] == 2:
        raise ValueError("level 2 cannot be asked")
    return {"prompt": question, "target": answer}

def pid(*, prompt, completion, answer, metadata):
    if completion == "hang":
        while True:
            pass
    return os.getpid()
'''

ACT = {"name": "act", "timeoutSeconds": TIMEOUT_S, "python": {"function": "pool_rewards:act"}}
PID = {"name": "pid", "timeoutSeconds": 300.0, "python": {"function": "pool_rewards:pid"}}


def running(base_dir: Path, *rewards: dict[str, Any], **task: Any) -> AbstractAsyncContextManager[AskedPool]:
    return running_pool(
        base_dir,
        modules={"pool_rewards": REWARDS},
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
        rewards=rewards or (ACT,),
        **task,
    )


@pytest.mark.parametrize(
    ("completion", "kind", "text"),
    [
        ("raise", "raised", "act: raised RuntimeError: two lines (pool_rewards.py, line 9)"),
        ("exit", "raised", "act: raised SystemExit: 3 (pool_rewards.py, line 11)"),
        ("nan", "bad_value", "act: must return a finite number, got nan (float)"),
        ("text", "bad_value", "act: must return a finite number, got '1' (str)"),
        ("loop", "timeout", "act: took longer than 3 s"),
        ("sleep", "timeout", "act: took longer than 3 s"),
        ("hold the interpreter", "timeout", "act: took longer than 3 s"),
        ("backtrack", "timeout", "act: took longer than 3 s"),
        ("ignore", "timeout", "act: took longer than 3 s"),
        ("die", "died", "its process ended with status 7"),
        ("die clean", "died", "its process ended with status 0"),
        ("crash", "died", "its process ended by signal 11"),
        ("leave a child", "died", "its process ended with status 7"),
        ("eat", "memory", "act: ran out of memory"),
    ],
)
async def test_one_bad_sample_fails_alone(tmp_path: Path, completion: str, kind: str, text: str) -> None:
    async with running(tmp_path) as pool:
        results = await scored(pool, *["fine"] * 20, completion, *["fine"] * 20)
        bad = results.pop(20)
        assert (bad.kind, bad.reward, dict(bad.parts)) == (kind, None, {})
        assert bad.error == text
        assert {result.reward for result in results} == {1.0}
        assert {name: count for name, count in pool.failures.items() if count} == {kind: 1}
        assert [r.reward for r in await scored(pool, "fine")] == [1.0]


async def test_all_kinds_at_once_over_two_processes(tmp_path: Path) -> None:
    asked = ["fine", "raise", "loop", "die", "fine", "nan", "eat", "fine", "sleep", "crash", "print", "fine"] * 2
    async with running(tmp_path, processes=2) as pool:
        results = await scored(pool, *asked)
        kinds = {"raise": "raised", "nan": "bad_value", "loop": "timeout", "sleep": "timeout", "eat": "memory"}
        kinds |= {"die": "died", "crash": "died", "fine": None, "print": None}
        assert [(text, result.kind) for text, result in zip(asked, results, strict=True)] == [
            (t, kinds[t]) for t in asked
        ]
        assert +pool.failures == {"raised": 2, "bad_value": 2, "timeout": 4, "memory": 2, "died": 4}


async def test_a_hanging_pattern_is_killed_and_parts_have_limits_of_their_own(tmp_path: Path) -> None:
    slow = {"name": "slow", "weightPercent": 50, "timeoutSeconds": TIMEOUT_S, "regex": {"pattern": "(a+)+$"}}
    right = {"name": "right", "weightPercent": 50, "timeoutSeconds": 60.0, "exactMatch": {}}
    async with running(tmp_path, right, slow) as pool:
        good, bad = await scored(pool, "a", "a" * 60 + "b")
        assert (good.reward, dict(good.parts)) == (0.5, {"right": 0.0, "slow": 1.0})
        assert bad.error == "slow: took longer than 3 s"


async def test_workers_killed_from_outside_cost_no_sample(tmp_path: Path) -> None:
    async with running(tmp_path, PID) as pool:
        (first,) = await scored(pool, "a")
        assert first.reward is not None
        async with asyncio.timeout(WAIT_S):
            hanging = asyncio.create_task(pool.score(samples(*["a"] * 5, "hang", *["a"] * 5)))
            worker = psutil.Process(int(first.reward))
            assert await _worker_in_loop(not_pid=0) == worker
            worker.kill()
            # The sample it was at is tried again, as it may be innocent; at the second death it is not.
            second = await _worker_in_loop(not_pid=worker.pid)
            second.kill()
            results = await hanging
        assert [result.kind for result in results] == [None] * 5 + ["died"] + [None] * 5
        assert results[5].error == "its process ended by signal 9"


async def _worker_in_loop(*, not_pid: int) -> psutil.Process:
    while True:
        for worker in [worker for server in fork_servers() for worker in server.children()]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if worker.pid != not_pid and worker.cpu_times().user > 0.2:
                    return worker
        await asyncio.sleep(0.01)


async def test_the_fork_server_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, PID) as pool:
        (first,) = await scored(pool, "a")
        (server,) = fork_servers()
        workers = server.children()
        server.kill()
        await wait_ended(workers)
        (second,) = await scored(pool, "a")
        assert second.reward not in (None, first.reward)
        assert sum(pool.failures.values()) == 0


async def test_data_that_has_changed_is_found_by_the_next_fork_server(tmp_path: Path) -> None:
    async with running(tmp_path, PID) as pool:
        write_lines(tmp_path / "fresh", count=61)
        (tmp_path / "fresh").rename(tmp_path / "lines.jsonl")  # the open file stays as it is
        await scored(pool, "a")
        (server,) = fork_servers()
        workers = server.children()
        server.kill()
        await wait_ended(workers)
        with pytest.raises(TaskPoolError, match="the data of the job has changed since it was opened"):
            await scored(pool, "a")


async def test_a_frozen_fork_server_is_told_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers cannot be replaced without it, and one that overruns cannot be killed."""
    monkeypatch.setenv(ENV_HEARTBEAT_FILE, str(tmp_path / "heartbeats" / "scheduler"))
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, "12")
    caplog.set_level(logging.INFO)
    async with running(tmp_path) as pool:
        (server,) = fork_servers()
        server.suspend()
        async with asyncio.timeout(WAIT_S):
            bad, good = await pool.score(samples("sleep", "fine"))
        assert (bad.kind, good.kind, server.is_running()) == ("timeout", None, False)
    assert re.search(r"the task pool's fork server has shown no sign of life for \d+ s, since ", caplog.text)


SECRETS = """
import os
from pathlib import Path

def found():
    of_kernel = Path("/proc/self/environ").read_bytes().decode() if Path("/proc/self/environ").exists() else ""
    return [name for name, value in os.environ.items() if "a secret of the run" in value] + ["of the kernel"] * ("a secret of the run" in of_kernel)

AT_IMPORT = found()

def score(*, prompt, completion, answer, metadata):
    if AT_IMPORT or found():
        raise RuntimeError(f"sees {AT_IMPORT} and {found()}")
    return 1.0
"""


async def test_the_users_code_is_given_no_secret_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "a secret of the run")
    reward = {"name": "it", "python": {"function": "secret_rewards:score"}}
    async with running_pool(tmp_path, modules={"secret_rewards": SECRETS}, rewards=[reward]) as pool:
        (score,) = await scored(pool, "a")
        assert (score.reward, score.error) == (1.0, "")
        (server,) = fork_servers()
        for process in (server, *server.children(recursive=True)):
            assert not SECRET_VARIABLES & process.environ().keys()


def test_every_variable_of_ours_that_is_a_secret_is_known_as_one() -> None:
    named = {value for name, value in vars(keys).items() if name.startswith("ENV_") and isinstance(value, str)}
    assert {name for name in named if re.search("TOKEN|SECRET|PASSWORD|CREDENTIAL", name)} == SECRET_VARIABLES


async def test_prompts_are_those_of_the_data_set(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        train = await pool.prompts(split="train", first_index=5, count=10)
        assert [(item.split, item.index) for item in train] == [("train", index) for index in range(5, 15)]
        assert train == await pool.prompts(split="train", first_index=5, count=10)
        assert pool.held_out_size == 6
        assert len({item.text for item in await pool.prompts(split="held_out", first_index=0, count=6)}) == 6
        assert await pool.prompts(split="train", first_index=0, count=0) == []


async def test_another_fork_server_makes_the_same_prompts_though_the_data_set_iterates_over_sets(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, dataset={"reasoningGym": {"name": "isomorphic_strings"}}) as pool:
        first = await pool.prompts(split="train", first_index=0, count=20)
        (server,) = fork_servers()
        workers = server.children()
        server.kill()
        await wait_ended(workers)
        assert await pool.prompts(split="train", first_index=0, count=20) == first


async def test_a_prompt_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    kept = {"prompt": "a", "answer": "b", "level": 1}
    text = "\n".join(str({**kept, "prompt": f"p{i}"}).replace("'", '"') for i in range(20))
    bad = '{"prompt": "bad", "answer": "b", "level": 2}'
    (tmp_path / "lines.jsonl").write_text(f"{text}\n{bad}\n")
    dataset, made = {"jsonl": {"path": "lines.jsonl"}}, {"function": "pool_rewards:made"}
    async with running(tmp_path, dataset=dataset, format=made) as pool:
        with pytest.raises(UserError, match="level 2 cannot be asked"):
            await pool.prompts(split="train", first_index=0, count=21)


@pytest.mark.parametrize(
    ("reward", "dataset", "text"),
    [
        ({"regex": {"pattern": "("}}, None, "spec.task.rewards.0.regex.pattern"),
        ({"python": {"function": "pool_rewards:none"}}, None, "has no function none"),
        ({"verifier": {}}, {"jsonl": {"path": "absent.jsonl"}}, "cannot be read"),
        ({"verifier": {}}, {"reasoningGym": {"name": "chain_sums"}}, "did you mean chain_sum"),
    ],
)
async def test_the_users_mistakes_show_at_the_start(
    tmp_path: Path, reward: dict[str, Any], dataset: dict[str, Any] | None, text: str
) -> None:
    named = {} if dataset is None else {"dataset": dataset}
    with pytest.raises(UserError, match=text):
        async with running(tmp_path, {"name": "it", **reward}, **named):
            pass
    assert fork_servers() == []


async def test_a_module_that_ends_the_process_is_told(tmp_path: Path) -> None:
    modules = {"pool_rewards": "import os; os._exit(9)"}
    with pytest.raises(TaskPoolError, match="ended with status 9 while it opened the data set and rewards"):
        async with running_pool(tmp_path, modules=modules, rewards=(ACT,)):
            pass


async def test_without_rewards_each_score_is_zero(tmp_path: Path) -> None:
    taught = {"distillation": {"teacher": {"path": {"directory": "teacher"}}}}
    async with running_pool(tmp_path, modules={}, rewards=(), algorithm=taught) as pool:
        found = await scored(pool, "a", "b")
    assert [(score.reward, score.parts, score.error) for score in found] == [(0.0, {}, "")] * 2


async def test_many_are_scored_in_their_order(tmp_path: Path) -> None:
    """Of more prompts than a process keeps."""
    right = {"name": "right", "timeoutSeconds": WAIT_S, "exactMatch": {}}
    async with running(tmp_path, right, processes=2) as pool:
        results = await scored(pool, *map(str, range(2 * ITEMS_KEPT)))
        assert {result.kind for result in results} == {None}


async def test_closing_wakes_those_who_wait_and_leaves_no_process(tmp_path: Path) -> None:
    async with running(tmp_path, PID) as pool:
        waiting = asyncio.create_task(pool.score(samples("hang", "a")))
        await asyncio.wait_for(_worker_in_loop(not_pid=0), WAIT_S)
        children = psutil.Process().children(recursive=True)
        await pool.close()
        with pytest.raises(TaskPoolError, match="is closed"):
            await waiting
        with pytest.raises(TaskPoolError, match="is closed"):
            await pool.score(samples("a"))
        await wait_ended(children)


HOLDER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.task_jobs import make_job
from support.task_pools import AskedPool
from streamrl_workers.tasks.values import ScoreSample

async def main():
    base = Path(sys.argv[1])
    pid = {"name": "pid", "timeoutSeconds": 300.0, "python": {"function": "pool_rewards:pid"}}
    pool = AskedPool(make_job(dataset={"jsonl": {"path": "lines.jsonl"}}, rewards=[pid]), base_dir=base)
    await pool.start()
    ask = lambda text: pool.score([ScoreSample(group_id=0, sample_index=0, split="train", prompt_index=0, completion=text)])
    print(int((await ask("a"))[0].reward), flush=True)
    await ask("hang")

asyncio.run(main())
"""


def test_workers_end_with_the_process_that_held_the_pool_also_in_a_hang(tmp_path: Path) -> None:
    (tmp_path / "pool_rewards.py").write_text(REWARDS)
    write_lines(tmp_path / "lines.jsonl", count=9)
    tests_dir = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), tests_dir], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        worker = psutil.Process(int(holder.stdout.readline()))
        family = psutil.Process(holder.pid).children(recursive=True)
        assert worker in family
        holder.send_signal(signal.SIGKILL)
    asyncio.run(wait_ended(family))


def test_the_pool_itself_loads_no_data_set_and_no_numbers() -> None:
    code = "import sys, streamrl_workers.tasks.pool; print([m for m in ('numpy', 'torch', 'reasoning_gym') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout.strip() == "[]"


def test_frames_carry_every_string() -> None:
    from streamrl_workers.process import framing

    value = ["\x00", "\ud800", "ü", "\n", 0.1, None, {"a": [1]}]
    left, right = socket.socketpair()
    with left, right:
        left.sendall(framing.encode(value))
        assert framing.receive(right) == value
        left.sendall(framing.encode(value)[:-1])
        left.shutdown(socket.SHUT_WR)
        assert framing.receive(right) is None
