"""Trackers with their real packages, in real runs: they hold what the run's files say, and a run goes on without them."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl import keys
from streamrl.spec import parse_job
from streamrl_workers.scheduler.server.lifetime import ProcessExit
from streamrl_workers.scheduler.server.tracker_clients import TrackerClients, TrackerTimes
from streamrl_workers.trackers.main import MOST_MEMORY_BYTES
from streamrl_workers.trackers.registry import MODULE
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import wait_for
from support.tracked import TRACKERS, expected, held, wandb_records
from support.worker_processes import Workers

DEADLINE_S = 400.0
"""A tracker's process runs at the lowest priority, by design."""
pytestmark = pytest.mark.timeout(900)
STEPS, HELD_AT = 24, 6


@dataclass
class TrackedWorkers:
    """Workers of a job with trackers that is held at a step."""

    workers: Workers
    hold: Hold

    @classmethod
    def prepare(cls, folder: Path, trackers: Mapping[str, Any]) -> "TrackedWorkers":
        write_prompts(folder / "prompts.jsonl")
        job = simulated_job(steps=STEPS, replicas=1)
        job["spec"]["storage"]["checkpoints"] = {"intervalSteps": 2, "keepLast": 1}
        job["spec"]["trackers"] = {**trackers, "sampleIntervalSteps": 4}
        hold = Hold.on(job, folder, step=HELD_AT)
        return cls(Workers.prepare(job, folder=folder / "run"), hold)

    def is_ready(self, key: str) -> bool:
        return bool(self.workers.numbers().get("trackers", {}).get(key, {}).get("state") == "ready")

    def wait_ready(self, *keys_of: str) -> None:
        for key in keys_of:
            wait_for(lambda key=key: self.is_ready(key), what=f"{key}: {self.said()}", deadline_s=DEADLINE_S)

    def finish(self) -> None:
        self.hold.let_go()
        assert self.workers.wait("scheduler") == 0, self.said()
        assert len(expected(self.workers.folder)["train/reward_mean"]) == STEPS

    def said(self) -> str:
        return self.workers.text("scheduler")


@pytest.fixture
def tracked_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Workers whose scheduler watches the hearts of its helpers."""
    monkeypatch.setenv(keys.ENV_HEARTBEAT_FILE, str(tmp_path / "heartbeats" / "scheduler"))
    monkeypatch.setenv(keys.ENV_LIVENESS_SECONDS, "20")
    started: list[TrackedWorkers] = []

    def start(trackers: Mapping[str, Any]) -> TrackedWorkers:
        started.append(TrackedWorkers.prepare(tmp_path, trackers))
        return started[-1]

    yield start
    for one in started:
        one.workers.close()


def process_of(scheduler: int, key: str) -> psutil.Process:
    """The process of a tracker: its heartbeat has its name. Others come and go."""
    for child in psutil.Process(scheduler).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            heartbeat = child.environ().get(keys.ENV_HEARTBEAT_FILE, "")
            if MODULE in child.cmdline() and heartbeat.endswith(f"tracker-{key}"):
                return child
    raise AssertionError(f"{key} has no process")


def position(workers: Workers, key: str) -> int:
    """Steps that a tracker has been told for good."""
    file = workers.folder / keys.DIR_TRACKERS / f"{key}.json"
    return int(json.loads(file.read_text())["steps"]) if file.exists() else 0


def assert_equal(run: Path, key: str) -> None:
    """Every value of every step, once."""
    found, wanted = held(run, key), expected(run)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in values], (key, name)
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in values], rel=1e-6), name


def test_every_tracker_holds_every_step_once_across_a_restart_of_the_scheduler(tracked_of: Any) -> None:
    run: TrackedWorkers = tracked_of(TRACKERS)
    workers = run.workers
    workers.start_all()
    for key in TRACKERS:
        wait_for(lambda key=key: position(workers, key) >= HELD_AT, what=f"{key}: {run.said()}", deadline_s=DEADLINE_S)
    workers.kill("scheduler")
    workers.start_scheduler()
    run.wait_ready(*TRACKERS)
    run.finish()
    for key in TRACKERS:
        assert_equal(workers.folder, key)
    assert {name.partition("/")[0] for name in expected(workers.folder)} == {"train", "eval", "bubbles", "cost"}
    files = workers.folder / keys.DIR_TRACKERS
    assert len({record.run.run_id for record in wandb_records(files / "wandb") if record.HasField("run")}) == 1
    tables = list(files.glob("wandb/wandb/offline-run-*/files/media/table/samples_*.json"))
    assert "question " in tables[0].read_text()


def test_a_run_goes_on_when_its_trackers_are_killed_frozen_or_fail(tracked_of: Any) -> None:
    run: TrackedWorkers = tracked_of({"tensorBoard": {}, "mlflow": TRACKERS["mlflow"], "trackio": TRACKERS["trackio"]})
    workers = run.workers
    blocked = workers.folder / keys.DIR_TRACKERS / "trackio"
    blocked.parent.mkdir()
    blocked.write_text("no folder")
    workers.start_all()
    scheduler = workers.processes["scheduler"].pid
    run.wait_ready("tensorBoard", "mlflow")
    for key in ("tensorBoard", "mlflow"):
        assert process_of(scheduler, key).rlimit(psutil.RLIMIT_DATA)[0] == MOST_MEMORY_BYTES
    process_of(scheduler, "tensorBoard").kill()
    process_of(scheduler, "mlflow").send_signal(signal.SIGSTOP)
    for key in ("tensorBoard", "mlflow", "trackio"):
        wait_for(lambda key=key: workers.numbers()["trackers"][key]["deaths"] > 0, what=key, deadline_s=DEADLINE_S)
    assert "tracker tensorBoard: its process ended by signal 9; started again in 5 s, the run goes on" in run.said()
    assert "tracker mlflow: its process ended by signal 9; started again" in run.said()
    assert any("trackio: its process failed: [Errno 17]" in one["message"] for one in workers.numbers()["warnings"])
    run.wait_ready("tensorBoard", "mlflow")
    run.finish()
    assert run.said().count("WARNING streamrl.scheduler.trackers: tracker trackio") == 1
    for key in ("tensorBoard", "mlflow"):
        assert_equal(workers.folder, key)
    assert not psutil.pid_exists(scheduler)


async def test_a_server_that_never_answers_is_given_up_and_the_end_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: asked.append(writer), host="127.0.0.1")
    port = silent.sockets[0].getsockname()[1]
    job = simulated_job()
    job["spec"]["trackers"] = {"mlflow": {"trackingUri": f"http://127.0.0.1:{port}"}}
    times = TrackerTimes(start_s=1.0, first_pause_s=0.01, end_s=0.5)
    clients = TrackerClients(parse_job(job), run_dir=tmp_path, store_dir=tmp_path, times=times)
    clients.start()
    async with asyncio.timeout(DEADLINE_S):
        while clients.status()["mlflow"]["deaths"] < 2:  # noqa: ASYNC110 - a poll with a deadline: another process is awaited
            await asyncio.sleep(0.02)
        await clients.end(ProcessExit(exit_code=0))
    for writer in asked:
        writer.close()
    silent.close()
    await silent.wait_closed()
    (warning, *_) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(
        "tracker mlflow: its process did not begin the run in the tracker within 1 s; started again"
    )
    assert [one for one in psutil.Process().children() if MODULE in one.cmdline()] == []
