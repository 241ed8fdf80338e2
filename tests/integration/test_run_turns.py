"""A real `streamrl run` with an environment: killed at many points, and with environments that misbehave.

Simulated engine and trainer; processes, gRPC, task pool and journal are real. The games are made so that each turn earns
a quarter and their length follows from the item: a turn that was lost, doubled or played in another game shows in the
sums of every step.
"""

import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, wait_for
from support.turn_runs import WORKERS, assert_each_turn_earned_a_quarter, kill_in_turn, lines

STEPS = 40
STEP_S = 0.5
"""Half of the steps come after the last kill: time for a busy machine to get there."""
LIMIT_S = 2.0
"""Of a turn that hangs, and of those that do not."""

GAMES = '''
import time

class Game:
    def __init__(self, turns, question):
        self.turns, self.question, self.said = turns, question, []

    def step(self, completion):
        self.said.append(completion)
        assert completion in (self.question, "wrong"), completion
        return {"observation": "o" * len(self.said), "reward": 0.25, "done": len(self.said) == self.turns}

def fair(*, question, answer, metadata, seed):
    return Game(1 + seed % 4, question)

class Odd(Game):
    """Game 0 hangs, 1 raises, 2 never ends, 3 talks nonsense, 4 kills its process, 5 says nothing; the others are fair."""

    def __init__(self, kind, question):
        super().__init__(2, question)
        self.kind = kind

    def step(self, completion):
        answer = super().step(completion)
        if len(self.said) < 2 or self.kind > 5:
            return answer
        if self.kind == 0:
            while True:
                pass
        if self.kind == 1:
            raise RuntimeError("no more")
        if self.kind == 2:
            return "and on", 0.25, False
        if self.kind == 3:
            return {"observation": 7, "reward": None}
        if self.kind == 4:
            import os
            os._exit(3)
        return "", 0.25, len(self.said) == 3

def odd(*, question, answer, metadata, seed):
    return Odd(seed % 40, question)
'''


def start(tmp_path: Path, *, function: str, steps: int = STEPS, step_s: float = STEP_S, **environment: Any) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "turn_games.py").write_text(GAMES)
    job = simulated_job(steps=steps, staleness=1)
    task = job["spec"]["task"]
    task["environment"] = {"python": {"function": f"turn_games:{function}"}, **environment}
    task["rewards"] = [{"name": "game", "environment": {}}]
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": step_s}
    return LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)


def kill_task_worker(run: LocalRun, _: str) -> None:
    """The process that holds the live environments."""
    scheduler = psutil.Process(wait_for(lambda: run.pid_of("scheduler"), what="the scheduler"))
    workers = wait_for(
        lambda: [worker for server in scheduler.children() for worker in server.children()], what="a task worker"
    )
    workers[0].kill()


@pytest.mark.timeout(300)
def test_killed_at_random_no_turn_is_lost_or_played_twice(tmp_path: Path) -> None:
    rng = random.Random(11)
    run = start(tmp_path, function="fair")
    victims = [*WORKERS, "task worker", "task worker", "all"]
    rng.shuffle(victims)
    moments = sorted(rng.sample(range(STEPS // 2), len(victims)))
    kill_in_turn(run, zip(moments, victims, strict=True), others=kill_task_worker)
    assert_each_turn_earned_a_quarter(run, steps=STEPS)


@pytest.mark.timeout(300)
def test_environments_that_misbehave_are_counted_and_the_run_ends_well(tmp_path: Path) -> None:
    run = start(tmp_path, function="odd", steps=20, step_s=0.0, timeoutSeconds=LIMIT_S, maxTurns=5)
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    steps = lines(run, "steps.jsonl")
    assert len(steps) == 20
    dropped = sum(count for line in steps for count in line["dropped"].values())
    assert dropped > 0, "all samples of a group play the same game: what fails fails for the whole group"
    assert all(line["reward_failed"] == 0 for line in steps)
    longest = max(line["turns_mean"] for line in steps)
    assert 2 < longest <= 5
    failed = [line["failed"] for line in lines(run, "evaluations.jsonl")]
    assert len(set(failed)) == 1, "the same held-out games fail each time"


@pytest.mark.timeout(300)
def test_when_every_environment_fails_the_run_says_why(tmp_path: Path) -> None:
    write = GAMES.replace("1 + seed % 4", "1 / 0")
    run_dir = tmp_path
    write_prompts(run_dir / "prompts.jsonl")
    (run_dir / "broken_games.py").write_text(write)
    job = simulated_job(steps=5)
    job["spec"]["task"]["environment"] = {"python": {"function": "broken_games:fair"}}
    job["spec"]["task"]["rewards"] = [{"name": "game", "environment": {}}]
    run = LocalRun.start(job, folder=run_dir / "run", base_dir=run_dir)
    assert run.wait_end() == 2, run.logs()
    assert (
        "reward_failed): environment: raised ZeroDivisionError: division by zero" in (run_dir / "run.out").read_text()
    )
