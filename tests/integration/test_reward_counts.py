"""Two rewards, one of which hangs for some samples: the run goes on, and everybody who looks is told."""

import json

import pytest

from streamrl_workers.scheduler.components import DROP_REASONS, FAILURE_KINDS
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, streamrl

STEPS = 12
HANGS = '''
def score(*, prompt, completion, answer, metadata):
    """Hangs on wrong answers to some questions; half a point for each right one."""
    if completion == "wrong" and int(prompt.split()[-1]) % 5 == 2:
        while True:
            pass
    return 0.5 * (completion == answer)
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    base = tmp_path_factory.mktemp("two-rewards")
    write_prompts(base / "prompts.jsonl")
    (base / "mine.py").write_text(HANGS)
    job = simulated_job(steps=STEPS)
    job["spec"]["task"]["rewards"] = [
        {"name": "answer", "weightPercent": 60, "exactMatch": {}},
        {"name": "style", "weightPercent": 40, "timeoutSeconds": 0.3, "python": {"function": "mine:score"}},
    ]
    made = LocalRun.start(job, folder=base / "run", base_dir=base)
    assert made.wait_end() == 0, made.logs()
    return made


def lines(run: LocalRun) -> list[dict]:
    return [json.loads(line) for line in (run.folder / "metrics/steps.jsonl").read_text().splitlines()]


def test_timeouts_are_counted_and_the_run_ends_well(run: LocalRun) -> None:
    assert run.result()["status"] == "succeeded"
    assert run.steps() == STEPS
    for line in lines(run):
        assert tuple(line["score_failures"]) == FAILURE_KINDS
        assert tuple(line["dropped"]) == DROP_REASONS
    failed = {kind: sum(line["score_failures"][kind] for line in lines(run)) for kind in FAILURE_KINDS}
    masked = sum(line["reward_failed"] for line in lines(run))
    assert failed.pop("timeout") >= masked > 0
    assert set(failed.values()) == {0}
    check = run.check()
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_parts_add_up_to_the_reward(run: LocalRun) -> None:
    for line in lines(run):
        parts = line["reward_parts"]
        assert parts["style"] == pytest.approx(0.5 * parts["answer"])
        assert line["reward_mean"] == pytest.approx(0.6 * parts["answer"] + 0.4 * parts["style"])


def test_it_is_said_while_the_run_goes_on(run: LocalRun) -> None:
    said = (run.folder.parent / "run.out").read_text()
    assert "scores failed: timeout" in said, said


def test_the_report_shows_parts_and_failures(run: LocalRun) -> None:
    assert streamrl("report", str(run.folder)).returncode == 0
    page = (run.folder / "report.html").read_text()
    timeouts = sum(line["score_failures"]["timeout"] for line in lines(run))
    assert f"<td>scores failed</td><td>timeout</td><td>{timeouts}</td>" in page
    assert "<h3>Reward by part</h3>" in page
    assert "<h3>Gradient norm</h3>" not in page, "a simulated trainer has none"
