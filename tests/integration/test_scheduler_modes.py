"""Whole batches, turns, dynamic sampling and generators that leave, in real runs with kills.

Simulated engine and trainer; everything else is real. `streamrl journal check` proves invariant 1 after each.
"""

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import EXIT_DONE
from support.gates import REWARD, Gate
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, wait_for
from support.worker_processes import Workers

WORKERS = ("scheduler", "trainer-0", "generator-sim-0", "generator-sim-1")
STEPS = 48
STEP_S = 0.1
KILLS = 4
LEASE_S = 20.0
"""A generator that a busy machine holds up for some seconds is not given up."""


def mode_job(mode: str, *, staleness: int = 0, step_s: float = STEP_S, **job: Any) -> dict[str, Any]:
    document = simulated_job(**{"steps": STEPS, **job})
    pipeline = document["spec"]["pipeline"]
    pipeline["mode"] = mode
    pipeline.pop("maxStalenessSteps", None)
    if staleness:
        pipeline["maxStalenessSteps"] = staleness
    document["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": step_s}
    return document


def start(job: dict[str, Any], tmp_path: Path) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    return LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)


def kill(run: LocalRun, victim: str) -> None:
    """Kill a worker and wait for the next one (or the end), or kill all and go on."""
    if victim == "all":
        run.kill_all(WORKERS)
        run.assert_exact()
        run.resume()
        return
    run.kill_one(victim)


def step_lines(run: LocalRun) -> list[dict[str, Any]]:
    text = (run.folder / "metrics" / "steps.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def part_s(run: LocalRun, part: str, *, process: str) -> float:
    return sum(line["parts"][part] for line in run.walls() if line["process"].startswith(process))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "staleness", "seed"),
    [
        pytest.param("Colocated", 0, 1, marks=pytest.mark.soak),
        pytest.param("Batch", 0, 2, marks=pytest.mark.soak),
        ("Batch", 1, 3),
    ],
    ids=str,
)
def test_whole_batches_survive_kills(mode: str, staleness: int, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    job, gate = mode_job(mode, staleness=staleness), Gate.shut(tmp_path)
    job["spec"]["task"]["rewards"] = [REWARD]
    run = start(job, tmp_path)
    for moment, victim in zip(range(3, STEPS, STEPS // KILLS), chance.sample([*WORKERS, "all"], KILLS), strict=True):
        gate.until(lambda moment=moment: run.steps() >= moment, what=f"step {moment}; {run.logs()}")
        kill(run, victim)
    gate.open()
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == STEPS
    run.assert_exact()
    for line in run.walls():
        assert sum(line["parts"].values()) == pytest.approx(line["wall_s"], rel=0.01, abs=1e-3), line


@pytest.mark.timeout(300)
def test_colocated_waits_are_turns(tmp_path: Path) -> None:
    run = start(mode_job("Colocated", steps=10), tmp_path)
    assert run.wait_end() == 0, run.logs()
    for process in ("trainer", "generator"):
        assert part_s(run, "pipeline_phase", process=process) > 0
        assert part_s(run, "pipeline_staleness", process=process) == 0
    assert part_s(run, "pipeline_phase", process="generator") > 10 * STEP_S / 2, "they wait while the trainer trains"
    assert {line["staleness_max"] for line in step_lines(run)} == {0}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("correct_percent", [pytest.param(0, marks=pytest.mark.soak), 50], ids=["all equal", "mixed"])
def test_dynamic_sampling_draws_again_and_ends(correct_percent: int, tmp_path: Path) -> None:
    job = mode_job("StreamAsync", steps=12, staleness=1, step_s=0.02, correctPercent=correct_percent)
    job["spec"]["algorithm"] = {"dapo": {"dynamicSampling": {"maxDrawsPerStep": 3}}}
    run = start(job, tmp_path)
    run.wait_steps(4)
    run.kill("scheduler")
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == 12
    told = run.assert_exact()
    assert "zero_variance" in told
    drops = [line["dropped"].get("zero_variance", 0) for line in step_lines(run)]
    assert sum(drops) > 0
    assert all(line["groups"] == 4 for line in step_lines(run))


@pytest.fixture
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workers]:
    """Processes without a runner: a slow trainer, two generators of 20 ms a token, or as the test says; 40 tokens a sample."""
    milliseconds = getattr(request, "param", 20.0)
    write_prompts(tmp_path / "prompts.jsonl")
    job = mode_job(
        "StreamAsync",
        staleness=1,
        steps=200,
        latency=[{"batch": 1, "milliseconds": milliseconds}],
        meanTokens=40.0,
        sigma=0.0,
    )
    job["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    job["spec"]["task"]["evaluation"]["maxPrompts"] = 1  # those samples come first, and are not counted as issued again
    started = Workers.prepare(job, folder=tmp_path / "run")
    started.start_all(generators=2)
    wait_for(
        lambda: started.numbers().get("scaling", {}).get("all", {}).get("generators") == 2,
        what=f"two generators; {started.text('scheduler')}",
    )
    yield started
    started.close()


@pytest.mark.timeout(600)
def test_a_generator_that_leaves_finishes_what_it_has_and_the_others_go_on(workers: Workers) -> None:
    wait_for(lambda: _active(workers, "generator-sim-0"), what=f"samples; {workers.text('scheduler')}")
    workers.processes["generator-sim-0"].send_signal(signal.SIGTERM)
    wait_for(
        lambda: workers.numbers()["scaling"]["pools"]["sim"]["leaving"] or workers.ended("generator-sim-0"),
        what="its Leaving",
    )
    assert workers.wait("generator-sim-0") == EXIT_DONE
    wait_for(lambda: workers.numbers()["scaling"]["all"]["generators"] == 1, what="it to be gone")
    numbers = workers.numbers()
    assert numbers["reissued"] == 0, "it left nothing behind"
    before = numbers["step"]
    wait_for(lambda: workers.numbers()["step"] >= before + 2, what="steps without it")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [250.0], indirect=True, ids=["10 s a sample"])
def test_what_a_leaving_generator_holds_when_it_is_killed_is_made_by_another(workers: Workers) -> None:
    wait_for(lambda: _active(workers, "generator-sim-0"), what=f"samples; {workers.text('scheduler')}")
    workers.processes["generator-sim-0"].send_signal(signal.SIGTERM)
    wait_for(lambda: workers.numbers()["scaling"]["all"]["leaving"] == 1, what="its Leaving")
    workers.kill("generator-sim-0")
    wait_for(lambda: workers.numbers()["scaling"]["all"]["generators"] == 1, what="it to be gone")
    wait_for(lambda: workers.numbers()["reissued"] > 0, what="its samples to be issued again")
    before = workers.numbers()["step"]
    wait_for(lambda: workers.numbers()["step"] >= before + 1, what="steps without it")


@pytest.mark.timeout(600)
def test_the_autoscalers_numbers(workers: Workers) -> None:
    known = ("step_s", "steps_per_s", "generation_s", "generator_seconds", "training_s", "trainer")
    scaling = wait_for(
        lambda: _if(workers.numbers()["scaling"], lambda found: all(found[name] is not None for name in known)),
        what="all numbers to be known",
    )
    assert scaling["steps_per_s"] == pytest.approx(1 / scaling["step_s"])
    assert scaling["generator_seconds"] == pytest.approx(2 * scaling["generation_s"])
    assert 0 < scaling["training_s"] <= scaling["step_s"] * 1.001
    assert 0 < scaling["generation_s"] <= scaling["step_s"] * 1.001
    assert sum(scaling["trainer"].values()) == pytest.approx(1, abs=1e-6)
    pool = scaling["pools"]["sim"]
    assert pool == scaling["all"]
    assert (pool["generators"], pool["leaving"], pool["silent"], pool["slots"]) == (2, 0, 0, 16)
    assert pool["tokens_per_s"] > 0
    assert sum(pool["parts"].values()) == pytest.approx(1, abs=1e-6)
    assert scaling["step"] + scaling["steps_left"] == 200


def _active(workers: Workers, generator: str) -> bool:
    return any(entry["id"] == generator and entry["active"] for entry in workers.numbers().get("generators", []))


def _if(value: Any, condition: Any) -> Any:
    return value if condition(value) else None
