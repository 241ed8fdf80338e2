"""The operator in a process of its own, against an API server that a test names."""

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from streamrl import keys
from support.ports import free_port

MOST_MIB = 400
"""Of the process; the chart gives it 768."""
DEADLINE_S = 240.0


class Operator:
    """One process of it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    @property
    def peak_mib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) // 1024

    def answers(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=DEADLINE_S) as page:
            return bool(page.status == 200)

    async def until(self, check: Callable[[], bool], *, what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not check():
                    assert self.process.returncode is None, self.log.read_text()[-3000:]
                    assert self.peak_mib < MOST_MIB, self.log.read_text()[-3000:]
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"waited {DEADLINE_S:g} s for {what}: {self.log.read_text()[-3000:]}") from None

    async def end(self) -> int:
        self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


@asynccontextmanager
async def operator(folder: Path, server: str, user: object) -> AsyncIterator[Operator]:
    """A process that speaks to `server` as `user`."""
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    port, log = free_port(), folder / "log"
    environ = os.environ | {
        keys.ENV_KUBECONFIG: str(folder / "kubeconfig"),
        keys.ENV_TRAINER_IMAGE: "trainer:test",
        keys.ENV_GENERATOR_IMAGE: "generator:test",
        keys.ENV_SIGNALS_PORT: str(port),
        keys.ENV_BIND_HOST: "127.0.0.1",
    }
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "streamrl_operator", env=environ, stdout=output, stderr=output
        )
    try:
        yield Operator(process, port, log)
    finally:
        if process.returncode is None:
            psutil.Process(process.pid).kill()
            await process.wait()
