"""How fast a generator is, as its own counts say: known also where its batch never stays as it is. Processes and gRPC are real."""

from pathlib import Path
from typing import Any

import pytest

from support.jobs import simulated_job, write_prompts
from support.runs import wait_for
from support.worker_processes import Workers

SLOTS, STEP_MS = 16, {1: 4.0, 16: 12.0}


def known(numbers: dict[str, Any]) -> list[dict[str, float]]:
    """The curves of the pools whose speed is known."""
    pools = numbers.get("dispatch", {}).get("pools", {})
    return [pool["step_s"] for pool in pools.values() if pool["speed"] == "known"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_that_falls_all_the_time_tells_the_whole_curve(tmp_path: Path, *, staleness: int) -> None:
    """A batch takes a second at most, and each of its samples is of another length."""
    write_prompts(tmp_path / "prompts.jsonl")
    latency = [{"batch": batch, "milliseconds": ms} for batch, ms in STEP_MS.items()]
    job = simulated_job(
        replicas=1, steps=2000, staleness=staleness, slots=SLOTS, latency=latency, meanTokens=24.0, sigma=0.8
    )
    workers = Workers.prepare(job, folder=tmp_path / "run")
    try:
        workers.start_all()
        speeds = wait_for(
            lambda: known(workers.numbers()),
            what=f"a known speed; {workers.text('scheduler')}",
        )
    finally:
        workers.close()
    found = {int(batch): seconds for batch, seconds in speeds[0].items()}
    assert list(found.values()) == sorted(found.values())
    # A busy machine makes steps longer, and an engine that was late makes up for it in steps of other batches: half of the time is always there.
    low, high = (STEP_MS[batch] / 1e3 for batch in (1, SLOTS))
    measured = [batch for batch in found if 1 < batch < SLOTS]
    assert measured
    for batch in measured:
        assert found[batch] > 0.5 * (low + (high - low) * (batch - 1) / (SLOTS - 1)), found
