"""A campaign of kills and freezes at random moments: 60 and 30 of simulated runs, 20 and 20 with torch, five freezes of two minutes.

Part of `make soak`; samples of it are in the default suite (`test_kills.py`, `test_freezes.py`). Each run must end well, its journal must be exact, and each
freeze must be told in its bound. A frozen process stays so until it is killed by the runner, or is let go on before that.
"""

import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from streamrl.keys import ENV_LIVENESS_SECONDS
from streamrl.liveness import LIVENESS_S, word_s
from streamrl_cli.jobfile import load_job
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, wait_for

Fault = Literal["kill", "freeze", "freeze and let go"]

SCALED_S, TORCH_S = 9.0, 30.0
"""Instead of 90 s: a word after 3 s and 10 s. Imports of torch hold the interpreter for seconds on a busy machine, and are not to be taken for frozen."""
PATIENCE_S = 1200.0
"""For a step, a line or a process on a busy machine."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
STEPS, TORCH_STEPS = 480, 60
"""Enough to be left after the last fault: while a generator is frozen the others go on."""
FAULTS_UNTIL = 0.3
"""Share of the steps in which faults begin."""
SIMULATED = ("scheduler", "trainer-0", "generator-sim-0", "generator-sim-1")
TORCH = ("scheduler", "trainer-0", "generator-local-0")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@dataclass
class Campaign:
    """One run, and what is done to it."""

    run: LocalRun
    workers: Sequence[str]
    rng: random.Random
    bound_s: float
    done: list[str] = field(default_factory=list)
    told_s: list[int] = field(default_factory=list)
    """Silences when they were told, as the lines say."""

    def go(self, faults: Sequence[Fault], *, steps: int) -> None:
        """All faults, in an order and at moments by the seed, then the end of the run."""
        order = self.rng.sample(faults, len(faults))
        moments = sorted(self.rng.choices(range(1, int(FAULTS_UNTIL * steps)), k=len(order)))
        for fault, moment in zip(order, moments, strict=True):
            self.until(lambda at=moment: self.run.steps() >= at, f"step {moment}")  # type: ignore[misc]
            victim = self.rng.choice([*self.workers, "all"] if fault == "kill" else self.workers)
            self.done.append(f"{fault} {victim} at step {self.run.steps()}")
            self._apply(fault, victim)
        assert self.run.process.wait(PATIENCE_S) == 0, self.explain()
        assert (self.run.result()["status"], self.run.steps()) == ("succeeded", steps), self.explain()
        self.run.assert_exact()
        assert all(told_s <= word_s(self.bound_s) + 1 for told_s in self.told_s), self.explain()
        print(f"{len(self.done)} faults: {self.done}; told after {self.told_s} s")  # noqa: T201 - the campaign's record

    def _apply(self, fault: Fault, victim: str) -> None:
        if fault == "kill" and victim == "all":
            self.run.kill_all(self.workers)
            self.run.assert_exact()
            self.run.resume()
        elif fault == "kill":
            self.until(lambda: self.run.kill(victim), f"{victim} to kill")
        else:
            self._freeze(victim, let_go=fault == "freeze and let go")

    def _freeze(self, victim: str, *, let_go: bool) -> None:
        silent, alive = f"{victim} has shown no sign of life for ", f"{victim} shows signs of life again"
        self.until(lambda: self.run.pid_of(victim), f"{victim} to freeze")
        before, alive_before = self.run.said().count(silent), self.run.said().count(alive)
        pid = self.run.freeze(victim)
        self.until(lambda: self.run.said().count(silent) > before or not _is_alive(pid), f"the word about {victim}")
        assert self.run.said().count(silent) > before, self.explain()
        self.told_s.append(int(re.findall(re.escape(silent) + r"(\d+) s", self.run.said())[-1]))
        if let_go:
            os.kill(pid, signal.SIGCONT)
            self.until(lambda: self.run.said().count(alive) > alive_before, f"{victim} to go on")
        else:
            self.until(lambda: self.run.pid_of(victim) not in (None, pid), f"another {victim}")

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait; the run must not end before."""

        def look() -> Any:
            ended = self.run.process.poll() is not None
            value = condition()
            assert value or not ended, f"the run ended before {what}; {self.explain()}"
            return value

        wait_for(look, what=f"{what} ({self.done})", deadline_s=PATIENCE_S)

    def explain(self) -> str:
        return f"{self.done}; told {self.told_s}; {self.run.logs()}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def simulated(tmp_path: Path, *, steps: int, staleness: int) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=steps, staleness=staleness)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.1}
    job["spec"]["failurePolicy"]["maxRestarts"] = 1000
    return LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)


def torch(tmp_path: Path) -> LocalRun:
    changes = [
        f"spec.pipeline.steps={TORCH_STEPS}",
        "spec.pipeline.batchGroups=8",
        "spec.model.scratch.warmUp.steps=40",
        "spec.task.evaluation.maxPrompts=16",
        "spec.task.evaluation.intervalSteps=20",
        "spec.storage.checkpoints.intervalSteps=3",
        "spec.failurePolicy.maxRestarts=1000",
    ]
    job = load_job(EXAMPLE, overrides=changes).model_dump(mode="json", by_alias=True, exclude_none=True)
    for module in EXAMPLE.parent.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text())
    return LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)


@pytest.mark.parametrize("seed", range(10))
def test_six_kills_and_three_freezes_of_a_simulated_run(
    *, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, str(SCALED_S))
    run = simulated(tmp_path, steps=STEPS, staleness=seed % 3)
    campaign = Campaign(run, SIMULATED, random.Random(seed), SCALED_S)
    campaign.go([*6 * ["kill"], *2 * ["freeze"], "freeze and let go"], steps=STEPS)


@pytest.mark.parametrize("seed", range(5))
def test_four_kills_and_four_freezes_with_torch(*, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, str(TORCH_S))
    campaign = Campaign(torch(tmp_path), TORCH, random.Random(seed), TORCH_S)
    campaign.go([*4 * ["kill"], *3 * ["freeze"], "freeze and let go"], steps=TORCH_STEPS)


def test_five_freezes_of_two_minutes_by_the_bounds_that_users_have(tmp_path: Path) -> None:
    run = simulated(tmp_path, steps=6 * STEPS, staleness=1)
    Campaign(run, SIMULATED, random.Random(0), LIVENESS_S).go(5 * ["freeze"], steps=6 * STEPS)
