"""`kill -9` of a generator, the scheduler, the trainer, or of all with the runner, at random moments.

Simulated engine and trainer; everything else is real: processes, gRPC, journal, checkpoints. After each run
`streamrl journal check` proves invariant 1 from journal and checkpoint alone. 30 kills, and 10 Ctrl-C.
"""

import random
from pathlib import Path

import pytest

from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun

STEPS = 60
STEP_S = 0.1
HELD_AT = 40
"""The run waits here for its last kill."""
KILLS_PER_RUN = 6
WORKERS = ("scheduler", "trainer-0", "generator-sim-0", "generator-sim-1")


def start(
    tmp_path: Path, *, staleness: int, held_at: int, steps: int = STEPS, step_s: float = STEP_S
) -> tuple[LocalRun, Hold]:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=steps, staleness=staleness)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": step_s}
    hold = Hold.on(job, tmp_path, step=held_at)
    return LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path), hold


def assert_parts_make_the_wall(run: LocalRun) -> None:
    """Bubbles: in every line of every process, also those that died, the parts add up to the wall."""
    lines = run.walls()
    assert {line["process"] for line in lines} == {"trainer-0", "generator-sim-0", "generator-sim-1"}
    for line in lines:
        assert sum(line["parts"].values()) == pytest.approx(line["wall_s"], rel=0.01, abs=1e-3), line


@pytest.mark.parametrize(
    ("seed", "staleness"),
    [(1, 0), (4, 2), *(pytest.param(*other, marks=pytest.mark.soak) for other in ((2, 1), (3, 1), (5, 4)))],
)
def test_killed_at_random_the_run_ends_and_the_journal_is_exact(*, seed: int, staleness: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    run, hold = start(tmp_path, staleness=staleness, held_at=HELD_AT)
    moments = sorted(rng.sample(range(HELD_AT), KILLS_PER_RUN))
    victims = [rng.choice([*WORKERS, "all"]) for _ in moments]
    for moment, victim in zip(moments, victims, strict=True):
        run.wait_steps(moment)
        assert run.process.poll() is None, f"ended before the kill at step {moment}: {run.logs()}"
        if victim == "all":
            run.kill_all(WORKERS)
            run.assert_exact()
            run.resume()
        else:
            run.kill_one(victim)
    hold.let_go()
    assert run.wait_end() == 0, run.logs()
    assert run.result()["status"] == "succeeded"
    assert run.steps() == STEPS
    run.assert_exact()
    assert_parts_make_the_wall(run)


@pytest.mark.parametrize("times", [4, pytest.param(10, marks=pytest.mark.soak)])
def test_interrupted_and_resumed_many_times_nothing_is_lost(times: int, tmp_path: Path) -> None:
    rng = random.Random(7)
    moments = sorted(rng.sample(range(38), times))
    run, hold = start(tmp_path, staleness=1, held_at=moments[0], steps=40, step_s=0.02)
    for moment, following in zip(moments, [*moments[1:], 40], strict=True):
        run.wait_steps(moment)
        assert run.interrupt() == 130, run.logs()
        run.assert_exact()
        hold.move(following)
        run.resume()
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == 40
    run.assert_exact()
