"""An exception in the scheduler of a real `streamrl run`: a clear end, and `--resume` finishes exactly once the cause is gone.

Simulated engine and trainer; processes, gRPC, task pool and journal are real. Every method of the core and every effect
that such a run reaches, at its first, a middle and its last call, in three modes: `make campaign-core`. The default suite takes a
sample; `tests/unit/workers/scheduler/test_core_faults.py` reaches the rest.
"""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamrl_workers.scheduler.journal.store import open_for_writing
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, wait_for

FAULTS = Path(__file__).parents[1] / "support" / "faults"
STEPS = 8
MODES: dict[str, dict[str, Any]] = {
    "StreamAsync": {"mode": "StreamAsync", "maxStalenessSteps": 1},
    "StreamSync": {"mode": "StreamSync"},
    "Batch": {"mode": "Batch", "maxStalenessSteps": 1},
}
EVENTS = [
    "start",
    "tick",
    "prompts_arrived",
    "prompts_ranked",
    "scores_arrived",
    "turns_answered",
    "committed",
    "generator_joined",
    "generator_progress",
    "generator_alive",
    "weights_loaded",
    "trainer_joined",
    "credit",
    "step_done",
    "published",
    "sync_journal",
    "checkpointed",
    "view",
]
"""Methods of the core that a run reaches in which nobody dies."""
CARRIED_OUT = [
    "scheduler.journal.writer:JournalWriter.append",
    "scheduler.server.connections:Connections.to_generator",
    "scheduler.server.connections:Connections.to_trainer",
    "scheduler.server.connections:Connections.deliver_group",
    "tasks.pool:TaskPool.put",
    "scheduler.server.ranker_client:RankerClient.ask",
    "scheduler.server.lifetime:ExitDecision.finished",
    "scheduler.journal.writer:JournalWriter._commit",
]
"""What effects do; the last is the journal's thread."""
TARGETS = [f"streamrl_workers.{name}" for name in (*(f"scheduler.core:Core.{name}" for name in EVENTS), *CARRIED_OUT)]
TRIES = 6
"""A run may make fewer calls than the one before it: the last call is looked for again."""
GAME = """
class Game:
    def step(self, completion):
        return "go on", 0.5, True

def make(*, question, answer, metadata, seed):
    return Game()
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    mode: str
    target: str
    moment: str
    """first | middle | last"""
    after: bool

    def __str__(self) -> str:
        name = self.target.rpartition(".")[2]
        return f"{self.mode}-{name}-{self.moment}{'-after' if self.after else ''}"


MOMENTS = ("first", "middle", "last")
ALL = [
    Case(mode=mode, target=target, moment=moment, after=(number + place) % 2 == 0)
    for place, target in enumerate(TARGETS)
    for mode in MODES
    for number, moment in enumerate(MOMENTS)
]
SAMPLE = [
    Case(
        mode="StreamAsync", target="streamrl_workers.scheduler.core:Core.prompts_arrived", moment="middle", after=True
    ),
    Case(
        mode="StreamSync",
        target="streamrl_workers.scheduler.server.connections:Connections.to_trainer",
        moment="last",
        after=False,
    ),
    Case(
        mode="Batch",
        target="streamrl_workers.scheduler.journal.writer:JournalWriter._commit",
        moment="middle",
        after=False,
    ),
]


def job(mode: str) -> dict[str, Any]:
    document = simulated_job(steps=STEPS, replicas=1, meanTokens=6.0)
    spec = document["spec"]
    spec["pipeline"] = {"batchGroups": 4, "steps": STEPS, **MODES[mode]}
    spec["task"]["environment"] = {"python": {"function": "game_of_faults:make"}, "maxTurns": 2}
    spec["scheduling"]["ranker"] = {"hashing": {}}
    spec["scheduling"]["lengthSignals"] = ["Ranker", "History"]
    spec["storage"]["checkpoints"]["intervalSteps"] = 3
    spec["failurePolicy"] = {"maxRestarts": 0}
    return document


def run(case: Case, base: Path, *, call: int, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalRun, int]:
    """A run with the exception at this call (0: none) until its end; how often the target was called.

    The ranker's process may take longer to start than such a run takes: it is held until the target was reached.
    """
    base.mkdir()
    write_prompts(base / "prompts.jsonl")
    (base / "game_of_faults.py").write_text(GAME)
    told = base / "calls"
    fault = {"target": case.target, "call": call, "after": case.after, "told": str(told)}
    document = job(case.mode)
    hold = Hold.on(document, base, step=2) if case.target.endswith("prompts_ranked") else None
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FAULTS))
        patch.setenv("STREAMRL_TEST_FAULT", json.dumps(fault))
        started = LocalRun.start(document, folder=base / "run", base_dir=base)
        if hold is not None:
            wait_for(Path(f"{told}.reached").exists, what="scores of the ranker", deadline_s=60)
            hold.let_go()
        started.wait_end()
    return started, int(told.read_text())


def faulted(case: Case, base: Path, monkeypatch: pytest.MonkeyPatch) -> LocalRun:
    """A run that has met its exception."""
    calls = 1
    if case.moment != "first":
        _, calls = run(case, base / "count", call=0, monkeypatch=monkeypatch)
        assert calls, f"{case.target} is never called"
    for number in range(TRIES):
        call = (calls + 1) // 2 if case.moment == "middle" else calls
        found, made = run(case, base / str(number), call=call, monkeypatch=monkeypatch)
        if made >= call:
            return found
        calls = made
    raise AssertionError(f"no run made as many calls as the one before it, {TRIES} times")


def assert_told(found: LocalRun) -> None:
    """One line that says what happened, and no word of success."""
    out = (found.folder.parent / "run.out").read_text()
    assert found.process.returncode == 1, found.logs()
    assert "InjectedError" in out.strip().splitlines()[-1], out
    assert "Traceback" not in out
    assert "done:" not in out
    assert not (found.folder / "result.json").exists()


def may_come_behind_the_end(case: Case) -> bool:
    """The verdict is made, or a page is read once more: all is done by then."""
    return (case.target.endswith("ExitDecision.finished") and case.after) or case.target.endswith("Core.view")


def check_case(case: Case, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = faulted(case, base, monkeypatch)
    if not (found.process.returncode == 0 and may_come_behind_the_end(case)):
        assert_told(found)
        found.assert_exact()
        found.resume()
    assert found.wait_end() == 0, found.logs()
    result = found.result()
    assert (result["status"], result["steps"], result["check"]["violations"]) == ("succeeded", STEPS, [])
    found.assert_exact()


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_fault_ends_the_run_and_resume_ends_it_well(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(case, tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_whole_campaign(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)


def test_a_run_whose_own_check_fails_has_failed(tmp_path: Path) -> None:
    """Whatever took a group out of the journal: the run says so, and never that it is done."""
    write_prompts(tmp_path / "prompts.jsonl")
    document = simulated_job(steps=20)
    hold = Hold.on(document, tmp_path, step=12)
    started = LocalRun.start(document, folder=tmp_path / "run", base_dir=tmp_path)
    started.wait_steps(12)
    assert started.interrupt() == 130, started.logs()
    hold.let_go()
    with closing(open_for_writing(tmp_path / "run" / "journal.sqlite")) as journal:
        journal.execute("DELETE FROM groups WHERE group_id = 3")
    for _ in range(2):  # and says it again
        started.resume()
        assert started.wait_end() == 2, started.logs()
        line = (tmp_path / "run.out").read_text().strip().splitlines()[-1]
        assert "own check fails: group 3 " in line
        assert "done:" not in (tmp_path / "run.out").read_text()
        result = started.result()
        assert result["status"] == "failed"
        assert "group 3 " in result["check"]["violations"][0]
