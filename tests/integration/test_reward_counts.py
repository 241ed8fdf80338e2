"""Two rewards, one of which hangs for some samples: the run goes on, and everybody who looks is told."""

import json
import re
from pathlib import Path

import pytest

from streamrl_workers.scheduler.views import DROP_REASONS, FAILURE_KINDS
from support.jobs import LINES, simulated_job
from support.runs import LocalRun, streamrl

STEPS = 12
HANGS = '''
def score(*, prompt, completion, answer, metadata):
    """Hangs on wrong answers to some questions, raises on others; half a point for each right one."""
    question = int(prompt.split()[-1])
    if completion == "wrong" and question % 5 == 2:
        while True:
            pass
    if completion == "wrong" and question % 5 == 3:
        print("no points for", question)
        metadata["points"]
    return 0.5 * (completion == answer)
'''
RAISED = "style: raised KeyError: 'points' (mine.py, line 10)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    base = tmp_path_factory.mktemp("two-rewards")
    rows = [{"prompt": f"question {n}", "answer": f"question {n}", "level": n % 3} for n in range(LINES)]
    (base / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
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
    assert failed.pop("timeout") + failed.pop("raised") >= masked > 0
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
    assert "scores failed: " in said, said
    first = [line for line in said.splitlines() if RAISED in line]
    assert len(first) == 1, said
    assert re.fullmatch(r"warning: \d+ scores? failed \(raised\), the first: .*", first[0]), first


def test_the_first_exception_is_in_the_log_and_prints_have_a_log_of_their_own(run: LocalRun) -> None:
    log, prints = ((run.folder / f"logs/{name}.log").read_text() for name in ("scheduler", "tasks"))
    assert log.count(RAISED) == 1, log
    assert "no points for" not in log, log
    assert {line.rpartition(" ")[0] for line in prints.splitlines()} == {"tasks: no points for"}, prints


def test_failed_samples_are_found_with_what_their_reward_saw(run: LocalRun) -> None:
    shown = streamrl("samples", str(run.folder), "--kind", "failed", "--count", "1000", "--json")
    failed = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {sample["reward"] for sample in failed} == {None}, shown.stderr
    assert {sample["reward_error"] for sample in failed} == {RAISED, "style: took longer than 0.3 s"}
    assert len({sample["step"] for sample in failed}) > 1, "of all steps"
    for sample in failed:
        assert (sample["answer"], sample["metadata"]) == (
            sample["prompt"],
            {"level": int(sample["prompt"].split()[-1]) % 3},
        )
    text = streamrl("samples", str(run.folder), "--failed").stdout
    assert re.search(r"\n  reference  \| question \d+\n  metadata ", text), text


def test_the_report_shows_parts_and_failures(run: LocalRun) -> None:
    assert streamrl("report", str(run.folder)).returncode == 0
    page = (run.folder / "report.html").read_text()
    timeouts = sum(line["score_failures"]["timeout"] for line in lines(run))
    assert f"<td>scores failed</td><td>timeout</td><td>{timeouts}</td>" in page
    assert f"the first: {RAISED}".replace("'", "&#39;") in page
    assert "<h3>reference</h3>" in page
    assert "<code>scoring</code>: finished samples wait for their rewards" in page
    assert "<h3>Reward by part</h3>" in page
    assert "<h3>Gradient norm</h3>" not in page, "a simulated trainer has none"


def test_a_verifier_that_raises_scores_0_and_is_counted(tmp_path: Path) -> None:
    job = simulated_job(steps=3)
    job["spec"]["task"] |= {
        "dataset": {"reasoningGym": {"name": "prime_factorization"}},
        "rewards": [{"name": "right", "verifier": {}}],
    }
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 0, run.logs()
    assert run.result()["status"] == "succeeded"
    found = lines(run)
    assert [(line["reward_mean"], line["reward_failed"]) for line in found] == [(0.0, 0)] * 3
    counted = sum(line["score_failures"]["verifier_raised"] for line in found)
    assert counted >= sum(line["samples"] for line in found) > 0
    evaluated = [json.loads(line) for line in (run.folder / "metrics/evaluations.jsonl").read_text().splitlines()]
    assert [(line["mean_reward"], line["failed"]) for line in evaluated] == [(0.0, 0)] * len(evaluated)
    assert len(evaluated) > 0
    text = "right: the verifier of prime_factorization raised ValueError: "
    log = (run.folder / "logs/scheduler.log").read_text()
    assert log.count(f"{text}invalid literal") == 1, log
    shown = streamrl("samples", str(run.folder), "--json")
    samples = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {sample["reward"] for sample in samples} == {0.0}, shown.stderr
    assert all(sample["reward_error"].startswith(text) for sample in samples)
