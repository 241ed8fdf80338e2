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
from streamrl_cli.runner.folder import create_folder, hold, newest_folder, open_folder
from streamrl_cli.runner.plan import plan_run
from streamrl_cli.runner.prepare import prepare_model
from streamrl_cli.runner.unit import judge_exit
from support.jobs import simulated_job


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
