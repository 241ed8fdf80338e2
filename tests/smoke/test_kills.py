"""A run of real processes, each killed once, stopped, and resumed: nothing is lost and nothing is trained twice.

Simulated engine and trainer; processes, gRPC, task pool, journal and checkpoints are real. `tests/integration` kills at random, and many.
"""

from pathlib import Path

from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun

STEPS = 24


def test_each_process_is_killed_once_and_the_journal_is_exact(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=STEPS, staleness=1)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.1}
    hold = Hold.on(job, tmp_path, step=14)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    for steps, victim in ((2, "generator-sim-0"), (6, "scheduler"), (10, "trainer-0")):
        run.wait_steps(steps)
        run.kill_one(victim)
    run.wait_steps(14)
    assert run.interrupt() == 130, run.logs()
    run.assert_exact()
    hold.let_go()
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert (run.result()["status"], run.steps()) == ("succeeded", STEPS)
    run.assert_exact()
