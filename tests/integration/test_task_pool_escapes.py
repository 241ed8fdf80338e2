"""What a reward starts ends with its process, and what it writes elsewhere hits nothing."""

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.errors import UserError
from support.runs import wait_for
from support.task_pools import WAIT_S, AskedPool, fork_servers, running_pool, scored

FLOOD_BYTES = 64 << 20

REWARDS = f'''
import os, pathlib, subprocess, sys, threading, time

HERE = pathlib.Path(__file__).parent

def told(pid=None):
    with (HERE / "pids").open("a") as file:
        file.write(f"{{pid or os.getpid()}}\\n")

def sleeper():
    told()
    time.sleep(1000)
    os._exit(0)

def act(*, prompt, completion, answer, metadata):
    """Does what the completion says, word by word."""
    for word in completion.split():
        if word == "session" and os.fork() == 0:
            os.setsid()
            sleeper()
        if word == "daemon" and os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                sleeper()
            os._exit(0)
        if word == "command":
            told(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        if word == "hang":
            time.sleep(1000)
        if word == "die":
            os._exit(7)
        if word == "return-twice":
            os.fork()
        if word.startswith("scribble"):
            for fd in range(3, 1024):
                try:
                    os.write(fd, {{"scribble-zeros": bytes(4096), "scribble-little": b"\\x01"}}.get(word, b"\\xff\\x00\\x00\\x01" * 64))
                except OSError:
                    pass
        if word == "close":
            os.closerange(3, 1024)
        if word == "flood":
            for _ in range({FLOOD_BYTES >> 16}):
                os.write(1, b"x" * 65535 + b"\\n")
        if word == "wait-pids":
            while not (HERE / "pids").exists() or len((HERE / "pids").read_text().split()) < 3:
                time.sleep(0.01)
    return 1.0
'''


def running(base_dir: Path, *, timeout_s: float = WAIT_S, **task: Any) -> AbstractAsyncContextManager[AskedPool]:
    act = {"name": "act", "timeoutSeconds": timeout_s, "python": {"function": "escaping:act"}}
    return running_pool(base_dir, modules={"escaping": REWARDS}, rewards=[act], **task)


def started(folder: Path) -> list[psutil.Process]:
    """What the rewards have started and still runs."""
    found = []
    for pid in (folder / "pids").read_text().split():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("end", ["die", "hang", "the pool closes"])
async def test_what_a_reward_starts_ends_with_its_process_whatever_session_it_is_in(tmp_path: Path, end: str) -> None:
    limit_s = 10.0 if end == "hang" else WAIT_S
    async with running(tmp_path, timeout_s=limit_s) as pool:
        word = "" if end == "the pool closes" else end
        (score,) = await scored(pool, f"session daemon command wait-pids {word}")
        assert score.kind == {"die": "died", "hang": "timeout"}.get(end)
        if not word:
            assert len(started(tmp_path)) == 3, "they live as long as their process"
        else:
            await asyncio.to_thread(wait_for, lambda: not started(tmp_path), what="the end of what was started")
            assert [score.reward for score in await scored(pool, "fine")] == [1.0]
    await asyncio.to_thread(wait_for, lambda: not started(tmp_path), what="the end of what was started")


HELPED = '''
import os, pathlib, subprocess

PIDS = pathlib.Path(__file__).parent / "pids"
child = subprocess.Popen(["sleep", "1000"])
daemon = subprocess.run(["setsid", "sh", "-c", "sleep 1000 >&- 2>&- & echo $!"], capture_output=True, text=True).stdout
PIDS.write_text(f"{child.pid} {daemon}")
if "refused" in str(PIDS):
    raise ValueError("not today")

def act(*, completion, **_):
    """1 while both helpers live."""
    if completion == "die":
        os._exit(7)
    os.kill(child.pid, 0)
    return 1.0
'''


HELPED_ACT = {"name": "act", "timeoutSeconds": WAIT_S, "python": {"function": "helped:act"}}


@pytest.mark.parametrize("start", ["taken", "refused"])
async def test_helpers_that_a_reward_starts_at_its_import_live_as_long_as_the_pool(tmp_path: Path, start: str) -> None:
    folder = tmp_path / start
    folder.mkdir()
    with pytest.raises(UserError, match="not today") if start == "refused" else contextlib.nullcontext():
        async with running_pool(folder, modules={"helped": HELPED}, rewards=[HELPED_ACT]) as pool:
            for _ in range(2):
                assert [score.kind for score in await scored(pool, "die", "fine")] == ["died", None]
            assert len(started(folder)) == 2
    await asyncio.to_thread(wait_for, lambda: not started(folder), what="the end of the helpers")


async def test_a_fork_server_that_is_killed_leaves_no_helpers_of_its_session(tmp_path: Path) -> None:
    async with running_pool(tmp_path, modules={"helped": HELPED}, rewards=[HELPED_ACT]) as pool:
        (server,) = fork_servers()
        child, daemon = started(tmp_path)
        try:
            assert [score.kind for score in await scored(pool, "fine")] == [None]
            server.kill()
            await pool.close()
            await asyncio.to_thread(wait_for, lambda: child not in started(tmp_path), what="the helper's end")
        finally:
            daemon.kill()  # in a session of its own


MISJUDGING = """
from streamrl_workers.process import framing
from streamrl_workers.tasks import worker

async def ask(number, body, *, parts, transport):
    transport.write(framing.encode([number, {values}]))

worker._ask = ask

def act(**_):
    return 1.0
"""


@pytest.mark.parametrize("values", ["[]", "[1.0, 2.0]", "['1']", "[float('nan')]"])
async def test_what_is_no_answer_of_the_asking_process_costs_its_samples_alone(tmp_path: Path, values: str) -> None:
    rewards = [
        {"name": "act", "weightPercent": 50, "python": {"function": "misjudging:act"}},
        {"name": "judge", "weightPercent": 50, "timeoutSeconds": WAIT_S, "http": {"url": "http://127.0.0.1:9/"}},
    ]
    modules = {"misjudging": MISJUDGING.format(values=values)}
    async with running_pool(tmp_path, modules=modules, rewards=rewards) as pool:
        for _ in range(2):
            (score,) = await scored(pool, "a")
            assert (score.kind, score.error) == ("died", "the process that asks endpoints ended twice")


@pytest.mark.parametrize("word", ["scribble", "scribble-zeros", "scribble-little"])
async def test_a_reward_that_writes_to_every_descriptor_costs_itself_alone(tmp_path: Path, word: str) -> None:
    async with running(tmp_path, processes=2, timeout_s=300.0) as pool:
        scores = await scored(pool, *["fine"] * 5, word, *["fine"] * 5)
        bad = scores.pop(5)
        assert (bad.kind, bad.error) == (
            "died",
            "its process was ended: something else than an answer was written to its socket",
        )
        assert {score.reward for score in scores} == {1.0}
        assert [score.reward for score in await scored(pool, *["fine"] * 4)] == [1.0] * 4


async def test_a_reward_that_closes_every_descriptor_costs_itself_alone(tmp_path: Path) -> None:
    async with running(tmp_path, timeout_s=300.0) as pool:
        scores = await scored(pool, "fine", "close", "fine")
        assert [score.kind for score in scores] == [None, "died", None]


async def test_a_fork_that_returns_from_the_reward_answers_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        scores = await scored(pool, *["return-twice", "fine"] * 10)
        assert [score.kind for score in scores] == [None] * 20


async def test_a_reward_that_floods_its_output_holds_up_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path) as pool:
        scores = await scored(pool, "fine", "flood", "fine")
        assert {score.reward for score in scores} == {1.0}
    said = capfd.readouterr().err
    assert len(said) < FLOOD_BYTES // 2, "what is kept is bounded"
    assert "more output of the task processes is left out" in said
