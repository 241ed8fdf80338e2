"""Real runs of a tiny model with kills at random moments, and their replays."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.jobs import tiny_job, write_prompts
from support.runs import LocalRun, wait_for

STEPS = 12
PATIENCE_S = 1500.0
"""Of each wait: a run starts torch in four processes, and once more in each that dies, on a machine that may be busy."""
WORKERS = ("scheduler", "trainer-0", "generator-tiny-0", "generator-tiny-1")


def small_batches(**pipeline: Any) -> dict[str, Any]:
    """A job whose steps have several micro-steps each, cut by what has arrived, and weights that move."""
    job = tiny_job(steps=STEPS, replicas=2)
    job["spec"]["trainer"] = {"microBatchTokens": 128, "learningRate": 0.01}
    job["spec"]["storage"] = {"checkpoints": {"intervalSteps": 3}}
    job["spec"]["failurePolicy"] = {"maxRestarts": 100}
    job["spec"]["pipeline"] |= pipeline
    return job


def in_order(**hf: Any) -> dict[str, Any]:
    """The same, with weights that follow from the job alone; `hf`: what the engine has instead of one slot."""
    job = small_batches(mode="StreamSync", delivery="Logical")
    del job["spec"]["pipeline"]["maxStalenessSteps"]
    job["spec"]["generators"][0]["engine"] = {"hf": hf or {"slots": 1}}
    return job


def run_with_kills(
    job: dict[str, Any], base: Path, *, seed: int, kills: int, workers: Sequence[str] = WORKERS
) -> LocalRun:
    """A run that has ended, with so many deaths of workers: generators leave and join, the trainer takes steps back."""
    base.mkdir(exist_ok=True)
    write_prompts(base / "prompts.jsonl")
    return ended_run(job, base, steps=STEPS, kills=kills, seed=seed, workers=workers, patience_s=PATIENCE_S)


def ended_run(
    job: dict[str, Any], base: Path, *, steps: int, kills: int, seed: int, workers: Sequence[str], patience_s: float
) -> LocalRun:
    """A run of so many steps that has ended, with so many deaths of `workers` at random steps."""
    rng = random.Random(seed)
    run = LocalRun.start(job, folder=base / "run", base_dir=base)
    for moment in sorted(rng.sample(range(steps - 2), kills)):
        wait_for(
            lambda at=moment: run.steps() >= at or run.process.poll() is not None,
            what=f"step {moment}; {run.logs()}",
            deadline_s=patience_s,
        )
        run.kill(rng.choice(workers))  # one that is just being started again is left alone
    assert run.process.wait(patience_s) == 0, run.logs()
    return run
