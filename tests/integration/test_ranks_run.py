"""`streamrl run` with two ranks: it learns, and a killed rank costs the steps behind the checkpoint, no more."""

import json
from pathlib import Path

import pytest

from streamrl_cli.jobfile import load_job
from support.runs import LocalRun, wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
STEPS = 40
SMALL = [
    f"spec.pipeline.steps={STEPS}",
    "spec.pipeline.batchGroups=32",
    "spec.model.scratch.warmUp.steps=300",
    "spec.task.evaluation.maxPrompts=16",
    "spec.task.evaluation.intervalSteps=20",
    "spec.trainer.processesPerNode=2",
    "spec.trainer.rankTimeoutSeconds=120",
    "spec.storage.checkpoints.intervalSteps=4",
]
DEADLINE_S = 500.0

pytestmark = pytest.mark.timeout(1200)


def test_it_learns_and_survives_the_kill_of_a_rank(tmp_path: Path) -> None:
    job = load_job(EXAMPLE, overrides=SMALL).model_dump(mode="json", by_alias=True, exclude_none=True)
    for module in EXAMPLE.parent.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text())
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    wait_for(
        lambda: run.steps() >= 6 or run.process.poll() is not None, what=f"step 6; {run.logs()}", deadline_s=DEADLINE_S
    )
    assert run.kill("trainer-1"), run.logs()
    assert run.process.wait(DEADLINE_S) == 0, run.logs()
    assert "rank 1 is gone" in (run.folder / "logs" / "trainer-0.log").read_text()
    assert "goes on from" in (run.folder / "logs" / "trainer-0.log").read_text()
    assert run.steps() == STEPS
    check = run.check()
    assert check.returncode == 0, check.stdout + check.stderr
    lines = (run.folder / "metrics" / "steps.jsonl").read_text().splitlines()
    rewards = {line["step"]: line["reward_mean"] for line in map(json.loads, lines) if "reward_mean" in line}
    first, last = [sum(rewards[s] for s in steps) / 6 for steps in (range(6), range(STEPS - 6, STEPS))]
    assert last > first + 0.05
    for rank in range(2):
        sample = json.loads((run.folder / "metrics" / f"trainer-{rank}.jsonl").read_text().splitlines()[-1])
        assert sum(sample["parts"].values()) == pytest.approx(sample["wall_s"], rel=0.01)
        assert sample["parts"]["busy"] > 0
