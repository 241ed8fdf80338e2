"""Alerts about a policy: a trainer computes at another temperature than the generators draw, until it is set right again.

So its log-probs differ, the policy that it sees is far from the one that drew, and its entropy falls to nearly nothing. A real model, whose learning
rate keeps it where it is; the chart's rules with a 360th of their windows and waits, so that entropy is held against that of a minute before.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.keys import FILE_JOB
from support.jobs import tiny_job, write_prompts
from support.prometheus import ALERT_S, Prometheus, chart_rules, scraping
from support.runs import LocalRun, wait_for

pytestmark = pytest.mark.timeout(900)

FASTER = 360
ALERTS = ("StreamRLKlRunsAway", "StreamRLEntropyRunsAway", "StreamRLLogprobDiffHigh")
COLD = 0.02
TRAINER = "trainer-0"
START_S = 300.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    write_prompts(tmp_path / "prompts.jsonl")
    job = tiny_job(steps=1_000_000)
    job["spec"]["pipeline"] = {"mode": "StreamSync", "batchGroups": 4, "steps": 1_000_000}
    job["spec"]["trainer"] = {"learningRate": 1e-9}
    job["spec"]["storage"] = {"checkpoints": {"intervalSteps": 5}}
    job["spec"]["failurePolicy"] = {"maxRestarts": 100}
    started = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    wait_for(lambda: started.steps() > 0, what=f"the first step; {started.logs()}", deadline_s=START_S)
    yield started
    started.interrupt()


@pytest.fixture
def watching(run: LocalRun, prometheus: Path, tmp_path: Path) -> Iterator[Prometheus]:
    """The scheduler tells what the trainer has measured."""
    page = json.loads((run.folder / "endpoints/scheduler.json").read_text())["signals"]
    with scraping({"streamrl": [page]}, folder=tmp_path, rules=chart_rules(by=FASTER)) as made:
        yield made


def train_at(run: LocalRun, temperature: float) -> None:
    """The trainer goes on from its checkpoint at this temperature; generators keep theirs."""
    file = run.folder / FILE_JOB
    job = json.loads(file.read_text())
    job["spec"]["task"]["sampling"]["temperature"] = temperature
    file.write_text(json.dumps(job))
    run.kill_one(TRAINER)


def test_a_policy_that_runs_away_is_told_of_until_it_is_back(watching: Prometheus, run: LocalRun) -> None:
    before = "streamrl_entropy_nats offset 70s"
    wait_for(lambda: watching.has_data(before), what=f"{before}; {run.logs()}", deadline_s=ALERT_S)
    watching.wait_silent(*ALERTS)
    train_at(run, COLD)
    watching.wait_firing(*ALERTS)
    train_at(run, 1.0)
    watching.wait_silent(*ALERTS)
