"""Messages beyond any one gRPC message, over real processes: huge groups to the trainer, many long prompts to a generator."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl import keys
from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR
from streamrl_workers.stream.messages import PROMPT_BYTES
from support.jobs import simulated_job, write_prompts
from support.worker_processes import Workers

LEASE_S = 60.0
"""A message that is packed on a busy machine for longer than the lease would be made again, for ever."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_prompts(tmp_path / "prompts.jsonl")
    yield tmp_path


def _finish(job: dict[str, Any], *, folder: Path) -> Workers:
    """Run the job's three processes until the scheduler's end; they are closed then."""
    job["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    workers = Workers.prepare(job, folder=folder / "run")
    try:
        workers.start_all()
        assert workers.wait("scheduler") == EXIT_DONE, workers.text("scheduler")
    finally:
        workers.close()
    assert json.loads((workers.folder / keys.FILE_RESULT).read_text())["status"] == "succeeded"
    return workers


def test_a_group_of_a_hundred_megabytes_is_trained(folder: Path) -> None:
    job = simulated_job(batch_groups=1, steps=1, staleness=0, meanTokens=1_000_000.0, sigma=0.0, timeScale=0, slots=12)
    job["spec"]["task"] |= {"groupSize": 12, "sampling": {"maxTokens": 1_048_576}}
    job["spec"]["task"]["evaluation"] = {"maxPrompts": 1, "intervalSteps": 10}
    workers = _finish(job, folder=folder)
    assert "link broken" not in workers.text("trainer-0")
    (step,) = workers.lines("steps.jsonl")
    assert step["step"] == 0


def test_long_prompts_for_all_slots_at_once_are_issued(folder: Path) -> None:
    lines = ({"prompt": f"{number} " + "x" * 600_000, "answer": "y"} for number in range(80))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = simulated_job(batch_groups=64, steps=1, staleness=0, meanTokens=2.0, sigma=0.0, timeScale=0, slots=128)
    job["spec"]["task"] |= {"groupSize": 2, "evaluation": {"maxPrompts": 1, "intervalSteps": 10}}
    workers = _finish(job, folder=folder)
    assert workers.text("scheduler").count("has joined with 128 slots") == 1


def test_a_prompt_beyond_the_bound_is_one_line(folder: Path) -> None:
    lines = ({"prompt": str(number) + "é" * (PROMPT_BYTES // 2), "answer": "y"} for number in range(2))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    workers = Workers.prepare(simulated_job(), folder=folder / "run")
    try:
        workers.start_scheduler()
        assert workers.wait("scheduler") == EXIT_USER_ERROR
    finally:
        workers.close()
    assert (
        workers.text("scheduler")
        .splitlines()[-1]
        .endswith(f"must have at most {PROMPT_BYTES} bytes, got {PROMPT_BYTES + 1}; shorten it or leave it out")
    )
