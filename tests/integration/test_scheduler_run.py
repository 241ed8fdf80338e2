"""The scheduler with a simulated trainer and generators, each a real process: a whole run, deaths, ends."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.metrics import GENERATOR, SCHEDULER, TRAINER
from support.gates import REWARD, Gate
from support.jobs import simulated_job, write_prompts
from support.metric_pages import families, mistakes
from support.runs import DEADLINE_S, streamrl, wait_for
from support.worker_processes import Workers

STEPS = 12
LEASE_S = 60.0
"""No generator is given up on a busy machine."""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate.shut(tmp_path)


@pytest.fixture
def workers(tmp_path: Path, gate: Gate) -> Iterator[Workers]:
    """Nothing is trained before the gate lets it through."""
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=STEPS)
    job["spec"]["task"]["rewards"] = [REWARD]
    job["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    started = Workers.prepare(job, folder=tmp_path / "run")
    yield started
    started.close()


MOVES = (
    *("streamrl_step_duration_seconds", "streamrl_sample_tokens", "streamrl_reward_duration_seconds"),
    *("streamrl_link_received_bytes_total", "streamrl_link_sent_bytes_total", "streamrl_trained_samples_total"),
    *("streamrl_cost_total", "streamrl_cost_per_hour", "streamrl_cost_per_step", "streamrl_generators"),
    *("streamrl_weights_published_versions_total", "streamrl_weights_served_bytes_total"),
    *("streamrl_weights_pulled_versions_total", "streamrl_weights_pulled_bytes_total", "streamrl_wall_seconds_total"),
    *("streamrl_weights_pull_duration_seconds", "streamrl_weights_load_duration_seconds"),
)
"""What any run has some of after two steps."""


def counted(workers: Workers) -> Counter[str]:
    """The metrics of all kinds of processes, summed by name."""
    found = Counter[str]()
    for process in ("scheduler", "trainer-0", "generator-sim-0"):
        for name, one in families(workers.page("metrics", process=process).encode()).items():
            found[name] += sum(sample.value for sample in one.samples)
    return found


def assert_exact(workers: Workers) -> str:
    check = streamrl("journal", "check", str(workers.folder))
    assert check.returncode == 0, check.stdout + check.stderr + workers.text("scheduler")
    return check.stdout


def test_whole_run(workers: Workers, gate: Gate) -> None:
    workers.start_scheduler()
    for number in range(2):
        workers.start(f"generator-sim-{number}")
    wait_for(lambda: len(workers.numbers().get("generators", ())) == 2, what="both generators")
    workers.start("trainer-0")
    gate.until(lambda: len(workers.lines("steps.jsonl")) >= 2, what="two steps")
    assert workers.page("healthz").strip() == "ok"
    numbers = workers.numbers()
    assert len(numbers["generators"]) == 2
    assert numbers["steps"] == STEPS
    for process, table in (("scheduler", SCHEDULER), ("trainer-0", TRAINER), ("generator-sim-0", GENERATOR)):
        assert list(mistakes(workers.page("metrics", process=process).encode(), table)) == []
    totals = counted(workers)
    assert {name for name in MOVES if not totals[name] > 0} == set()
    live = streamrl("journal", "check", str(workers.folder))
    assert "verdict" in live.stdout
    gate.open()
    for process in ("scheduler", "trainer-0", "generator-sim-0", "generator-sim-1"):
        assert workers.wait(process) == 0, workers.text(process) + workers.text("scheduler")
    result = json.loads((workers.folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("succeeded", STEPS)
    assert result["evaluations"][0]["step"] == 0
    assert result["final_reward"] == result["evaluations"][-1]["mean_reward"]
    lines = workers.lines("steps.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(line["staleness_max"] <= 1 for line in lines)
    assert "ended" in assert_exact(workers)
    shown = streamrl("journal", "show", str(workers.folder), "0")
    assert "consumed by step" in shown.stdout


def test_scheduler_killed_and_started_again(workers: Workers, gate: Gate) -> None:
    workers.start_all()
    for steps in (2, 5, 8):
        gate.until(lambda steps=steps: len(workers.lines("steps.jsonl")) >= steps, what=f"{steps} steps")
        workers.kill("scheduler")
        assert_exact(workers)
        workers.start_scheduler()
    gate.open()
    for process in ("scheduler", "trainer-0", "generator-sim-0"):
        assert workers.wait(process) == 0, workers.text(process) + workers.text("scheduler")
    assert_exact(workers)


def test_asked_to_end_it_goes_on_later(workers: Workers, gate: Gate) -> None:
    workers.start_all()
    gate.until(lambda: len(workers.lines("steps.jsonl")) >= 2, what="two steps")
    assert workers.terminate("scheduler") == os.EX_TEMPFAIL
    assert "asked to end" in workers.text("scheduler")
    assert_exact(workers)
    gate.open()
    workers.start_scheduler()
    assert workers.wait("scheduler") == 0, workers.text("scheduler")
    assert_exact(workers)


def test_started_after_the_end_it_tells_everybody(workers: Workers, gate: Gate) -> None:
    gate.open()
    workers.start_all()
    assert workers.wait("scheduler") == 0, workers.text("scheduler")
    workers.wait("trainer-0")
    workers.start_scheduler()
    trainer = workers.start("trainer-0")
    assert workers.wait("scheduler") == 0
    assert trainer.wait(DEADLINE_S) == 0, workers.text("trainer-0")
    assert_exact(workers)
