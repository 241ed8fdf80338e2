"""Bubbles tell the truth: stalls whose length is known, in runs of real processes, lie under their cause within 5 %.

Simulated engine and trainer; scheduler, links, weights and accounts are real. What a stall's maker measures is compared with what the processes
count on their pages. On each page that is read the parts add up to the wall within 1 %.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.keys import ENV_SCHEDULER_ADDRESS, ENV_WEIGHTS_ADDRESS
from support.gates import REWARD, Gate
from support.jobs import simulated_job, write_prompts
from support.runs import wait_for
from support.stalls import STALL_S, TOLERANCE, Count, HeldLink, hold_on
from support.worker_processes import Workers

ENDLESS = 1_000_000
"""Steps: a run lasts until its test is done with it."""
GENERATOR, OTHER_GENERATOR, TRAINER = "generator-sim-0", "generator-sim-1", "trainer-0"

Prepare = Callable[[dict[str, Any]], Workers]


@pytest.fixture
def prepare(tmp_path: Path) -> Iterator[Prepare]:
    """Workers of a job, none of them started; all end with the test."""
    started: list[Workers] = []

    def make(job: dict[str, Any]) -> Workers:
        write_prompts(tmp_path / "prompts.jsonl")
        job["spec"]["task"]["evaluation"] = {"maxPrompts": 1, "intervalSteps": ENDLESS}
        started.append(Workers.prepare(job, folder=tmp_path / "run"))
        return started[-1]

    yield make
    for workers in started:
        workers.close()


def until_steps(workers: Workers, steps: int) -> None:
    wait_for(lambda: len(workers.lines("steps.jsonl")) >= steps, what=f"step {steps}; {workers.text('scheduler')}")


def tells(workers: Workers, *processes: str) -> dict[str, Count]:
    return {process: Count.of(workers, process) for process in processes}


def assert_lies_under(part: str, *, stall_s: float, before: Count, after: Count) -> None:
    counted = after.since(before)
    assert counted[part] == pytest.approx(stall_s, rel=TOLERANCE), counted


def test_a_slow_transfer_lies_under_weights(prepare: Prepare) -> None:
    """The generator waits for the bytes, the trainer for samples."""
    workers, link = prepare(simulated_job(replicas=1, steps=ENDLESS, staleness=0)), HeldLink()
    workers.start_scheduler()
    workers.start(TRAINER, **{ENV_WEIGHTS_ADDRESS: link.address})
    with link.to(str(workers.endpoint(TRAINER)["weights"])):
        workers.start(GENERATOR)
        until_steps(workers, 2)
        begun_s = link.hold()
        before = tells(workers, GENERATOR, TRAINER)
        hold_on(until_s=begun_s + STALL_S)
        stall_s = link.release() - begun_s
        after = tells(workers, GENERATOR, TRAINER)
        assert_lies_under("weights", stall_s=stall_s, before=before[GENERATOR], after=after[GENERATOR])
        assert_lies_under("pipeline_no_samples", stall_s=stall_s, before=before[TRAINER], after=after[TRAINER])
        until_steps(workers, len(workers.lines("steps.jsonl")) + 2)


def test_rewards_that_wait_starve_trainer_and_generators(prepare: Prepare, tmp_path: Path) -> None:
    """Without staleness nothing more may begin: the queue is empty. Both wait for the rewards of the one process that scores."""
    job = simulated_job(replicas=1, steps=ENDLESS, staleness=0)
    job["spec"]["task"]["rewards"] = [REWARD]
    gate, workers = Gate.shut(tmp_path), prepare(job)
    gate.open()
    workers.start_all()
    until_steps(workers, 2)
    gate.let(0)
    wait_for(lambda: workers.numbers()["running"] == workers.numbers()["queue"] == 0, what="the queue to be empty")
    begun_s, before = time.monotonic(), tells(workers, GENERATOR, TRAINER)
    hold_on(until_s=begun_s + STALL_S)
    after, stall_s = tells(workers, GENERATOR, TRAINER), time.monotonic() - begun_s
    assert_lies_under("pipeline_scoring", stall_s=stall_s, before=before[GENERATOR], after=after[GENERATOR])
    assert_lies_under("pipeline_scoring", stall_s=stall_s, before=before[TRAINER], after=after[TRAINER])


def test_a_slow_trainer_is_busy_and_starves_generators(prepare: Prepare) -> None:
    job, steps = simulated_job(replicas=1, steps=ENDLESS, staleness=0), 2
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": STALL_S}
    workers = prepare(job)
    workers.start_all()
    until_steps(workers, 1)
    before = tells(workers, GENERATOR, TRAINER)
    until_steps(workers, 1 + steps)
    after = tells(workers, GENERATOR, TRAINER)
    assert_lies_under("busy", stall_s=steps * STALL_S, before=before[TRAINER], after=after[TRAINER])
    assert_lies_under("pipeline_staleness", stall_s=steps * STALL_S, before=before[GENERATOR], after=after[GENERATOR])


def test_a_long_tail_is_skew_for_the_slots_that_are_empty(prepare: Prepare) -> None:
    """All samples take equally long, and there is one more than slots: it ends alone, and as long the other slots are empty."""
    token_s, slots = 0.02, 3
    engine = {"slots": slots, "meanTokens": STALL_S / token_s, "sigma": 0.0}
    job = simulated_job(replicas=1, steps=ENDLESS, staleness=0, batch_groups=1, **engine)
    job["spec"]["generators"][0]["engine"]["simulated"]["latency"] = [{"batch": 1, "milliseconds": 1000 * token_s}]
    job["spec"]["task"] |= {"groupSize": slots + 1, "sampling": {"maxTokens": 10_000}}
    workers = prepare(job)
    workers.start_all()
    until_steps(workers, 1)
    before = Count.of(workers, GENERATOR)
    until_steps(workers, 2)
    after = Count.of(workers, GENERATOR)
    assert_lies_under("skew", stall_s=STALL_S * (slots - 1) / slots, before=before, after=after)
    assert_lies_under("busy", stall_s=STALL_S * (slots + 1) / slots, before=before, after=after)


def test_a_cut_link_is_other_for_whom_it_cuts_off(prepare: Prepare) -> None:
    """Two generators behind one link, as those of a cluster are."""
    workers, link = prepare(simulated_job(replicas=2, steps=ENDLESS, staleness=0)), HeldLink()
    workers.start_scheduler()
    workers.start(TRAINER)
    with link.to(f"127.0.0.1:{workers.scheduler_port}"):
        for name in (GENERATOR, OTHER_GENERATOR):
            workers.start(name, **{ENV_SCHEDULER_ADDRESS: link.address})
        until_steps(workers, 2)
        before, begun_s = tells(workers, GENERATOR, OTHER_GENERATOR, TRAINER), link.cut()
        hold_on(until_s=begun_s + STALL_S)
        stall_s = link.mend() - begun_s
        after = tells(workers, GENERATOR, OTHER_GENERATOR, TRAINER)
        for name in (GENERATOR, OTHER_GENERATOR):
            assert_lies_under("other", stall_s=stall_s, before=before[name], after=after[name])
        assert_lies_under("pipeline_no_samples", stall_s=stall_s, before=before[TRAINER], after=after[TRAINER])
        until_steps(workers, len(workers.lines("steps.jsonl")) + 2)
