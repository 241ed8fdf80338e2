"""Agent hosts as processes of their own behind a task pool of this process: real links, real gRPC, the scheduler's own service."""

import asyncio
import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from streamrl import keys
from streamrl_workers.scheduler.server.connections import Connections
from streamrl_workers.scheduler.server.lifetime import ExitDecision
from streamrl_workers.scheduler.server.peer_messages import Door
from streamrl_workers.scheduler.server.service import SchedulerService
from streamrl_workers.stream.channel import bind, make_server
from streamrl_workers.tasks.pool import TaskPool
from support.agent_pools import agents
from support.ports import free_port
from support.runs import wait_for

TOKEN = "token of this run"
END_S = 60.0


@dataclass
class Links:
    """The scheduler's port, and the links that dial it."""

    pool: TaskPool
    folder: Path
    model_path: str | None = None
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    life: str = ""
    server: grpc.aio.Server | None = None

    async def open(self, *, same_life: bool = False) -> None:
        """As a scheduler does when it starts, or `same_life` as if connections had broken."""
        if not same_life:
            self.life = uuid.uuid4().hex
        nothing: Any = None  # what only generators and the trainer need
        service = SchedulerService(
            core=nothing,
            executor=nothing,
            journal=nothing,
            connections=Connections(),
            door=Door(max_tokens=16, batch_groups=1, newest_step=lambda: 0),
            ending=ExitDecision(),
            model_path=lambda: self.model_path,
            lease_s=60.0,
            clock_s=lambda: 0.0,
            agent_hosts=self.pool.agent_hosts,
            life=self.life,
        )
        self.service, self.server = service, make_server(TOKEN)
        service.add_to(self.server)
        bind(self.server, port=self.port)
        await self.server.start()

    async def shut(self) -> None:
        """Break all connections."""
        assert self.server is not None
        await self.server.stop(0)

    def start(self, name: str, *, socket: Path | None = None) -> subprocess.Popen[bytes]:
        """A link, and with it an agent host; `socket`: of the container that has it."""
        environment = {
            keys.ENV_RUN_DIR: str(self.folder),
            keys.ENV_CODE_DIR: str(self.folder.parent),
            keys.ENV_PROCESS: name,
            keys.ENV_TOKEN: TOKEN,
            keys.ENV_SCHEDULER_ADDRESS: f"127.0.0.1:{self.port}",
            **({} if socket is None else {keys.ENV_TASKS_SOCKET: str(socket)}),
        }
        return self._run("streamrl_workers.agent_link", name, environment)

    def start_container(self, name: str, *, socket: Path) -> subprocess.Popen[bytes]:
        """The container of a link's host."""
        return self._run("streamrl_workers.tasks.host", name, {keys.ENV_TASKS_SOCKET: str(socket)})

    def _run(self, module: str, name: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        inherited = {key: value for key, value in os.environ.items() if key != keys.ENV_MODEL_PATH}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=inherited | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        return process

    async def until(self, *, hosts: int) -> None:
        """So many are connected."""
        what = f"{hosts} agent hosts; {self.logs()}"
        numbers = self.pool.agent_hosts
        assert numbers is not None
        async with asyncio.timeout(END_S * 2):
            while numbers.numbers["hosts"] != hosts:
                assert all(one.poll() is None for one in self.processes.values()), what
                await asyncio.sleep(0.05)

    async def ended(self, name: str) -> int:
        """Exit code of a link that ends."""
        process = self.processes.pop(name)
        return await asyncio.to_thread(process.wait, END_S)

    def programs(self, name: str) -> list[psutil.Process]:
        """That a host runs just now."""
        tree = psutil.Process(self.processes[name].pid).children(recursive=True)
        return [one for one in tree if _runs(one, "agent.py")]

    def host(self, name: str) -> psutil.Process:
        """The process that has the programs."""
        (program, *_) = wait_for(lambda: self.programs(name), what=f"a program of {name}; {self.logs()}")
        host = program.parent()
        assert host is not None
        return host

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


def _runs(process: psutil.Process, word: str) -> bool:
    try:
        return word in process.cmdline()
    except psutil.Error:
        return False


@contextlib.asynccontextmanager
async def linked(
    base_dir: Path, program: str, *, names: tuple[str, ...] = ("a", "b"), **options: Any
) -> AsyncIterator[Links]:
    """A pool whose agents are played by hosts of these names."""
    model_path = options.pop("model_path", None)
    async with agents(base_dir, program, pool={}, **options) as pool:
        folder = base_dir / "run"
        folder.mkdir()
        (folder / keys.FILE_JOB).write_text(pool._job.model_dump_json(by_alias=True, exclude_none=True))
        links = Links(pool, folder, model_path=model_path)
        try:
            await links.open()
            for name in names:
                links.start(name)
            await links.until(hosts=len(names))
            yield links
        finally:
            for process in links.processes.values():
                process.kill()
                process.wait(END_S)
            await links.shut()
