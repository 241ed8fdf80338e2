"""A pool on the trainer's devices beside one of its own, in real runs: exact with kills, and held up by nobody."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.gates import REWARD, Gate
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, wait_for

LENT = "generator-lent-0"
VICTIMS = (LENT, "trainer-0", LENT, "generator-sim-0", "scheduler", LENT)
"""One after the other, some steps apart."""
RUN_STEPS, APART = 32, 4


def lending_job(*, staleness: int, **pipeline: Any) -> dict[str, Any]:
    job = simulated_job(steps=RUN_STEPS, staleness=staleness, replicas=1, slots=4, meanTokens=20.0)
    job["spec"]["pipeline"] |= pipeline
    own = job["spec"]["generators"][0]
    job["spec"]["generators"].append({**own, "name": "lent", "devices": "Trainer"})
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.05, "secondsPerToken": 1e-4}
    return job


def parts(run: LocalRun, process: str) -> dict[str, float]:
    """Seconds by part, over all lives of a process."""
    found: dict[str, float] = {}
    for line in run.walls():
        if line["process"] == process:
            assert sum(line["parts"].values()) == pytest.approx(line["wall_s"], rel=0.01, abs=1e-3), line
            found = {name: found.get(name, 0.0) + seconds for name, seconds in line["parts"].items()}
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_lent_pool_works_and_waits_and_nothing_is_lost_when_it_dies(staleness: int, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    job, gate = lending_job(staleness=staleness), Gate.shut(tmp_path)
    job["spec"]["task"]["rewards"] = [REWARD]
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    for number, victim in enumerate(VICTIMS):
        step = 2 + number * APART
        gate.until(lambda step=step: run.steps() >= step, what=f"step {step}; {run.logs()}")
        run.kill_one(victim)
    gate.open()
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == RUN_STEPS
    run.assert_exact()
    lent = parts(run, LENT)
    assert lent["busy"] + lent["skew"] > 0
    assert lent["pipeline_phase"] > 0, "it waits while the trainer computes"
    assert parts(run, "generator-sim-0")["pipeline_phase"] == 0, "the other pool does not"


@pytest.mark.timeout(600)
def test_a_frozen_lent_generator_holds_up_no_step(tmp_path: Path) -> None:
    """The trainer asks nobody for its devices; what a silent generator holds is made by others."""
    write_prompts(tmp_path / "prompts.jsonl")
    run = LocalRun.start(lending_job(staleness=1), folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(3)
    pid = run.freeze(LENT)
    before = run.steps()
    wait_for(lambda: run.steps() >= min(before + 4, RUN_STEPS), what=f"steps without it; {run.logs()}")
    os.kill(pid, signal.SIGCONT)
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
