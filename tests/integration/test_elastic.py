"""Generators come and go with the queue, through `streamrl run`: simulated engines, everything else is real.

After each run `streamrl journal check` proves that no group was lost or trained twice.
"""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, wait_for

SLOW_GENERATION: dict[str, Any] = {"slots": 2, "latency": [{"batch": 1, "milliseconds": 20.0}], "meanTokens": 16.0}
"""One generator takes seconds for a step of 16 samples: samples queue, the trainer waits."""
COOLDOWN_S = 1.0


def elastic_job(*, initial: int, steps: int, step_s: float, **engine: Any) -> dict[str, Any]:
    job = simulated_job(steps=steps, **engine)
    scaling = {"initialReplicas": initial, "maxReplicas": 3, "cooldownSeconds": COOLDOWN_S}
    job["spec"]["generators"][0]["scaling"] = {"auto": scaling}
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": step_s}
    job["spec"]["task"]["evaluation"] = {"maxPrompts": 2, "intervalSteps": 100}
    return job


def start(job: dict[str, Any], tmp_path: Path) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    return LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)


def lines(run: LocalRun) -> list[dict[str, Any]]:
    file = run.folder / "metrics/scaling.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def sizes(run: LocalRun) -> list[int]:
    return [line["to"] for line in lines(run)]


def wait_size(run: LocalRun, size: int) -> None:
    """Until the pool is to have that size (or the run ends, which is a failure)."""
    wait_for(
        lambda: sizes(run)[-1:] == [size] or run.process.poll() is not None,
        what=f"{size} generators; {lines(run)} {run.logs()}",
    )
    assert sizes(run)[-1:] == [size], f"ended with {lines(run)}; {run.logs()}"


def assert_ends_exact(run: LocalRun, *, steps: int) -> None:
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == steps
    check = run.check()
    assert check.returncode == 0, f"{check.stdout}{check.stderr}\n{run.logs()}"


def restarts_told(run: LocalRun) -> list[str]:
    return re.findall(r"(\S+) [^\n]*; starting", (run.folder.parent / "run.out").read_text())


def test_a_queue_brings_generators_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    job = elastic_job(initial=1, steps=40, step_s=0.05, **SLOW_GENERATION)
    hold = Hold.on(job, tmp_path, step=36)
    run = start(job, tmp_path)
    wait_size(run, 3)
    newest = wait_for(lambda: run.pid_of("generator-sim-2"), what=f"the third generator; {run.logs()}")
    os.kill(newest, signal.SIGKILL)
    wait_for(lambda: run.pid_of("generator-sim-2") not in (None, newest), what=f"a new one; {run.logs()}")
    hold.let_go()
    assert_ends_exact(run, steps=40)
    assert sizes(run) == [1, 2, 3]
    assert all(re.search("≥ Δ'|samples wait for a slot", line["reason"]) for line in lines(run)[1:])
    assert restarts_told(run) == ["generator-sim-2"]
    out = (tmp_path / "run.out").read_text()
    assert "pool sim: 1 -> 2 replicas (" in out
    assert "Generators" in (run.folder / "report.html").read_text()


def test_when_training_is_the_slow_part_generators_go_in_peace(tmp_path: Path) -> None:
    run = start(elastic_job(initial=3, steps=30, step_s=1.0), tmp_path)
    wait_size(run, 1)
    wait_for(
        lambda: not run.pid_of("generator-sim-1") and not run.pid_of("generator-sim-2"),
        what=f"two generators to be gone; {run.logs()}",
    )
    assert_ends_exact(run, steps=30)
    assert sizes(run) == [3, 2, 1]
    assert all("of T_train" in line["reason"] for line in lines(run)[1:])
    assert restarts_told(run) == [], "an ordered end is no death"


def test_the_scheduler_dies_while_a_generator_leaves(tmp_path: Path) -> None:
    slow = {"slots": 8, "latency": [{"batch": 1, "milliseconds": 12.0}]}
    run = start(elastic_job(initial=3, steps=40, step_s=1.5, **slow), tmp_path)
    wait_for(lambda: 2 in sizes(run) or run.process.poll() is not None, what=f"the first to leave; {run.logs()}")
    assert run.kill("scheduler"), run.logs()
    wait_size(run, 1)
    assert_ends_exact(run, steps=40)
    assert sizes(run) == [3, 2, 1]
    assert "scheduler" in restarts_told(run)
    assert not {"generator-sim-2"} & set(restarts_told(run))


def test_interrupted_while_it_grows_the_run_stops_quickly_and_resumes_at_its_first_size(tmp_path: Path) -> None:
    run = start(elastic_job(initial=1, steps=30, step_s=0.05, **SLOW_GENERATION), tmp_path)
    wait_for(lambda: 2 in sizes(run) or run.process.poll() is not None, what=f"it to grow; {run.logs()}")
    assert run.interrupt() == 130, run.logs()
    assert run.check().returncode == 0
    before = sizes(run)
    assert before[:2] == [1, 2]
    run.resume()
    assert_ends_exact(run, steps=30)
    first = lines(run)[len(before)]
    assert (first["from"], first["to"]) == (0, 1)
