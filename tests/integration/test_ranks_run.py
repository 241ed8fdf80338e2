"""`streamrl run` with two ranks: it learns, and a killed rank costs the steps after the checkpoint, no more."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl_cli.jobfile import load_job
from support.model_families import save_tiny
from support.runs import LocalRun, wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
STEPS = 40
SMALL = [
    f"spec.pipeline.steps={STEPS}",
    "spec.pipeline.batchGroups=32",
    "spec.model.scratch.warmUp.steps=300",
    "spec.task.evaluation.maxPrompts=16",
    "spec.task.evaluation.intervalSteps=20",
    "spec.storage.checkpoints.intervalSteps=4",
    "spec.failurePolicy.maxRestarts=20",
]
DEADLINE_S = 500.0

pytestmark = pytest.mark.timeout(1200)


_LONG = [pytest.mark.soak, pytest.mark.timeout(7200)]
EXPERTS = [
    "spec.model={path: {directory: model}}",
    "spec.task.rewards=[{name: digits, regex: {pattern: '^[0-9]+'}}]",
    "spec.trainer.learningRate=0.01",
]
"""A mixture of experts, which learns to begin with a digit."""


@pytest.mark.parametrize(
    ("parallelism", "kills"),
    [({}, 1), *(pytest.param({axis: 2}, 10, marks=_LONG) for axis in ("tensor", "context", "expert"))],
    ids=str,
)
def test_it_learns_and_survives_kills_of_ranks(tmp_path: Path, parallelism: dict[str, Any], kills: int) -> None:
    overrides = [*SMALL, *(EXPERTS if "expert" in parallelism else [])]
    save_tiny("qwen3_moe", tmp_path / "model")
    job = load_job(EXAMPLE, overrides=overrides, local=False).model_dump(mode="json", by_alias=True, exclude_none=True)
    job["spec"]["trainer"] |= {"processesPerNode": 2, "rankTimeoutSeconds": 120, "parallelism": parallelism}
    for module in EXAMPLE.parent.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text())
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    for kill in range(kills):
        step = 6 + 3 * kill
        wait_for(
            lambda step=step: run.steps() >= step or run.process.poll() is not None,  # type: ignore[misc]
            what=f"step {step}; {run.logs()}",
            deadline_s=DEADLINE_S,
        )
        assert run.kill(f"trainer-{(kill + 1) % 2}"), run.logs()
    assert run.process.wait(DEADLINE_S) == 0, run.logs()
    log = (run.folder / "logs" / "trainer-0.log").read_text()
    assert all(text in log for text in ("environment: GLOO_SOCKET_IFNAME=lo", "rank 1 is gone", "goes on from"))
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
