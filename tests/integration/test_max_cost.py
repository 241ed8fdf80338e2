"""`spec.maxCost` of a real `streamrl run`: it ends with a checkpoint and goes on when the amount is raised, or it warns."""

import json
from pathlib import Path

from streamrl_workers.scheduler.server.cost import total
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun

STEPS = 8
HELD_AT = 6
"""Behind the first checkpoint."""


def start(folder: Path, *, amount: str, action: str) -> tuple[LocalRun, Hold]:
    """A run whose trainer costs a hundred each second, and that does not end before it is let go."""
    write_prompts(folder / "prompts.jsonl")
    job = simulated_job(steps=STEPS)
    job["spec"]["maxCost"] = {"amount": amount, "action": action}
    job["spec"]["trainer"]["costPerHour"] = "360000"
    hold = Hold.on(job, folder, step=HELD_AT)
    return LocalRun.start(job, folder=folder / "run", base_dir=folder), hold


def test_a_run_that_costs_too_much_ends_and_can_go_on(tmp_path: Path) -> None:
    run, hold = start(tmp_path, amount="50", action="Suspend")
    assert run.wait_end() == 130, run.logs()
    assert "spec.maxCost.amount is 50; stopping: the trainer writes a checkpoint" in run.said()
    assert f"raise it in {run.folder / 'job.json'}, then go on with: streamrl run --resume {run.folder}" in run.said()
    run.assert_exact()
    file = run.folder / "job.json"
    document = json.loads(file.read_text())
    document["spec"]["maxCost"]["amount"] = "10000000"
    file.write_text(json.dumps(document))
    hold.let_go()
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert (run.result()["status"], run.steps()) == ("succeeded", STEPS)
    costs = [total(json.loads(line)) or 0.0 for line in (run.folder / "metrics/steps.jsonl").read_text().splitlines()]
    assert costs == sorted(costs), "a scheduler that starts again goes on where the last step was"


def test_a_run_that_only_warns_goes_on(tmp_path: Path) -> None:
    run, hold = start(tmp_path, amount="50", action="Warn")
    run.wait_said("warning: the run has cost")
    hold.let_go()
    assert run.wait_end() == 0, run.logs()
    assert run.said().count("spec.maxCost.amount is 50") == 1
