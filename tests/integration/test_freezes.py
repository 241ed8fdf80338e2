"""Workers that are frozen (SIGSTOP): they end nothing and say nothing, so the runner must.

Simulated engine and trainer; everything else is real: processes, gRPC, journal, checkpoints. After each run
`streamrl journal check` proves invariant 1 from journal and checkpoint alone.
"""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from streamrl.keys import ENV_LIVENESS_SECONDS
from streamrl.liveness import word_s
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun

STEPS = 40
STEP_S = 0.1
BOUND_S = 9.0
"""Instead of 90 s."""
SILENT, KILLED, ALIVE = "has shown no sign of life for", "no sign of life since", "shows signs of life again"


def job(*, step_s: float = STEP_S) -> dict[str, Any]:
    document = simulated_job(steps=STEPS, replicas=1)
    document["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": step_s}
    return document


def start(document: dict[str, Any], tmp_path: Path) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    return LocalRun.start(document, folder=tmp_path / "run", base_dir=tmp_path)


def frozen(name: str, tmp_path: Path) -> tuple[LocalRun, int]:
    """A run in its midst, and the process id of the worker that is frozen."""
    document = job()
    hold = Hold.on(document, tmp_path, step=8)
    run = start(document, tmp_path)
    run.wait_steps(8)
    pid = run.freeze(name)
    hold.let_go()
    return run, pid


def assert_whole(run: LocalRun) -> None:
    assert run.wait_end() == 0, run.logs()
    assert (run.result()["status"], run.steps()) == ("succeeded", STEPS)
    run.assert_exact()


@pytest.mark.parametrize("name", ["scheduler", "trainer-0", "generator-sim-0"])
def test_a_frozen_worker_is_told_and_replaced(*, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, str(BOUND_S))
    run, pid = frozen(name, tmp_path)
    run.wait_said(f"{name} {SILENT}")
    run.wait_said(f"{name} was killed by SIGKILL; starting it again")
    run.wait_replaced(name, pid=pid)
    assert_whole(run)
    log = (run.folder / "logs" / f"{name}.log").read_text()
    assert int(re.findall(rf"{name} {SILENT} (\d+) s", log)[0]) >= word_s(BOUND_S)


def test_who_comes_back_in_time_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, str(6 * BOUND_S))
    run, pid = frozen("trainer-0", tmp_path)
    run.wait_said(f"trainer-0 {SILENT}")
    os.kill(pid, signal.SIGCONT)
    run.wait_said(f"trainer-0 {ALIVE}")
    assert_whole(run)
    assert "starting it again" not in (tmp_path / "run.out").read_text()


def test_a_bound_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, "soon")
    run = start(job(), tmp_path)
    assert run.wait_end() == 2
    said = (tmp_path / "run.out").read_text()
    assert said.count("\n") == 1, said
    assert f"{ENV_LIVENESS_SECONDS}: must be a number of at least 3" in said


def test_a_run_that_does_not_move_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, "6")
    run = start(job(step_s=1000.0), tmp_path)
    run.wait_said("though every process is alive: trainer-0 is at work (busy); generator-sim-0 waits (")
    run.process.kill()
