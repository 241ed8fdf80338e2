"""Every TCP port that a run, its pages and the operator have open, against callers without a token: memory, probes, the run.

The ports are those that the kernel lists, whoever opened them: a new one is in the test as soon as it listens. One that speaks
neither HTTP nor gRPC is foreign code's, and stands in the table of SECURITY.md.
"""

import asyncio
import http.client
import re
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.held_runs import Hold
from support.jobs import simulated_job, tiny_job, write_prompts
from support.listeners import Listener, abstract_sockets, listeners, tree
from support.operator_process import operator
from support.runs import LocalRun
from support.strangers import HEADS, KINDS, PREFACE, Stranger
from support.tree import ROOT

OF_A_KIND = 17
"""Connections to each port: in all more than any server of ours keeps of strangers."""
GROWTH_BYTES = 64 * 2**20
HELD_AT, STEPS = 3, 12
PROBED = 5
"""Scheduler, trainer, two generators, operator."""
PROBE_S, ANSWER_S = 60.0, 20.0
SENT_S, ENDED_S = 60.0, 150.0
"""For the last connection to be ended by its server: an agent's request has a minute to arrive."""
FOREIGN = ROOT / "SECURITY.md"

pytestmark = pytest.mark.timeout(400)

AGENT = """
import json, os, sys, urllib.request

item = json.load(sys.stdin)
body = {"messages": [{"role": "user", "content": item["question"]}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
urllib.request.urlopen(request).read()
"""


def agents_job() -> dict[str, Any]:
    """Scheduler, trainer, two generators, agents."""
    job = simulated_job(steps=STEPS)
    job["spec"]["task"]["agent"] = {"command": ["python", "-S", "agent.py"]}
    return job


@contextmanager
def pages_of(run: Path) -> Iterator[int]:
    """`streamrl ui`; gives its process."""
    command = [sys.executable, "-m", "streamrl_cli.main", "ui", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http")
            yield process.pid
        finally:
            process.terminate()


def speaks(port: Listener) -> str:
    """Return what answers there; "" is neither HTTP nor gRPC."""
    with suppress(http.client.HTTPException, OSError):
        status(port, "/", timeout_s=ANSWER_S)
        return "HTTP"
    with suppress(OSError), socket.create_connection((port.host, port.port), ANSWER_S) as connection:
        connection.sendall(PREFACE)
        return "gRPC" if connection.recv(9)[3:4] == b"\4" else ""
    return ""


def status(port: Listener, path: str, *, timeout_s: float = PROBE_S) -> int:
    connection = http.client.HTTPConnection(port.host, port.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def foreign() -> set[str]:
    """Processes that have ports of other code."""
    section = FOREIGN.read_text().partition("\n## Ports\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([a-z]+)` \|", section, re.MULTILINE))


class Memory:
    """What processes have taken since the beginning, at most."""

    def __init__(self, pids: set[int]) -> None:
        self._before = {pid: self._now(pid, "VmRSS") for pid in pids}
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak begins here

    def growth_bytes(self) -> dict[int, int]:
        return {pid: self._now(pid, "VmHWM") - before for pid, before in self._before.items()}

    def _now(self, pid: int, key: str) -> int:
        found = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


@asynccontextmanager
async def besieged(ports: Sequence[Listener]) -> AsyncIterator[list[Stranger]]:
    """Strangers of every kind at each port, as long as the block lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = [(kind, port) for _ in range(OF_A_KIND) for kind in KINDS for port in ports]
    connections = await asyncio.gather(*(asyncio.open_connection(port.host, port.port) for _, port in wanted))
    held = [
        Stranger(*connection, kind=kind, at=str(port))
        for connection, (kind, port) in zip(connections, wanted, strict=True)
    ]
    try:
        yield held
    finally:
        await asyncio.gather(*(one.end() for one in held))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def opened(processes: Sequence[psutil.Process]) -> dict[Listener, str]:
    """All ports of the processes, printed, and what they speak."""
    spoken = {port: speaks(port) for port in listeners(processes)}
    sys.stdout.writelines(f"{port} {kind or 'other code'}\n" for port, kind in spoken.items())
    assert {port.host for port in spoken} <= {"127.0.0.1", "::1"}
    assert not abstract_sockets(processes)
    return spoken


async def withstand(run: LocalRun, held_run: Hold, spoken: Mapping[Listener, str], *, until_ended: bool) -> None:
    """The run makes steps while strangers hold on, probes are answered, memory stays."""
    ports = list(spoken)
    memory = Memory({port.pid for port in ports})
    probed = [port for port in ports if spoken[port] == "HTTP" and status(port, "/healthz") == 200]
    assert len(probed) == PROBED
    async with besieged(ports) as held:
        _, waiting = await asyncio.wait([one.sending for one in held if one.kind in HEADS], timeout=SENT_S)
        assert not waiting
        held_run.move(run.steps() + 3)
        await asyncio.to_thread(run.wait_steps, run.steps() + 2)
        for port in probed:
            assert await asyncio.to_thread(status, port, "/healthz") == 200, port
        if until_ended:
            _, open_ = await asyncio.wait([one.holding for one in held], timeout=ENDED_S)
            assert not open_, Counter(task.get_name() for task in open_)
    grown = {str(port): memory.growth_bytes()[port.pid] // 2**20 for port in ports}
    sys.stdout.write(f"grown by MiB: {grown}\n")
    assert max(memory.growth_bytes().values()) < GROWTH_BYTES, grown


@pytest.mark.parametrize("until_ended", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["held", "ended"])
async def test_strangers_at_every_port_cost_a_run_nothing(tmp_path: Path, until_ended: bool) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "agent.py").write_text(AGENT)
    job = agents_job()
    held_run = Hold.on(job, tmp_path, step=HELD_AT)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(HELD_AT - 1)
    nowhere = "https://127.0.0.1:9"
    with pages_of(run.folder) as ui:
        async with operator(tmp_path, nowhere, {"token": "t"}) as controller:
            await controller.until(lambda: bool(listeners(tree(controller.process.pid))), what="its port")
            processes = tree(run.process.pid, ui, controller.process.pid)
            ports = await asyncio.to_thread(opened, processes)
            assert all(ports.values()), "a simulated run has no port of other code"
            await withstand(run, held_run, ports, until_ended=until_ended)
            assert await controller.end() == 0
    held_run.let_go()
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == STEPS
    run.assert_exact()


@pytest.mark.soak
async def test_ports_of_ranks_are_in_the_table(tmp_path: Path) -> None:
    """Real ranks: torch's store and gloo listen."""
    write_prompts(tmp_path / "prompts.jsonl")
    job = tiny_job(steps=1000)
    job["spec"]["trainer"] = {"processesPerNode": 2}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(1)
    spoken = await asyncio.to_thread(opened, tree(run.process.pid))
    assert {port.process.split("-")[0] for port, kind in spoken.items() if not kind} == foreign()
    assert run.interrupt() == 130, run.logs()
