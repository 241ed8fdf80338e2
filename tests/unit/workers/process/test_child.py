"""A helper process and its socket: who starts one never loses it."""

import asyncio
import socket
import subprocess
import sys
from typing import NoReturn

import pytest

from streamrl_workers.process import child, framing
from streamrl_workers.process.child import ChildProcess

MODULE = "streamrl_workers.tasks.fork_server_process"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """All that were started."""
    begun: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: object, **options: object) -> subprocess.Popen[bytes]:
        begun.append(real(*args, **options))
        return begun[-1]

    monkeypatch.setattr(child.subprocess, "Popen", popen)
    return begun


async def test_one_whose_start_is_cancelled_is_gone(
    monkeypatch: pytest.MonkeyPatch, begun: list[subprocess.Popen[bytes]]
) -> None:
    opening = asyncio.Event()

    async def never(_: object) -> NoReturn:
        opening.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(framing, "open_frames", never)
    task = asyncio.create_task(ChildProcess.start(MODULE, name="helper", what="a helper", environment={}))
    await asyncio.wait_for(opening.wait(), timeout=60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun[0].returncode is not None


@pytest.mark.parametrize("times", [1, 3])
async def test_one_whose_close_is_cancelled_is_gone(times: int, begun: list[subprocess.Popen[bytes]]) -> None:
    helper = await ChildProcess.start(MODULE, name="helper", what="a helper", environment={})
    closing = asyncio.create_task(helper.close())
    for _ in range(times):
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert begun[0].returncode is not None


async def test_frames_for_one_that_is_gone_are_left_out_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    transport, frames = await framing.open_frames(ours)
    theirs.close()
    for number in range(20):  # as many are asked in one round of the loop
        framing.send(transport, number)
    assert await frames.read(limit_s=60.0) is None
    framing.send(transport, "late")
    transport.abort()
    assert caplog.messages == []


GREEDY = """
import socket, sys
from streamrl_workers.process.child import begin_as_child
ours, theirs = socket.socketpair()
sys.argv = ["helper", str(theirs.detach())]
begin_as_child(most_bytes=2**28)
try:
    bytearray(2**29)
except MemoryError:
    sys.exit(7)
"""


def test_one_with_a_bound_of_memory_gets_no_more() -> None:
    assert subprocess.run([sys.executable, "-c", GREEDY], timeout=60, check=False).returncode == 7
