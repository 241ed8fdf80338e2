"""vLLM's processes die, or stand still, under a run: seen, told in a line, the generator replaced, the journal exact."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from streamrl.keys import ENV_LIVENESS_SECONDS
from streamrl_cli.jobfile import load_job
from support.held_runs import Hold
from support.runs import LocalRun, wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
STEPS, HELD_AT = 12, 4
GENERATOR = "generator-local-0"
SMALL = [
    f"spec.pipeline.steps={STEPS}",
    "spec.pipeline.batchGroups=8",
    "spec.model.scratch.heads=2",
    "spec.model.scratch.warmUp.steps=20",
    "spec.task.evaluation.maxPrompts=16",
    "spec.generators[0].engine={vllm: {maxConcurrency: 32, kvCacheBytes: 64Mi}}",
]
STARTS_S = 300.0
"""vLLM starts twice in each of these runs."""
ENDED, STUCK = "a process of vLLM has ended", "vLLM's core did not answer"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("process", "sent", "told"),
    [("EngineCore", signal.SIGKILL, ENDED), ("Worker", signal.SIGKILL, ENDED), ("EngineCore", signal.SIGSTOP, STUCK)],
)
def test_a_death_in_vllm(
    *, process: str, sent: signal.Signals, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, "20")
    run, hold = at_work(tmp_path)
    generator = run.pid_of(GENERATOR)
    theirs = psutil.Process(generator).children(recursive=True)
    os.kill(named(theirs, process).pid, sent)
    log = run.folder / "logs" / f"{GENERATOR}.log"
    wait_for(lambda: told in log.read_text(), what=f"the generator to say {told!r}; {run.logs()}")
    wait_gone(theirs)
    run.wait_replaced(GENERATOR, pid=generator, deadline_s=STARTS_S)
    hold.let_go()
    assert run.process.wait(STARTS_S) == 0, run.logs()
    assert (run.result()["status"], run.steps()) == ("succeeded", STEPS)
    run.assert_exact()


def test_nothing_of_vllm_outlives_a_generator_that_is_killed(tmp_path: Path) -> None:
    run, hold = at_work(tmp_path)
    theirs = psutil.Process(run.pid_of(GENERATOR)).children(recursive=True)
    assert named(theirs, "EngineCore") and named(theirs, "Worker")
    run.kill_one(GENERATOR)
    wait_gone(theirs)
    theirs = psutil.Process(run.pid_of(GENERATOR)).children(recursive=True)
    hold.let_go()
    assert run.process.wait(STARTS_S) == 0, run.logs()
    wait_gone(theirs)
    run.assert_exact()


def at_work(tmp_path: Path) -> tuple[LocalRun, Hold]:
    """A run that is held in its midst, its generator with samples under way."""
    job = load_job(EXAMPLE, overrides=SMALL).model_dump(mode="json", by_alias=True, exclude_none=True)
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
