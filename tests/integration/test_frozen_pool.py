"""A pool that says the frozen model's log-probs, in real runs: the trainer's numbers, deaths in mid-stream, all of them exact."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamrl_workers.metrics.jsonl import read_jsonl
from support.jobs import tiny_job, write_prompts
from support.runs import LocalRun, wait_for

FROZEN = "generator-frozen-{}"


def job(
    *, steps: int, replicas: int = 1, batch_groups: int = 4, algorithm: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A tiny model, a pull to what it began as, and a pool that says how far it is from there."""
    made = tiny_job(steps=steps)
    spec = made["spec"]
    spec["algorithm"] = algorithm or {"grpo": {"referenceKl": {"coefficient": 0.01}}}
    spec["trainer"] = {"learningRate": 1e-2, "reference": {"pool": "frozen"}}
    spec["generators"].append(
        {"name": "frozen", "engine": {"hf": {"slots": 4}}, "scaling": {"static": {"replicas": replicas}}}
    )
    spec["pipeline"]["batchGroups"] = batch_groups
    spec["scheduling"]["leaseSeconds"] = 3.0
    spec["storage"] = {"checkpoints": {"intervalSteps": 5}}
    spec["failurePolicy"] = {"maxRestarts": 100}
    return made


def start(tmp_path: Path, made: dict[str, Any]) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    return LocalRun.start(made, folder=tmp_path / "run", base_dir=tmp_path)


def trainer_numbers(run: LocalRun) -> list[dict[str, float]]:
    return [line["trainer"] for line in read_jsonl(run.folder / "metrics/steps.jsonl")]


@pytest.mark.timeout(600)
def test_the_divergence_is_zero_before_the_first_update_and_grows(tmp_path: Path) -> None:
    run = start(tmp_path, job(steps=4))
    assert run.process.wait(500) == 0, run.logs()
    run.assert_exact()
    first, *_, last = trainer_numbers(run)
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert last["reference_kl"] > 1e-4
    assert first["forward_tokens"] == first["tokens"] > 0
    walls = [line for file in (run.folder / "metrics").glob("generator-frozen-*.jsonl") for line in read_jsonl(file)]
    assert walls, "the pool says where its time went"


def wait(run: LocalRun, happened: Callable[[], bool]) -> None:
    """Until it has happened, or the run is over."""
    wait_for(lambda: happened() or run.process.poll() is not None, what=f"a kill; {run.logs()}", deadline_s=600)


def reached(run: LocalRun, steps: int) -> bool:
    return run.steps() >= steps


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_twenty_kills_in_mid_stream_lose_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    steps = 60
    run = start(tmp_path, job(steps=steps, replicas=2, batch_groups=8))
    for kill in range(20):
        wait(run, partial(reached, run, 2 * kill + 1))
        wait(run, partial(run.kill, FROZEN.format(rng.randrange(2))))
    assert run.process.wait(1200) == 0, run.logs()
    assert run.steps() == steps
    run.assert_exact()
    assert trainer_numbers(run)[0]["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert json.loads((run.folder / "result.json").read_text())["check"]["consumed"] == steps * 8
