"""Processes that live and die together, generators that come and go: with stand-ins for the workers.

A stand-in is a module in the run folder, where workers are started: what it does is what its role must do at least.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from streamrl import keys
from streamrl.spec import parse_job
from streamrl_cli.runner import plan as plan_module
from streamrl_cli.runner import supervisor as supervisor_module
from streamrl_cli.runner import unit as unit_module
from streamrl_cli.runner.folder import create_folder
from streamrl_cli.runner.plan import plan_run
from streamrl_cli.runner.supervisor import Supervisor
from streamrl_cli.runner.workers import RunFailedError
from streamrl_workers.process.silences import read_silences
from support.jobs import simulated_job

DEADLINE_S = 120.0
LIVENESS_S = 90.0
SCHEDULER = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ends = pathlib.Path("endpoints"); new = ends / "new"
new.write_text(json.dumps({"grpc": "127.0.0.1:1", "pid": os.getpid()})); new.rename(ends / "scheduler.json")
while not os.path.exists("result.json"): time.sleep(0.01); os.utime(os.environ["STREAMRL_HEARTBEAT_FILE"])
"""
STAND_IN = """
import os, signal, sys, time
me, rank = os.environ["STREAMRL_PROCESS"], os.environ.get("RANK", "")
def write(line): print(me, line, os.environ.get("MASTER_PORT", ""), os.getpid(), file=open("seen.txt", "a"), flush=True)
def terminated(number, frame):
    write(signal.Signals(number).name)
    if rank == "0": open("rank-0-done", "w")
    if not os.path.exists(me + ".deaf"): sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, terminated)
write("starts")
while not os.path.exists("result.json" if not rank or rank == "0" else "rank-0-done"):
    time.sleep(0.01)
    os.utime(os.environ["STREAMRL_HEARTBEAT_FILE"])
    if os.path.exists(me + ".code"): code = int(open(me + ".code").read()); os.remove(me + ".code"); print("oh no"); sys.exit(code)
"""


class Stage:
    """A supervisor over stand-ins, and what they wrote."""

    def __init__(self, supervisor: Supervisor, task: asyncio.Task[None], said: list[str]) -> None:
        self.folder, self.supervisor, self.task, self.said = supervisor.folder.path, supervisor, task, said

    def seen(self, name: str) -> list[tuple[str, str, int]]:
        """(event, port to meet at, process id) of a process, over all its lives."""
        with suppress(FileNotFoundError):
            rows = [line.split(" ") for line in (self.folder / "seen.txt").read_text().splitlines()]
            return [(event, port, int(pid)) for who, event, port, pid in rows if who == name]
        return []

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - other processes set no event
                await asyncio.sleep(0.01)  # a poll with a deadline

    async def lives(self, name: str, count: int) -> None:
        """Until a process was started so many times."""
        await self.until(lambda: [event for event, *_ in self.seen(name)].count("starts") >= count)

    def alive(self, name: str) -> bool:
        process = self.supervisor.workers.processes.get(name)
        return process is not None and process.returncode is None

    def kill(self, name: str) -> None:
        os.kill(self.seen(name)[-1][2], signal.SIGKILL)

    async def ranks_live(self, ranks: int, count: int) -> None:
        """Until each rank was started so many times."""
        for rank in range(ranks):
            await self.lives(f"trainer-{rank}", count)

    def end(self) -> None:
        (self.folder / keys.FILE_RESULT).write_text("{}")

    async def ended(self) -> None:
        """Until the supervisor is done."""
        await asyncio.wait_for(self.task, DEADLINE_S)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins in place of the workers, and short waits."""
    monkeypatch.setattr(plan_module, "PACKAGE", "stand_ins")
    monkeypatch.setattr(unit_module, "SETTLE_S", 0.2)
    monkeypatch.setattr(unit_module, "GROUP_END_S", 2.0)


@asynccontextmanager
async def running(
    tmp_path: Path,
    *,
    ranks: int = 1,
    replicas: int = 1,
    max_restarts: int = 3,
    scheduler: str = SCHEDULER,
    liveness_s: float = LIVENESS_S,
) -> AsyncIterator[Stage]:
    """A run of stand-ins; whatever the test leaves is killed."""
    job = simulated_job()
    job["spec"]["trainer"] = {"processesPerNode": ranks}
    job["spec"]["generators"][0] = {"name": "sim", "engine": {"hf": {}}, "scaling": {"auto": {"maxReplicas": 4}}}
    made = create_folder(parse_job(job), base_dir=tmp_path, parent=tmp_path)
    (made.path / "stand_ins").mkdir()
    for role in ("scheduler", "trainer", "generator"):
        (made.path / f"stand_ins/{role}.py").write_text(scheduler if role == "scheduler" else STAND_IN)
    said: list[str] = []
    plan = plan_run(made.job.spec, cpus=(0,))
    supervisor = Supervisor(
        made, plan=plan, shared_env={}, max_restarts=max_restarts, liveness_s=liveness_s, say=said.append
    )

    async def no_scaling() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(supervisor.run(replicas={"sim": replicas}, scaling=no_scaling), name="run")
    try:
        yield Stage(supervisor, task, said)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, RunFailedError):
            await task


async def test_when_a_rank_dies_all_begin_again_at_a_new_port_as_one_restart(tmp_path: Path) -> None:
    async with running(tmp_path, ranks=3) as stage:
        await stage.ranks_live(3, 1)
        (stage.folder / "trainer-2.deaf").touch()  # as in a collective: no signal is heard
        stage.kill("trainer-1")
        await stage.ranks_live(3, 2)
        ports = {
            rank: [port for event, port, _ in stage.seen(f"trainer-{rank}") if event == "starts"] for rank in range(3)
        }
        assert ports[0] == ports[1] == ports[2]
        assert len(set(ports[0])) == 2
        assert stage.said == ["trainer-1 was killed by SIGKILL; starting all 3 ranks again (1 of 3)"]
        assert [event for event, *_ in stage.seen("trainer-2")].count("starts") == 2
        assert len(stage.seen("generator-sim-0")) == 1, "others go on"
        stage.end()
        await stage.ended()


async def test_when_a_rank_freezes_it_is_told_and_all_begin_again(tmp_path: Path) -> None:
    async with running(tmp_path, ranks=2, liveness_s=6.0) as stage:
        await stage.ranks_live(2, 1)
        (stage.folder / keys.DIR_HEARTBEATS / "ranker").touch()  # of a process that is the scheduler's, and has ended
        os.kill(stage.seen("trainer-1")[-1][2], signal.SIGSTOP)
        await stage.ranks_live(2, 2)
        (again,) = [line for line in stage.said if "trainer-1" in line]
        assert again.startswith("trainer-1 was killed by SIGKILL; starting all 2 ranks again (")
        log = (stage.folder / "logs" / "trainer-1.log").read_text()
        assert "trainer-1 has shown no sign of life for 2 s, since " in log
        ((_, notice),) = read_silences([stage.folder / keys.DIR_HEARTBEATS]).items()
        assert notice.message.endswith(": it is killed")
        assert notice.message in log
        assert not notice.holds
        stage.end()
        await stage.ended()


async def test_what_one_rank_says_of_the_users_mistake_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "SETTLE_S", DEADLINE_S)  # it ends by itself, when the machine lets it
    async with running(tmp_path, ranks=2) as stage:
        await stage.ranks_live(2, 1)
        (stage.folder / "code").write_text("2")
        (stage.folder / "code").rename(stage.folder / "trainer-0.code")  # whole when it is seen
        stage.kill("trainer-1")
        with pytest.raises(RunFailedError, match="oh no"):
            await stage.ended()


async def test_too_many_deaths_of_ranks_end_the_run(tmp_path: Path) -> None:
    async with running(tmp_path, ranks=2, max_restarts=1) as stage:
        for life in (1, 2):
            await stage.ranks_live(2, life)
            stage.kill("trainer-0")
        with pytest.raises(RunFailedError, match=r"after 1 restarts \(failurePolicy.maxRestarts\)"):
            await stage.ended()


async def test_at_the_end_all_ranks_end_by_themselves(tmp_path: Path) -> None:
    async with running(tmp_path, ranks=2) as stage:
        await stage.lives("trainer-1", 1)
        await stage.lives("trainer-0", 1)
        stage.end()
        await stage.until(lambda: not stage.alive("trainer-0"))
        (stage.folder / "rank-0-done").touch()  # as rank 0 tells them
        await stage.ended()
        assert [event for event, *_ in stage.seen("trainer-1")] == ["starts"]
        assert stage.said == []


async def test_a_stop_asks_rank_0_first_and_generators_to_end_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FOLLOWER_TIMEOUT_S", "GENERATOR_TIMEOUT_S"):
        monkeypatch.setattr(supervisor_module, name, DEADLINE_S)
    async with running(tmp_path, ranks=2) as stage:
        for name in ("trainer-0", "trainer-1", "generator-sim-0"):
            await stage.lives(name, 1)
        await stage.supervisor.stop()
        await stage.ended()
        events = {
            name: [event for event, *_ in stage.seen(name)][1:]
            for name in ("trainer-0", "trainer-1", "generator-sim-0")
        }
        assert events == {"trainer-0": ["SIGTERM"], "trainer-1": [], "generator-sim-0": ["SIGINT"]}
        assert stage.said == []


async def test_generators_come_and_the_highest_go_in_peace(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.lives("generator-sim-0", 1)
        stage.supervisor.resize("sim", replicas=3)
        for ordinal in (1, 2):
            await stage.lives(f"generator-sim-{ordinal}", 1)
        stage.supervisor.resize("sim", replicas=2)
        await stage.until(lambda: not stage.alive("generator-sim-2"))
        assert [event for event, *_ in stage.seen("generator-sim-2")] == ["starts", "SIGTERM"]
        stage.supervisor.resize("sim", replicas=2)  # asked at every poll
        assert [stage.alive(f"generator-sim-{ordinal}") for ordinal in range(3)] == [True, True, False]
        stage.kill("generator-sim-1")  # what is wanted comes back
        await stage.lives("generator-sim-1", 2)
        assert stage.said == ["generator-sim-1 was killed by SIGKILL; starting it again (1 of 3)"]
        stage.end()
        (stage.folder / "rank-0-done").touch()
        await stage.ended()


async def test_one_that_does_not_go_is_killed_and_its_ordinal_comes_back_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "LEAVE_GRACE_S", 0.5)
    async with running(tmp_path, replicas=2) as stage:
        await stage.lives("generator-sim-1", 1)
        (stage.folder / "generator-sim-1.deaf").touch()
        first = stage.supervisor.workers.processes["generator-sim-1"]
        stage.supervisor.resize("sim", replicas=1)
        stage.supervisor.resize("sim", replicas=2)  # wanted again, while it is still leaving
        assert await asyncio.wait_for(first.wait(), DEADLINE_S) == -signal.SIGKILL
        await stage.until(lambda: "generator-sim-1" not in stage.supervisor.members)
        assert len([event for event, *_ in stage.seen("generator-sim-1") if event == "starts"]) == 1
        stage.supervisor.resize("sim", replicas=2)
        await stage.lives("generator-sim-1", 2)
        assert stage.said == [], "an ordered end is no death"


async def test_one_that_is_let_go_while_it_starts_does_not_stay(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        await stage.lives("generator-sim-0", 1)
        for _ in range(3):
            stage.supervisor.resize("sim", replicas=2)
            await asyncio.sleep(0)  # the start has begun, the process is not known yet
            stage.supervisor.resize("sim", replicas=1)
            await stage.until(lambda: "generator-sim-1" not in stage.supervisor.members)
            assert not stage.alive("generator-sim-1")
        stage.end()
        await stage.ended()


async def test_others_are_not_sent_to_the_address_of_an_earlier_scheduler(tmp_path: Path) -> None:
    async with running(tmp_path) as stage:
        ends = stage.folder / keys.DIR_ENDPOINTS
        (ends / "scheduler.json").write_text('{"grpc": "127.0.0.1:9"}')  # before the run's first moment: none has begun
        await stage.lives("trainer-0", 1)
        assert stage.supervisor.workers.shared_env[keys.ENV_SCHEDULER_ADDRESS] == "127.0.0.1:1"
        stage.end()
        await stage.ended()


async def test_a_scheduler_that_dies_before_it_listens_is_started_again(tmp_path: Path) -> None:
    dies_once = 'import os\nif not os.path.exists("died"): open("died", "w"); os.kill(os.getpid(), 9)\n'
    async with running(tmp_path, scheduler=dies_once + SCHEDULER) as stage:
        await stage.lives("trainer-0", 1)
        assert stage.said == ["scheduler was killed by SIGKILL; starting it again (1 of 3)"]
        stage.end()
        await stage.ended()


async def test_what_an_earlier_life_said_is_not_told_as_the_reason(tmp_path: Path) -> None:
    dies = 'import os, sys\nif not os.path.exists("spoke"): open("spoke", "w"); sys.exit("the disk is full")\nos.kill(os.getpid(), 9)\n'
    async with running(tmp_path, scheduler=dies, max_restarts=1) as stage:
        with pytest.raises(RunFailedError, match=r"killed by SIGKILL after 1 restarts .*: it said nothing; see"):
            await stage.ended()
        assert stage.said == ["scheduler ended with exit code 1; starting it again (1 of 1)"]


async def test_a_stop_before_the_scheduler_listens_ends_the_run(tmp_path: Path) -> None:
    mute = 'import os, time\nopen("up", "w")\nwhile True: time.sleep(0.01)\n'
    async with running(tmp_path, scheduler=mute) as stage:
        await stage.until((stage.folder / "up").exists)
        await stage.supervisor.stop()
        await stage.ended()
        assert stage.said == []
        assert stage.seen("trainer-0") == []
