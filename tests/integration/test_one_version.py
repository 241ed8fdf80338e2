"""`pipeline.partialRollouts`: whether samples that run go on under a new version. Simulated parts; processes, gRPC and journal are real."""

from pathlib import Path
from typing import Any

import pytest

from support.jobs import simulated_job, write_prompts
from support.journals import trajectories
from support.runs import wait_for
from support.worker_processes import Workers

STEPS, SEEN_STEPS, GROUPS = 200, 8, 4
TOKEN_MS = 10.0
"""A sample takes longer than all else in a step, on a busy machine too: versions come while it runs."""


@pytest.mark.parametrize("partial", [True, False])
def test_a_sample_is_of_one_version_where_the_job_says_so(tmp_path: Path, *, partial: bool) -> None:
    """Samples take several steps' time, so that without the rule many of them see a new version."""
    write_prompts(tmp_path / "prompts.jsonl")
    latency = [{"batch": 1, "milliseconds": TOKEN_MS}]
    job: dict[str, Any] = simulated_job(
        steps=STEPS, staleness=4, batch_groups=GROUPS, slots=16, meanTokens=60.0, sigma=0.8, latency=latency
    )
    job["spec"]["pipeline"]["partialRollouts"] = partial
    job["spec"]["task"]["evaluation"] = {"maxPrompts": 1, "intervalSteps": 1000}
    job["spec"]["storage"]["checkpoints"]["intervalSteps"] = 1000  # the journal keeps all samples until the end
    workers = Workers.prepare(job, folder=tmp_path / "run")
    try:
        workers.start_all(generators=1)
        wait_for(lambda: workers.numbers().get("step", 0) >= SEEN_STEPS, what=f"step {SEEN_STEPS}")
        found = trajectories(workers.folder, groups=GROUPS * SEEN_STEPS)
    finally:
        workers.close()
    spans = [len(one.spans) for one in found]
    assert len(spans) >= GROUPS * (SEEN_STEPS - 1)
    assert (max(spans) == 1) is not partial, spans
