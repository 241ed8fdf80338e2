"""A scheduler that was stopped for several leases: what its generators said meanwhile is read before they are judged."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import simulated_job, write_prompts
from support.runs import streamrl, wait_for
from support.worker_processes import Workers

LEASE_S = 5.0
"""A generator that a busy machine holds up for some seconds is not given up."""
STOPPED_LEASES = 2
STOPS = 3


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=500, latency=[{"batch": 1, "milliseconds": 60.0}])
    job["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    started = Workers.prepare(job, folder=tmp_path / "run")
    yield started
    started.close()


def stop_for(workers: Workers, *, seconds: float) -> None:
    process = workers.processes["scheduler"]
    process.send_signal(signal.SIGSTOP)
    end_s = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() >= end_s, what="the leases to be over")
    process.send_signal(signal.SIGCONT)


def test_a_stopped_scheduler_revokes_nothing(workers: Workers) -> None:
    workers.start_all(generators=2)
    wait_for(lambda: len(workers.lines("steps.jsonl")) >= 1, what=f"a step {workers.text('scheduler')}")
    for _ in range(STOPS):
        wait_for(lambda: workers.numbers()["running"] > 0, what="samples that run")
        stop_for(workers, seconds=STOPPED_LEASES * LEASE_S)
        steps = len(workers.lines("steps.jsonl"))
        wait_for(
            lambda steps=steps: len(workers.lines("steps.jsonl")) >= steps + 2,
            what=f"steps {workers.text('scheduler')}",
        )
        assert workers.numbers()["reissued"] == 0
        assert workers.text("scheduler").count("has joined") == 3, "nobody has lost its connection"
    assert workers.terminate("scheduler") == 75
    check = streamrl("journal", "check", str(workers.folder))
    assert check.returncode == 0, check.stdout


def test_a_stopped_generator_is_judged_all_the_same(workers: Workers) -> None:
    """The clock stands for the scheduler's own stalls only."""
    workers.start_all(generators=2)
    wait_for(lambda: len(workers.lines("steps.jsonl")) >= 1, what=f"a step {workers.text('scheduler')}")
    workers.processes["generator-sim-0"].send_signal(signal.SIGSTOP)
    wait_for(lambda: workers.numbers()["reissued"] > 0, what="its samples to be issued again")
