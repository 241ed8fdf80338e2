"""The local runner's decisions: which processes, what after a death, which folder."""

import fcntl
import json
import logging
import sys
from pathlib import Path

import pytest

from streamrl import keys
from streamrl.errors import UserError
from streamrl.spec import parse_job
from streamrl_cli.jobfile import load_job
from streamrl_cli.runner.folder import create_folder, hold, newest_folder, open_folder
from streamrl_cli.runner.plan import plan_run
from streamrl_cli.runner.prepare import prepare_model
from streamrl_cli.runner.unit import judge_exit
from streamrl_workers.scheduler.records import StepTaken
from support.command import streamrl
from support.histories import attempt, plan
from support.jobs import simulated_job, write_prompts
from support.journals import OpenJournal


def test_the_plan_names_every_process() -> None:
    job = parse_job(simulated_job(replicas=3))
    plan = plan_run(job.spec, cpus=(0, 1), signals_port=9100)
    generators = [plan.member("sim", ordinal=ordinal) for ordinal in range(3)]
    assert [one.name for one in (plan.scheduler, *plan.ranks, *generators)] == [
        "scheduler",
        "trainer-0",
        "generator-sim-0",
        "generator-sim-1",
        "generator-sim-2",
    ]
    assert plan.scheduler.env[keys.ENV_SIGNALS_PORT] == "9100"
    assert {one.env[keys.ENV_POOL] for one in generators} == {"sim"}


@pytest.mark.parametrize(
    ("exit_code", "run_ended", "restarts", "action", "words"),
    [
        (0, True, 0, "finish", "is done"),
        (-9, True, 0, "finish", "is done"),
        (0, False, 0, "restart", "left before the run had ended"),
        (-9, False, 0, "restart", "killed by SIGKILL"),
        (75, False, 1, "restart", "asked to be started again"),
        (1, False, 4, "restart", "exit code 1"),
        (1, False, 5, "fail", "after 5 restarts"),
        (2, False, 0, "fail", "refused its input"),
    ],
)
def test_a_death_is_judged_by_its_exit_code(
    *, exit_code: int, run_ended: bool, restarts: int, action: str, words: str
) -> None:
    verdict = judge_exit(
        name="trainer-0", exit_code=exit_code, run_ended=run_ended, quick_deaths=1, restarts=restarts, max_restarts=5
    )
    assert verdict.action == action
    assert words in verdict.reason


def test_backoff_grows_with_quick_deaths_of_the_same_process_and_is_bounded() -> None:
    waits = [
        judge_exit(name="x", exit_code=1, run_ended=False, quick_deaths=n, restarts=20, max_restarts=100).backoff_s
        for n in range(1, 12)
    ]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.25, 10.0)


def test_a_folder_opens_as_it_was_made(tmp_path: Path) -> None:
    job = parse_job(simulated_job())
    made = create_folder(job, base_dir=tmp_path, parent=tmp_path / "runs")
    assert open_folder(made.path) == made
    assert newest_folder(tmp_path / "runs") == made.path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "is not a run folder"),
        (lambda path: (path / keys.FILE_JOB).write_text("{"), "is not a run folder"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(make, words: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=words):
        open_folder(tmp_path)


def test_a_broken_job_file_is_named(tmp_path: Path) -> None:
    made = create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path)
    made.file(keys.FILE_JOB).write_text('{"half":')
    with pytest.raises(UserError, match="is not JSON"):
        open_folder(made.path)


def test_a_used_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UserError, match="new or empty folder"):
        create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path, path=tmp_path)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_run_without_a_step_leaves_its_folder_to_the_next_one(tmp_path: Path) -> None:
    """Logs, checkpoint that was taken over and half a journal of a run that a mistake has ended before its first step."""
    job, path = parse_job(simulated_job()), tmp_path / "run"
    create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)
    (path / "checkpoints/step-000007").mkdir()
    for name in (
        "adopted.json",
        "journal.sqlite",
        "journal.sqlite-wal",
        "metrics/steps.jsonl",
        "logs/scheduler.log",
        "lock",
    ):
        (path / name).touch()
    again = parse_job(simulated_job(steps=3))
    create_folder(again, base_dir=tmp_path, parent=tmp_path, path=path)
    assert open_folder(path).job == again
    assert not any((path / name).exists() for name in ("adopted.json", "journal.sqlite", "logs/scheduler.log"))


@pytest.mark.parametrize("left", ["notes.txt", "metrics/steps.jsonl", "checkpoints/step-000001/model.safetensors"])
def test_a_run_with_a_step_or_with_something_else_keeps_its_folder(left: str, tmp_path: Path) -> None:
    job, path = parse_job(simulated_job()), tmp_path / "run"
    create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)
    (path / "lock").touch()
    (path / left).parent.mkdir(exist_ok=True)
    (path / left).write_text("x")
    with pytest.raises(UserError, match="or a run's without a step"):
        create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)
    assert (path / left).read_text() == "x"


async def test_a_step_of_the_journal_without_a_line_keeps_the_folder(tmp_path: Path) -> None:
    job, path = parse_job(simulated_job()), tmp_path / "run"
    create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)
    (path / "lock").touch()
    opened = OpenJournal(path / keys.FILE_JOURNAL)
    await opened.write([attempt(1, 0), *plan(0, 1), StepTaken(attempt=1, step=0, group_ids=(0,))])
    opened.journal.close()
    with pytest.raises(UserError, match="or a run's without a step"):
        create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)


def test_a_folder_whose_run_has_not_begun_is_left_to_it(tmp_path: Path) -> None:
    """Another start that copies a checkpoint into it holds no lock yet."""
    job, path = parse_job(simulated_job()), tmp_path / "run"
    create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)
    with pytest.raises(UserError, match="has a run that has not begun"):
        create_folder(parse_job(simulated_job(steps=3)), base_dir=tmp_path, parent=tmp_path, path=path)
    assert open_folder(path).job == job


def test_a_run_that_goes_on_keeps_its_folder(tmp_path: Path) -> None:
    job, path = parse_job(simulated_job()), tmp_path / "run"
    create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)
    with hold(path / "lock", run="r"), pytest.raises(UserError, match="in use by another"):
        create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)


def test_a_run_is_resumed_with_its_own_job_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    file, path = tmp_path / "job.yaml", tmp_path / "run"
    file.write_text(json.dumps(simulated_job()))
    job = load_job(file, overrides=[])
    made = create_folder(job, base_dir=tmp_path, parent=tmp_path, path=path)
    made.file(keys.FILE_RESULT).write_text(json.dumps({"status": "succeeded", "steps": 20}))
    assert streamrl(capsys, "run", str(file), "--resume", str(path)).code == 0
    changes = ("--set", "spec.task.groupSize=8", "--set", "spec.task.processes=3")
    outcome = streamrl(capsys, "run", str(file), "--resume", str(path), *changes)
    said = "spec.task.groupSize is 8, there 4; spec.task.processes is 3, there not set"
    fix = "leave FILE out to go on with the job as the run has it, or start a new run"
    assert (outcome.code, outcome.err) == (2, [f"{file}: differs from the job of {path}: {said}; {fix}"])


def test_no_run_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found no run"):
        newest_folder(tmp_path)


def test_one_runner_per_folder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by another"), hold(lock, run="r"):
            pass
    with hold(lock, run="r"):
        pass


async def test_the_preparation_watches_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(
        f'#!/bin/sh\ntest -p /proc/self/fd/${keys.ENV_PARENT_WATCH_FD} && echo \'{{"event": "ready", "path": "m"}}\'\n'
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    made = create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path)
    assert await prepare_model(made, report=lambda event: None, say=print) == "m"


async def test_a_preparation_that_freezes_is_told_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "python").write_text(
        f"#!/bin/sh\ntest -e {tmp_path}/second || {{ touch {tmp_path}/second; kill -STOP $$; }}\n"
        'echo \'{"event": "ready", "path": "m"}\'\n'
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv(keys.ENV_LIVENESS_SECONDS, "3")
    made = create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path)
    said: list[str] = []
    with caplog.at_level(logging.INFO):
        assert await prepare_model(made, report=lambda event: None, say=said.append) == "m"
    assert "prepare has shown no sign of life for " in caplog.text
    assert "prepare has shown no sign of life since " in caplog.text
    again, *_ = said  # the second one may be slow to speak, too
    assert again == "prepare was killed by SIGKILL; starting it again (1 of 100)"


def test_the_stored_job_is_whole(tmp_path: Path) -> None:
    made = create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path)
    stored = json.loads(made.file(keys.FILE_JOB).read_text())
    assert stored["spec"]["trainer"]["engine"] == {
        "simulated": {"secondsPerStep": 0.01, "secondsPerToken": 0.0, "weightBytes": 4096}
    }
