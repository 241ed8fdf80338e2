"""The task pool with its processes in a container of their own: a host, and a socket as the one thing between."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.errors import UserError
from streamrl.keys import ENV_TASKS_SOCKET
from streamrl_workers.process import framing
from streamrl_workers.tasks import fork_server
from streamrl_workers.tasks.values import TaskPoolError
from support.runs import wait_for
from support.task_jobs import make_job, write_lines
from support.task_pools import WAIT_S, AskedPool, running_pool, samples, scored, wait_ended

REWARDS = """
import os, subprocess, time
helper = subprocess.Popen(["sleep", "1000"])
def act(*, prompt, completion, answer, metadata):
    if completion == "hang":
        os.mknod("hanging")
        time.sleep(1000)
    return float(os.getpid())
"""
ACT = {"name": "act", "timeoutSeconds": 300.0, "python": {"function": "hosted_rewards:act"}}
MODULES = {"hosted_rewards": REWARDS}


class Host:
    """A process as the container runs it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "socket"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """As a kubelet does, also again."""
        command = [sys.executable, "-m", "streamrl_workers.tasks.host"]
        environment = {**os.environ, ENV_TASKS_SOCKET: str(self.socket)}
        self._process = subprocess.Popen(command, env=environment, cwd=self.directory)

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def kill(self) -> None:
        """With all that it has: a container ends with its first process."""
        family = [self.process, *self.process.children(recursive=True)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.reap()

    def reap(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return self._process.wait(WAIT_S)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    made.start()
    yield made
    with contextlib.suppress(psutil.NoSuchProcess):
        made.kill()


async def test_scores_come_from_processes_of_the_host_and_none_is_left(tmp_path: Path, host: Host) -> None:
    async with running_pool(tmp_path, modules=MODULES, host=host.socket, rewards=[ACT]) as pool:
        assert [prompt.index for prompt in await pool.prompts(split="train", first_index=0, count=3)] == [0, 1, 2]
        (score,) = await scored(pool, "a")
        assert score.reward in {process.pid for process in host.process.children(recursive=True)}
        family = host.process.children(recursive=True)
        assert len(family) > 2, "fork server, worker, helper of the module"
    await wait_ended(family)
    assert host.process.is_running()


def test_a_config_that_comes_late_is_waited_for(tmp_path: Path, host: Host) -> None:
    write_lines(tmp_path / "lines.jsonl", count=60)
    job = make_job(dataset={"jsonl": {"path": "lines.jsonl"}}, rewards=[{"name": "it", "exactMatch": {}}])
    config = {
        "task": job.spec.task.model_dump_json(by_alias=True, exclude_none=True),
        "seed": 0,
        "base_dir": str(tmp_path),
        "model_path": "",
        "memory_limit_bytes": 1 << 30,
        "start_timeout_s": WAIT_S,
        "only_agents": False,
        "supervised": None,
    }
    data = framing.encode(config)
    wait_for(lambda: _listens(host.socket), what="the host to listen")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(host.socket))
        connection.sendall(data[:1])
        wait_for(lambda: not _unread_bytes(connection), what="the fork server to read")
        connection.sendall(data[1:])
        answer = framing.receive(connection)
    assert answer is not None
    assert answer["ready"]["held_out_size"] == 6
    assert answer["ready"]["fingerprint"].keys() == {"spec.task.dataset", "spec.seed"}


def _unread_bytes(connection: socket.socket) -> int:
    """Of what was sent; what the peer holds it in counts too."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0])


async def test_a_container_that_ends_is_waited_for_and_asked_again(tmp_path: Path, host: Host) -> None:
    async with running_pool(tmp_path, modules=MODULES, host=host.socket, rewards=[ACT], processes=2) as pool:
        asked = asyncio.create_task(pool.score(samples("a", "hang", "a", "a")))
        for _ in range(2):  # a sample may see two deaths, as it may be innocent at the first
            await hangs(tmp_path)
            host.kill()
            host.start()
        async with asyncio.timeout(WAIT_S):
            results = await asked
        assert [result.kind for result in results] == [None, "died", None, None]


async def test_one_that_stays_away_ends_the_pool_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(TaskPoolError, match=r"nobody listens for the task pool at .*; is the container tasks running"):
        async with running_pool(tmp_path, modules=MODULES, host=tmp_path / "socket", rewards=[ACT]):
            pass


async def test_the_users_mistakes_come_through_the_socket(tmp_path: Path, host: Host) -> None:
    with pytest.raises(UserError, match="has no function none"):
        async with running_pool(
            tmp_path,
            modules=MODULES,
            host=host.socket,
            rewards=[{"name": "it", "python": {"function": "hosted_rewards:none"}}],
        ):
            pass


async def test_the_newest_pool_counts_and_what_the_one_before_has_left_is_ended(tmp_path: Path, host: Host) -> None:
    """A scheduler that hangs and is replaced may leave its connection open."""
    write_lines(tmp_path / "lines.jsonl", count=60)
    (tmp_path / "hosted_rewards.py").write_text(REWARDS)
    job = make_job(dataset={"jsonl": {"path": "lines.jsonl"}}, rewards=[ACT])
    before = fork_server.ForkServer(job, base_dir=tmp_path, memory_limit_bytes=1 << 30, host=host.socket)
    assert (await before.start()).held_out_size == 6
    family = host.process.children(recursive=True)
    assert family
    async with running_pool(tmp_path, modules=MODULES, host=host.socket, rewards=[ACT]) as pool:
        (score,) = await scored(pool, "a")
        assert score.reward is not None
        await wait_ended(family)
        assert not before.alive
    await before.close()


async def hangs(directory: Path) -> None:
    """Until a reward does."""
    sign = directory / "hanging"
    await asyncio.to_thread(wait_for, sign.exists, what="a reward that hangs")
    sign.unlink()


@pytest.mark.parametrize(
    "said",
    [
        {"ready": {"held_out_size": -1, "fingerprint": {}}},
        {"ready": {"held_out_size": "6", "fingerprint": {}}},
        {"ready": {"held_out_size": 6, "fingerprint": {"spec.seed": 0}}},
        {"ready": {"held_out_size": 6}},
        {"ready": []},
        {"user_error": {"field": "a", "rule": "b"}},
        {"user_error": {"field": "a", "rule": "b", "got": None, "fix": "c", "more": 1}},
        [],
        7,
    ],
)
async def test_one_that_is_no_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: object) -> None:
    """Code of the user can listen there in the host's place."""
    monkeypatch.setattr(fork_server, "CONNECT_TIMEOUT_S", 5.0)

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framing.encode(said))
        writer.close()

    async with await asyncio.start_unix_server(say, tmp_path / "socket"):
        write_lines(tmp_path / "lines.jsonl", count=60)
        job = make_job(dataset={"jsonl": {"path": "lines.jsonl"}}, rewards=[{"name": "it", "exactMatch": {}}])
        pool = AskedPool(job, base_dir=tmp_path, host=tmp_path / "socket")
        with pytest.raises(TaskPoolError, match="something else than an answer"):
            await pool.start()


def test_it_ends_when_told_and_takes_a_socket_that_an_earlier_life_has_left(tmp_path: Path, host: Host) -> None:
    wait_for(host.socket.exists, what="the socket")
    host.kill()
    assert host.socket.exists()
    host.start()
    wait_for(lambda: _listens(host.socket), what="the second life to listen")
    host.process.send_signal(signal.SIGTERM)
    assert host.reap() == 0


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0
