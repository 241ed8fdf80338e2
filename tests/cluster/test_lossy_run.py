"""A run whose generators are in another network, over a link that loses, reorders and doubles packets, or passes nothing for a while.

TCP hides it all but the time: nothing hangs, nothing is lost, and the run is exact.
"""

import contextlib
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.harness import reaper
from cluster.harness.delay_line import Shape
from cluster.harness.link import End, LaidLink
from cluster.harness.sandbox import Sandbox
from streamrl import keys
from support.jobs import simulated_job, write_prompts
from support.runs import streamrl, wait_for
from support.worker_processes import Workers

pytestmark = [pytest.mark.node, pytest.mark.soak, pytest.mark.timeout(900)]

HERE, THERE = "10.201.0.1", "10.201.1.1"
STEPS, CUT_AT = 30, 8
LEASE_S = 10.0
DEADLINE_S = 600.0
WORSE = {
    "loses 5 %": {"loss": 0.05},
    "loses 20 %": {"loss": 0.2},
    "reorders a third, doubles a tenth": {"late": 0.33, "twice": 0.1},
    "all of it": {"loss": 0.05, "late": 0.2, "twice": 0.2},
}
"""Shapes by what they do to packets."""


WEIGHTS_PORT = 19_000
"""Below those of `free_port`; in a network of its own no other is taken."""


@dataclass
class SplitWorkers(Workers):
    """Scheduler and trainer in one network, generators in another."""

    sandboxes: tuple[Sandbox, ...] = ()

    def start(self, process: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Start one worker in its network."""
        own = {
            keys.ENV_SCHEDULER_ADDRESS: f"{HERE}:{self.scheduler_port}",
            keys.ENV_BIND_HOST: "0.0.0.0",
            keys.ENV_WEIGHTS_ADDRESS: f"{HERE}:{WEIGHTS_PORT}",
            keys.ENV_WEIGHTS_PORT: str(WEIGHTS_PORT),
        }
        if process.startswith("generator"):
            own = {keys.ENV_SCHEDULER_ADDRESS: own[keys.ENV_SCHEDULER_ADDRESS]}
        sandbox = self.sandboxes[process.startswith("generator")]
        return super().start(process, prefix=sandbox.enter_network, **options, **own)


@dataclass
class Split:
    """Workers on both sides of a link."""

    link: LaidLink
    workers: SplitWorkers

    def finish(self) -> float:
        """Wait until the run has ended, exactly; its seconds."""
        begun_s = time.monotonic()
        workers = self.workers
        wait_for(lambda: workers.ended("scheduler"), what=workers.text("scheduler"), deadline_s=DEADLINE_S)
        assert workers.wait("scheduler") == 0, workers.text("scheduler")
        assert [line["step"] for line in workers.lines("steps.jsonl")] == list(range(STEPS))
        check = streamrl("journal", "check", str(workers.folder))
        assert check.returncode == 0, f"{check.stdout}{check.stderr}"
        return time.monotonic() - begun_s


@pytest.fixture
def split(node_possible: None, tmp_path: Path) -> Iterator[Split]:
    write_prompts(tmp_path / "prompts.jsonl")
    job: dict[str, Any] = simulated_job(steps=STEPS, replicas=2)
    job["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    job["spec"]["trainer"]["engine"]["simulated"] = {"weightBytes": 1_000_000, "secondsPerStep": 0.1}
    workers = SplitWorkers.prepare(job, folder=tmp_path / "run")
    mark = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        stack.callback(reaper.finish, reaper.start(mark, tmp_path / "nothing"))
        ends = [End(sandbox=Sandbox(tmp_path / one, name="end"), address=one) for one in (HERE, THERE)]
        for end in ends:
            stack.callback(end.sandbox.close)
        workers.sandboxes = tuple(end.sandbox for end in ends)
        link = LaidLink(*ends, Shape(delay_s=0.005), folder=tmp_path, mark=mark)
        stack.enter_context(contextlib.closing(link))
        stack.callback(workers.close)
        yield Split(link, workers)


@pytest.mark.parametrize("worse", WORSE.values(), ids=WORSE)
def test_a_run_over_a_bad_link_is_exact(worse: dict[str, float], split: Split) -> None:
    split.link.shape(**worse)
    split.workers.start_all(generators=2)
    print(f"{worse}: {split.finish():.1f} s, {split.link.shape()}")  # noqa: T201 - the record


@pytest.mark.parametrize("cut_s", [5.0, 2 * LEASE_S], ids=["shorter than a lease", "longer than a lease"])
def test_a_run_goes_on_after_a_cut(cut_s: float, split: Split) -> None:
    """Leases that end meanwhile are given to nobody else here: the generators come back, and go on."""
    workers = split.workers
    workers.start_all(generators=2)
    wait_for(lambda: len(workers.lines("steps.jsonl")) >= CUT_AT, what=f"step {CUT_AT}", deadline_s=DEADLINE_S)
    split.link.cut()
    time.sleep(cut_s)  # the fault is its length
    split.link.heal()
    print(f"cut for {cut_s} s: {split.finish():.1f} s after it, {split.link.shape()}")  # noqa: T201 - the record
