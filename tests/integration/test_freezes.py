"""Workers that are frozen (SIGSTOP): they end nothing and say nothing, so the runner must.

Simulated engine and trainer; everything else is real: processes, gRPC, journal, checkpoints. After each run
`streamrl journal check` proves invariant 1 from journal and checkpoint alone.
"""

import os
import signal
from pathlib import Path

import pytest

from streamrl.keys import ENV_LIVENESS_SECONDS
from streamrl.liveness import word_s
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun

STEPS = 40
STEP_S = 0.1
BOUND_S = 9.0
"""Instead of 90 s."""
SILENT, KILLED, ALIVE = "has shown no sign of life for", "no sign of life since", "shows signs of life again"


def start(tmp_path: Path, *, step_s: float = STEP_S) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=STEPS, replicas=1)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": step_s}
    return LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)


def assert_whole(run: LocalRun) -> None:
    assert run.wait_end() == 0, run.logs()
    assert (run.result()["status"], run.steps()) == ("succeeded", STEPS)
    run.assert_exact()


@pytest.mark.parametrize("name", ["scheduler", "trainer-0", "generator-sim-0"])
def test_a_frozen_worker_is_told_and_replaced(*, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, str(BOUND_S))
    run = start(tmp_path)
    run.wait_steps(8)
    pid = run.freeze(name)
    run.wait_said(f"{name} {SILENT} {word_s(BOUND_S):.0f} s")
    run.wait_said(f"{name} was killed by SIGKILL; starting it again")
    run.wait_replaced(name, pid=pid)
    assert_whole(run)
    assert f"{name} {SILENT}" in (run.folder / "logs" / f"{name}.log").read_text()


def test_who_comes_back_in_time_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, str(6 * BOUND_S))
    run = start(tmp_path)
    run.wait_steps(8)
    pid = run.freeze("trainer-0")
    run.wait_said(f"trainer-0 {SILENT}")
    os.kill(pid, signal.SIGCONT)
    run.wait_said(f"trainer-0 {ALIVE}")
    assert_whole(run)
    assert "starting it again" not in (tmp_path / "run.out").read_text()


def test_a_bound_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, "soon")
    run = start(tmp_path)
    assert run.wait_end() == 2
    said = (tmp_path / "run.out").read_text()
    assert said.count("\n") == 1, said
    assert f"{ENV_LIVENESS_SECONDS}: must be a number of at least 3" in said


def test_a_run_that_does_not_move_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, "6")
    run = start(tmp_path, step_s=1000.0)
    run.wait_said("though every process is alive: trainer-0 is at work (busy); generator-sim-0 waits (")
    run.process.kill()
