"""A helper process and its socket: who starts one never loses it."""

import asyncio
import subprocess
from typing import NoReturn

import pytest

from streamrl_workers.process import child, framing
from streamrl_workers.process.child import ChildProcess


async def test_one_whose_start_is_cancelled_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: object, **options: object) -> subprocess.Popen[bytes]:
        begun.append(real(*args, **options))
        return begun[-1]

    opening = asyncio.Event()

    async def never(_: object) -> NoReturn:
        opening.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(child.subprocess, "Popen", popen)
    monkeypatch.setattr(framing, "open_frames", never)
    start = ChildProcess.start(
        "streamrl_workers.tasks.fork_server_process", name="helper", what="a helper", environment={}
    )
    task = asyncio.create_task(start)
    await asyncio.wait_for(opening.wait(), timeout=60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun[0].returncode is not None
