"""`kill -9` with the real trainer and engine, ten times over several runs: part of `make soak`."""

import random
from pathlib import Path

import pytest

from streamrl_cli.jobfile import load_job
from support.runs import LocalRun, wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
STEPS = 20
WORKERS = ("scheduler", "trainer-0", "generator-local-0")
SMALL = [
    f"spec.pipeline.steps={STEPS}",
    "spec.pipeline.batchGroups=8",
    "spec.model.scratch.warmUp.steps=40",
    "spec.task.evaluation.maxPrompts=16",
    "spec.task.evaluation.intervalSteps=10",
    "spec.storage.checkpoints.intervalSteps=3",
    "spec.failurePolicy.maxRestarts=50",
]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("seed", [1, 2])
def test_five_kills_of_a_real_run_lose_nothing(*, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    job = load_job(EXAMPLE, overrides=SMALL).model_dump(mode="json", by_alias=True, exclude_none=True)
    for module in EXAMPLE.parent.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text())
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    for moment, victim in zip(
        sorted(rng.sample(range(1, STEPS - 2), 5)), rng.sample([*WORKERS, *WORKERS, "all"], 5), strict=True
    ):
        wait_for(
            lambda at=moment: run.steps() >= at or run.process.poll() is not None,
            what=f"step {moment}; {run.logs()}",
            deadline_s=400,
        )
        if victim == "all":
            run.kill_all(WORKERS)
            run.resume()
        else:
            wait_for(
                lambda name=victim: run.kill(name) or run.process.poll() is not None,
                what=f"{victim} to kill; {run.logs()}",
            )
    assert run.process.wait(600) == 0, run.logs()
    assert run.steps() == STEPS
    check = run.check()
    assert check.returncode == 0, check.stdout + check.stderr
