"""Trackers with their real packages, in real runs: they hold what the run's files say, and a run goes on without them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl import keys
from streamrl_workers.trackers.registry import MODULE
from support.jobs import simulated_job, write_prompts
from support.runs import wait_for
from support.tracked import TRACKERS, expected, held
from support.worker_processes import Workers

DEADLINE_S = 400.0
"""A tracker's process runs at the lowest priority, by design."""
pytestmark = pytest.mark.timeout(900)
STEPS = 24


def prepared(folder: Path, trackers: Mapping[str, Any], *, steps: int = STEPS) -> Workers:
    write_prompts(folder / "prompts.jsonl")
    job = simulated_job(steps=steps, replicas=1)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.05}
    job["spec"]["storage"]["checkpoints"] = {"intervalSteps": 2, "keepLast": 1}
    job["spec"]["trackers"] = {**trackers, "sampleIntervalSteps": 4}
    return Workers.prepare(job, folder=folder / "run")


@pytest.fixture
def workers_of(tmp_path: Path) -> Iterator[Any]:
    started: list[Workers] = []

    def start(trackers: Mapping[str, Any], **options: int) -> Workers:
        started.append(prepared(tmp_path, trackers, **options))
        return started[-1]

    yield start
    for workers in started:
        workers.close()


def process_of(scheduler: int, key: str) -> psutil.Process | None:
    """The process of a tracker, if it lives; their first frame is not on the command line, their heartbeat's name is in the environment."""
    for child in psutil.Process(scheduler).children():
        if MODULE in child.cmdline() and f"tracker-{key}" in child.environ().get(keys.ENV_HEARTBEAT_FILE, ""):
            return child
    return None


def position(workers: Workers, key: str) -> int:
    """Steps that a tracker has been told for good."""
    file = workers.folder / keys.DIR_TRACKERS / f"{key}.json"
    return int(json.loads(file.read_text())["steps"]) if file.exists() else 0


def assert_equal(workers: Workers, key: str) -> None:
    """Every value of every step, once."""
    found, wanted = held(workers.folder, key), expected(workers.folder)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in values], (key, name)
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in values], rel=1e-6), name


def test_every_tracker_holds_every_step_once_across_restarts_of_the_scheduler(workers_of: Any) -> None:
    workers = workers_of(TRACKERS)
    workers.start_all()
    for key in TRACKERS:
        wait_for(lambda key=key: position(workers, key) > 0, what=f"the first step in {key}", deadline_s=DEADLINE_S)
    workers.kill("scheduler")
    workers.start_scheduler()
    assert workers.wait("scheduler") == 0, workers.text("scheduler")
    assert len(expected(workers.folder)["train/reward_mean"]) == STEPS
    for key in TRACKERS:
        assert_equal(workers, key)
    assert {name.partition("/")[0] for name in expected(workers.folder)} == {"train", "eval", "bubbles", "cost"}
