"""The trainer process (simulated engine) with a real scheduler and generator: checkpoints, ends, restarts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gates import REWARD, Gate
from support.jobs import simulated_job, write_prompts
from support.runs import streamrl, wait_for
from support.worker_processes import Workers

STEPS = 12
SAMPLES_BEFORE_LAST_EVALUATION = STEPS * 4 * 4 + 2 * 8 * 2
"""Of groups and of the two evaluations before it, a greedy and a sampled answer to each prompt."""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate.shut(tmp_path)


@pytest.fixture
def workers(tmp_path: Path, gate: Gate) -> Iterator[Workers]:
    """Nothing is trained before the gate lets it through."""
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=STEPS)
    job["spec"]["task"]["rewards"] = [REWARD]
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.1}
    job["spec"]["storage"]["checkpoints"] = {"intervalSteps": 3, "keepLast": 2}
    started = Workers.prepare(job, folder=tmp_path / "run")
    yield started
    started.close()


def _checkpoints(workers: Workers) -> list[str]:
    return sorted(path.name for path in (workers.folder / "checkpoints").glob("step-*"))


def _until_checkpoint(workers: Workers, gate: Gate, step: int) -> Path:
    directory = workers.folder / "checkpoints" / f"step-{step:08d}"
    gate.until(directory.exists, what=f"{directory}; {workers.text('trainer-0')}")
    return directory


def _history(workers: Workers, name: str) -> list[str]:
    history: list[str] = json.loads((workers.folder / "checkpoints" / name / "meta.json").read_text())["history"]
    return history


def _assert_exact(workers: Workers) -> None:
    check = streamrl("journal", "check", str(workers.folder))
    assert check.returncode == 0, check.stdout + check.stderr


def _finish(workers: Workers) -> None:
    for process in ("scheduler", "trainer-0", "generator-sim-0"):
        assert workers.wait(process) == 0, workers.text(process)
    assert _checkpoints(workers)[-1] == f"step-{STEPS:08d}"
    assert (workers.folder / "model" / "simulated.json").exists()
    assert sorted(path.name for path in workers.folder.glob(".partial*")) == []
    _assert_exact(workers)


def test_a_whole_run_leaves_checkpoints_an_export_and_a_bubble_partition(workers: Workers, gate: Gate) -> None:
    gate.open()
    workers.start_all()
    _finish(workers)
    assert _checkpoints(workers) == ["step-00000009", "step-00000012"]
    steps = [line for line in workers.lines("steps.jsonl") if "groups" in line]
    assert [line["step"] for line in steps] == list(range(STEPS))
    assert len(_history(workers, "step-00000012")) == STEPS
    assert _history(workers, "step-00000012")[:9] == _history(workers, "step-00000009")
    last = workers.lines("trainer-0.jsonl")[-1]
    assert last["wall_s"] == pytest.approx(sum(last["parts"].values()), rel=0.01)
    assert last["parts"]["busy"] >= STEPS * 0.1


def test_sigterm_keeps_the_steps_that_are_done(workers: Workers, gate: Gate) -> None:
    workers.start_all()
    _until_checkpoint(workers, gate, 3)
    gate.until(lambda: len(workers.lines("steps.jsonl")) >= 4, what="a step behind the checkpoint")
    assert workers.terminate("trainer-0") == 0, workers.text("trainer-0")
    saved = int(_checkpoints(workers)[-1].removeprefix("step-"))
    assert saved >= 4
    assert "asked to end: checkpoint of step" in workers.text("trainer-0") or saved % 3 == 0
    _assert_exact(workers)
    gate.open()
    workers.start("trainer-0")
    _finish(workers)


def test_killed_with_a_damaged_checkpoint_it_names_the_damage(workers: Workers, gate: Gate) -> None:
    workers.start_all()
    directory = _until_checkpoint(workers, gate, 3)
    workers.kill("trainer-0")
    for newer in _checkpoints(workers):
        (workers.folder / "checkpoints" / newer / "simulated.json").write_text("{")
    workers.start("trainer-0")
    assert workers.wait("trainer-0") == 2
    last_line = workers.text("trainer-0").splitlines()[-1]
    assert "holds no good checkpoint" in last_line
    assert f"{directory.name}: simulated.json is not what was written" in last_line


def test_a_killed_trainer_goes_on_and_repeats_the_recorded_steps(workers: Workers, gate: Gate) -> None:
    workers.start_all()
    _until_checkpoint(workers, gate, 6)
    workers.kill("trainer-0")
    before = _history(workers, _checkpoints(workers)[-1])
    gate.open()
    workers.start("trainer-0")
    _finish(workers)
    assert _history(workers, f"step-{STEPS:08d}")[: len(before)] == before


@pytest.mark.soak
def test_started_when_all_is_done_it_only_serves_until_stopped(workers: Workers, gate: Gate) -> None:
    """The last evaluation is still to be scored: the scheduler has not ended."""
    gate.let(SAMPLES_BEFORE_LAST_EVALUATION)
    workers.start_all()
    directory = workers.folder / "checkpoints" / f"step-{STEPS:08d}"
    wait_for(directory.exists, what=f"{directory}; {workers.text('trainer-0')}")
    workers.kill("trainer-0")
    gate.open()
    workers.start("trainer-0")
    _finish(workers)


def test_with_another_runs_token_it_ends_as_the_users_error(workers: Workers) -> None:
    workers.start_scheduler()
    workers.start("trainer-0", STREAMRL_TOKEN="of another run")
    assert workers.wait("trainer-0") == 2, workers.text("trainer-0")
    assert workers.text("trainer-0").splitlines()[-1].startswith("STREAMRL_TOKEN: is not the token of the scheduler")


def test_on_a_full_disk_for_its_samples_it_ends_as_the_users_error(workers: Workers) -> None:
    (workers.folder / "metrics").mkdir()
    (workers.folder / "metrics" / "trainer-0.jsonl").symlink_to("/dev/full")
    workers.start_all()
    assert workers.wait("trainer-0") == 2, workers.text("trainer-0")
    assert workers.text("trainer-0").splitlines()[-1].endswith("No space left on device; free or fix the disk")


def test_without_a_run_folder_it_says_what_is_missing() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "streamrl_workers.trainer"],
        env={"PATH": os.environ["PATH"]},
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stderr == "STREAMRL_RUN_DIR: must be set in a worker's environment; start workers with `streamrl run`\n"


def test_the_simulated_trainer_starts_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; import streamrl_workers.trainer.main; import streamrl_workers.trainer.engines.simulated;"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
