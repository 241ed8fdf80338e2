"""A generator that had hung comes back empty while the other runs a long tail: samples move to it, none is lost or made twice.

Simulated engine and trainer; processes, gRPC and journal are real. The simulated engine's tokens are a function of prompt,
seed and position, so that what two generators made one after the other can be compared with what one would have made.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.errors import EXIT_DONE
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import parse_job
from streamrl_workers.generator.engines.simulated import draw_sample
from streamrl_workers.scheduler.sample import sample_seed
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from support.engine_requests import request, sampling
from support.jobs import simulated_job, write_prompts
from support.journals import trajectories
from support.runs import streamrl, wait_for
from support.worker_processes import Workers

GROUPS, SAMPLES, STEPS = 8, 4, 8
KNOWN_STEPS = 2
"""Behind them lengths and speeds are known well enough for a move."""


def long_tails() -> dict:
    job = simulated_job(
        replicas=2,
        steps=STEPS,
        staleness=0,
        batch_groups=GROUPS,
        slots=40,
        latency=[{"batch": 1, "milliseconds": 4}, {"batch": 8, "milliseconds": 12}, {"batch": 32, "milliseconds": 48}],
        meanTokens=100.0,
        sigma=0.6,
    )
    job["spec"]["task"] |= {"sampling": {"maxTokens": 400}, "evaluation": {"maxPrompts": 1, "intervalSteps": 1000}}
    job["spec"]["scheduling"] |= {"rebalance": {"gainPercent": 1, "maxMoves": 3}}
    job["spec"]["storage"]["checkpoints"]["intervalSteps"] = 1000  # the journal keeps all samples until the end
    return job


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    write_prompts(tmp_path / "prompts.jsonl")
    started = Workers.prepare(long_tails(), folder=tmp_path / "run")
    started.start_all(generators=2)
    yield started
    started.close()


def hang(workers: Workers, name: str) -> None:
    """Until the scheduler has given it up and made the other do all; then it speaks again."""
    workers.processes[name].send_signal(signal.SIGSTOP)
    wait_for(lambda: workers.numbers()["scaling"]["all"]["silent"] == 1, what=f"{name} to be given up")
    workers.processes[name].send_signal(signal.SIGCONT)
    wait_for(lambda: workers.numbers()["scaling"]["all"]["silent"] == 0, what=f"{name} to be heard again")


def until_moved(workers: Workers) -> int:
    """Let one generator hang in each step until samples have moved to it; how many."""
    for step in range(KNOWN_STEPS, STEPS - 1):
        wait_for(
            lambda step=step: workers.numbers().get("step", 0) >= step, what=f"step {step}; {workers.text('scheduler')}"
        )
        hang(workers, "generator-sim-1")
        wait_for(
            lambda step=step: workers.numbers()["moved"] > 0 or workers.numbers()["step"] > step,
            what=f"a move in step {step}; {workers.text('scheduler')}",
        )
        if moved := workers.numbers()["moved"]:
            return int(moved)
    return 0


def check(trajectory: pb.Sample) -> None:
    """Tokens and log-probs are those of one generator alone, and each is of a version that is named."""
    job = parse_job(long_tails()).spec
    issued = request(
        1,
        bytes(list(unpack_int32(trajectory.prompt_tokens))).decode(),
        limits=sampling(max_tokens=400),
        seed=sample_seed(job.seed, group_id=trajectory.group_id, sample_index=trajectory.sample_index),
    )
    alone = draw_sample(issued, spec=job.generators[0].engine.value, seed=job.seed)
    tokens = unpack_int32(trajectory.tokens)
    assert tuple(tokens) == alone.tokens(first=0, count=alone.length)
    assert list(unpack_float32(trajectory.logprobs)) == pytest.approx(alone.logprobs(first=0, count=alone.length))
    assert sum(span.tokens for span in trajectory.spans) == len(tokens)


@pytest.mark.timeout(300)
def test_a_tail_moves_to_the_generator_that_came_back(workers: Workers) -> None:
    assert until_moved(workers) > 0, workers.text("scheduler")
    assert "moved_samples" in workers.page("metrics")
    step = workers.numbers()["step"]
    wait_for(lambda: workers.numbers()["step"] >= min(step + 1, STEPS - 1), what="the step with the moved samples")
    found = trajectories(workers.folder, groups=GROUPS * STEPS)
    assert len(found) >= GROUPS * SAMPLES * step
    assert len({(one.group_id, one.sample_index) for one in found}) == len(found)
    for trajectory in found:
        check(trajectory)
    assert workers.wait("trainer-0") == EXIT_DONE
    exact = streamrl("journal", "check", str(workers.folder))
    assert exact.returncode == 0, exact.stdout + exact.stderr
