"""vLLM's processes die, or stand still, under a run: seen, told in a line, the generator replaced, the journal exact."""

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from streamrl.keys import ENV_LIVENESS_SECONDS
from streamrl_cli.jobfile import load_job
from support.held_runs import Hold
from support.runs import LocalRun, wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
HELD_AT = 4
GENERATOR = "generator-local-0"
SMALL = [
    "spec.pipeline.batchGroups=8",
    "spec.model.scratch.heads=2",
    "spec.model.scratch.warmUp.steps=20",
    "spec.task.evaluation.maxPrompts=16",
    "spec.generators[0].engine={vllm: {maxConcurrency: 32, kvCacheBytes: 64Mi}}",
]
STARTS_S = 300.0
"""vLLM starts at least twice in each of these runs."""
ENDED, STUCK = "a process of vLLM has ended", "vLLM's core did not answer"
KINDS = [
    ("EngineCore", signal.SIGKILL, ENDED),
    ("Worker", signal.SIGKILL, ENDED),
    ("EngineCore", signal.SIGSTOP, STUCK),
    ("Worker", signal.SIGSTOP, STUCK),
]
DEATHS, STEPS_BETWEEN = 10, 4
"""Groups that were there at a death suffice for fewer steps: the generator has something to do."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.timeout(3600)
def test_ten_deaths_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the kinds twice or more; prints after how long the generator told of it."""
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, "20")
    drawn = random.Random(19)
    kinds = [*KINDS, *KINDS, *drawn.choices(KINDS, k=DEATHS - 2 * len(KINDS))]
    drawn.shuffle(kinds)
    steps = HELD_AT + STEPS_BETWEEN * DEATHS
    run, hold = at_work(tmp_path, steps=steps)
    log = run.folder / "logs" / f"{GENERATOR}.log"
    for number, (process, sent, told) in enumerate(kinds, start=1):
        at = HELD_AT + STEPS_BETWEEN * number
        generator = run.pid_of(GENERATOR)
        theirs = psutil.Process(generator).children(recursive=True)
        before = log.read_text().count(told)
        os.kill(named(theirs, process).pid, sent)
        since_s = time.monotonic()
        hold.move(at)
        wait_for(lambda: log.read_text().count(told) > before, what=f"{told!r}, {number}; {run.logs()}")  # noqa: B023
        print(f"death {number}: {process} {sent.name}: told after {time.monotonic() - since_s:.1f} s")  # noqa: T201 - the record
        wait_gone(theirs)
        run.wait_replaced(GENERATOR, pid=generator, deadline_s=STARTS_S)
        wait_for(
            lambda: run.steps() >= at or run.process.poll() is not None,  # noqa: B023
            what=f"step {at}; {run.logs()}",
            deadline_s=STARTS_S,
        )
    hold.let_go()
    assert run.process.wait(STARTS_S) == 0, run.logs()
    assert (run.result()["status"], run.steps()) == ("succeeded", steps)
    run.assert_exact()


def test_nothing_of_vllm_outlives_a_generator_that_is_killed(tmp_path: Path) -> None:
    run, hold = at_work(tmp_path, steps=12)
    theirs = psutil.Process(run.pid_of(GENERATOR)).children(recursive=True)
    assert named(theirs, "EngineCore") and named(theirs, "Worker")
    run.kill_one(GENERATOR)
    wait_gone(theirs)
    theirs = psutil.Process(run.pid_of(GENERATOR)).children(recursive=True)
    hold.let_go()
    assert run.process.wait(STARTS_S) == 0, run.logs()
    wait_gone(theirs)
    run.assert_exact()


def at_work(tmp_path: Path, *, steps: int) -> tuple[LocalRun, Hold]:
    """A run that is held in its midst, its generator with samples under way."""
    overrides = [*SMALL, f"spec.pipeline.steps={steps}", f"spec.failurePolicy.maxRestarts={DEATHS}"]
    job = load_job(EXAMPLE, overrides=overrides).model_dump(mode="json", by_alias=True, exclude_none=True)
    for module in EXAMPLE.parent.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text())
    hold = Hold.on(job, tmp_path, step=HELD_AT)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    wait_for(
        lambda: run.steps() >= HELD_AT or run.process.poll() is not None,
        what=f"step {HELD_AT}; {run.logs()}",
        deadline_s=STARTS_S,
    )
    return run, hold


def named(processes: list[psutil.Process], name: str) -> psutil.Process:
    titles = {process: process.cmdline()[0] for process in processes if alive(process)}
    found = [process for process, title in titles.items() if title.startswith(f"VLLM::{name}")]
    assert found, f"no {name} among {list(titles.values())}"
    return found[0]


def wait_gone(processes: list[psutil.Process]) -> None:
    wait_for(lambda: not any(alive(one) for one in processes), what=f"the end of {processes}")


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
