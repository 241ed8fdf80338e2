"""The data of a run changes while the run is stopped: it goes on only with the data that its journal was written with, unless it may."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from streamrl import keys
from streamrl.errors import EXIT_DATA_CHANGED, EXIT_USER_ERROR
from streamrl_workers.scheduler.journal.store import open_for_reading, open_for_writing
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.pods import Pods
from support.runs import LocalRun, streamrl, wait_for

STEPS = 10
HELD_AT = 6
"""After the first checkpoint."""
CHANGED = "spec.task.dataset: the data has changed since the journal was written; recorded: 180 rows to train on, 20 held out, sha256 "


def put_a_line_first(prompts: Path) -> None:
    """The smallest change that gives almost every index another row."""
    prompts.write_text(f'{{"prompt": "one more", "answer": "one more"}}\n{prompts.read_text()}')


def journal(folder: Path) -> list[str]:
    with closing(open_for_reading(folder / keys.FILE_JOURNAL)) as connection:
        return list(connection.iterdump())


@pytest.fixture
def stopped(tmp_path: Path) -> LocalRun:
    """A run that was stopped after its first checkpoint."""
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=STEPS)
    hold = Hold.on(job, tmp_path, step=HELD_AT)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(HELD_AT)
    assert run.interrupt() == 130, run.logs()
    hold.let_go()
    return run


def test_a_run_is_not_resumed_on_other_data_until_the_flag_allows_it(stopped: LocalRun, tmp_path: Path) -> None:
    before = journal(stopped.folder)
    put_a_line_first(tmp_path / "prompts.jsonl")
    stopped.resume()
    assert stopped.wait_end() == EXIT_USER_ERROR, stopped.logs()
    assert stopped.said().count(CHANGED) == 1, stopped.logs()
    assert "; now: 181 rows to train on, 20 held out, sha256 " in stopped.said()
    assert "allow other data: --allow-changed-data beside --resume" in stopped.said()
    assert journal(stopped.folder) == before
    stopped.resume("--allow-changed-data")
    assert stopped.wait_end() == 0, stopped.logs()
    assert f"goes on with other data, as is allowed: {CHANGED}" in stopped.logs()
    assert "spec.task.dataset: 181 rows to train on, 20 held out, sha256 " in stopped.assert_exact()


def test_a_journal_without_a_fingerprint_takes_that_of_now(stopped: LocalRun) -> None:
    """As one of an earlier release."""
    with closing(open_for_writing(stopped.folder / keys.FILE_JOURNAL)) as connection:
        connection.execute("DELETE FROM meta WHERE key = 'data'")
    assert "data       none recorded" in stopped.assert_exact()
    stopped.resume()
    assert stopped.wait_end() == 0, stopped.logs()
    log = (stopped.folder / "logs" / "scheduler.log").read_text()
    assert "the journal has no fingerprint of the data yet, and takes that of now: spec.task.dataset: 180 rows" in log
    assert "spec.seed: 0" in stopped.assert_exact()


def test_data_that_changes_under_a_run_is_found_when_it_is_opened_again(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=STEPS)
    hold = Hold.on(job, tmp_path, step=HELD_AT)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(HELD_AT)
    fresh = tmp_path / "prompts.new"  # replaced, as editors and downloads do: the open file stays as it is
    write_prompts(fresh)
    put_a_line_first(fresh)
    fresh.rename(tmp_path / "prompts.jsonl")
    run.kill_one("scheduler")
    hold.let_go()
    assert run.wait_end() == EXIT_USER_ERROR, run.logs()
    assert CHANGED in run.said()


@pytest.mark.soak
def test_stored_samples_are_shown_and_replayed_as_they_were(tmp_path: Path) -> None:
    """Neither opens the data set."""
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=2)
    job["spec"]["storage"]["archive"] = {"sharePercent": 100}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 0, run.logs()
    commands = ("replay", str(run.folder)), ("samples", str(run.folder))
    before = [streamrl(*command) for command in commands]
    put_a_line_first(tmp_path / "prompts.jsonl")
    after = [streamrl(*command) for command in commands]
    assert [(done.returncode, done.stdout) for done in after] == [(0, done.stdout) for done in before]
    assert "compared steps 1 to 2: all are the same" in after[0].stdout


def test_the_flag_goes_with_a_run_that_is_resumed(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    run = LocalRun.start(simulated_job(), folder=tmp_path / "run", base_dir=tmp_path, args=["--allow-changed-data"])
    assert run.wait_end() == EXIT_USER_ERROR
    assert "--allow-changed-data: goes with --resume" in run.said()
    assert not (tmp_path / "run").exists()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """A job in pods, whose scheduler has begun a journal and was ended."""
    document = simulated_job(steps=STEPS)
    document["metadata"]["namespace"] = "team"
    made = Pods.make(document, base=tmp_path, secure=False)
    write_prompts(made.run_dir / "prompts.jsonl")
    restarted(made)
    yield made
    made.close()


def restarted(pods: Pods, **environment: str) -> None:
    """Start the scheduler, wait until it serves, and end it as a kubelet does."""
    pods.start("scheduler", **environment)
    wait_for(pods.numbers, what=f"the scheduler; {pods.logs()}")
    pods.terminate("scheduler")


def test_a_scheduler_in_a_pod_waits_for_its_data(pods: Pods) -> None:
    word = pods.base / "termination-log"
    word.touch()
    put_a_line_first(pods.run_dir / "prompts.jsonl")
    for _ in range(2):  # as often as a kubelet starts it
        pods.start("scheduler", **{keys.ENV_TERMINATION_FILE: str(word)})
        assert pods.wait("scheduler") == EXIT_DATA_CHANGED, pods.logs()
    assert word.read_text().startswith(CHANGED)
    assert "spec.task.allowChangedData while the job is suspended" in word.read_text()
    assert not (pods.run_dir / keys.FILE_RESULT).exists(), "the run has not ended"
    write_prompts(pods.run_dir / "prompts.jsonl")
    restarted(pods)


def test_a_scheduler_in_a_pod_goes_on_with_other_data_where_a_field_allows_it(pods: Pods) -> None:
    put_a_line_first(pods.run_dir / "prompts.jsonl")
    file = pods.base / "job" / keys.FILE_JOB
    document = json.loads(file.read_text())
    document["spec"]["task"]["allowChangedData"] = True
    file.write_text(json.dumps(document))
    restarted(pods)
    assert f"goes on with other data, as is allowed: {CHANGED}" in pods.text("scheduler")
