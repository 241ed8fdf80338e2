"""A real `streamrl run` with agents: killed at many points, and with programs that misbehave.

Simulated engine and trainer; processes, gRPC, task pool, agent host, HTTP and journal are real. As in `test_run_turns.py` each turn
earns a quarter and the number of turns follows from the item: a turn that was lost, doubled or played in another game shows in the
sums of every step.
"""

import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl_workers.scheduler.journal.sample_store import open_samples
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, streamrl, wait_for
from support.turn_runs import (
    AGENT_LINKS,
    BRANCHING,
    FAIR,
    MANY,
    ONE,
    PROGRAM,
    WORKERS,
    assert_each_turn_earned_a_quarter,
    kill_in_turn,
    lines,
)

STEPS = 24
LIFE_STEPS = 3
"""No sample is older, at a staleness of one."""
STEP_S = 1.0
"""Half of the steps come after the last kill: time for a busy machine to get there."""

ODD = """
def play(item):
    messages, call, turn = begin(item)
    kind = item["seed"] % 24
    turn()
    if kind == 0:
        time.sleep(10_000)
    if kind == 1:
        raise RuntimeError("no more")
    while kind == 2:
        turn()
    if kind == 3:
        call("/reward", reward="nonsense")
    if kind == 4:
        os.kill(os.getpid(), 9)
    if kind == 5:
        os.nice(19)
        while True: print("x" * 1000)
    if kind == 6:
        call("/chat/completions", messages=[{"role": "user", "content": "else"}])
    if kind == 7:
        call("/chat/completions", messages=[*messages, {"role": "user", "content": "x" * 10_000_000}])
    turn()
"""


def start(tmp_path: Path, program: str, *, steps: int = STEPS, step_s: float = STEP_S, **agent: Any) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "agent.py").write_text(PROGRAM + program)
    job = simulated_job(steps=steps, staleness=1)
    task = job["spec"]["task"]
    task["agent"] = {"command": ["python", "-S", "agent.py"], **agent}
    task["rewards"] = [{"name": "game", "environment": {}}]
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": step_s}
    return LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)


def processes(run: LocalRun, *, of: str) -> list[psutil.Process]:
    """Agent hosts, or the programs that run just now."""
    programs = [one for one in psutil.Process(run.process.pid).children(recursive=True) if _is_program(one)]
    return programs if of == "program" else list({one.ppid(): one.parent() for one in programs}.values())


def _is_program(process: psutil.Process) -> bool:
    try:
        return "agent.py" in process.cmdline()
    except psutil.Error:
        return False


def kill_one_of(run: LocalRun, what: str) -> None:
    """A process that is there for a moment may be gone; then another."""

    def killed() -> bool:
        try:
            victims = [process for process in processes(run, of=what) if process is not None]
            for process in victims[:1]:
                process.kill()
        except psutil.Error:
            return False
        return bool(victims)

    wait_for(killed, what=f"a kill of a {what}")


PLACES = ["in the job's pool", "apart"]
TWO = {"scaling": {"static": {"replicas": 2}}}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "options", "links"),
    [
        pytest.param(FAIR + ONE, {}, [], marks=pytest.mark.soak),
        pytest.param(FAIR + MANY, {"sessionsPerProgram": 24}, [], marks=pytest.mark.soak),
        pytest.param(BRANCHING + MANY, {"sessionsPerProgram": 24}, [], marks=pytest.mark.soak),
        (FAIR + MANY, {"pool": TWO, "sessions": 8, "sessionsPerProgram": 8}, [*AGENT_LINKS]),
    ],
    ids=["one", "many", "branching", "apart"],
)
def test_killed_at_random_no_turn_is_lost_or_played_twice(
    tmp_path: Path, program: str, options: dict[str, Any], links: list[str]
) -> None:
    rng = random.Random(11)
    run = start(tmp_path, program, **options)
    twice_fails = ["host", "host", "program", "program", "program"]
    """A sample that sees two of them has failed, so they are further apart than a sample lives."""
    rng.shuffle(twice_fails)
    victims = [*zip(range(0, STEPS // 2 + 1, LIFE_STEPS), twice_fails, strict=True)]
    victims += [(rng.randrange(STEPS // 2), victim) for victim in (*WORKERS, *links, *links, "all")]
    kill_in_turn(run, sorted(victims), others=kill_one_of)
    assert_each_turn_earned_a_quarter(run, steps=STEPS)
    with open_samples(run.folder) as store:
        samples = [sample for group in store.groups() for sample in group.read().samples]
    branched = sum(segment.context for sample in samples for segment in sample.segments)
    assert (branched > len(samples) / 2) == (BRANCHING in program)
    shown = streamrl("journal", "show", str(run.folder), str(4 * STEPS - 1)).stdout
    assert (" contexts (rewards 0.25" in shown) == (BRANCHING in program), shown


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("options", "links"), [({}, []), ({"pool": TWO, "sessions": 8}, [*AGENT_LINKS])], ids=PLACES)
def test_thirty_kills(tmp_path: Path, options: dict[str, Any], links: list[str]) -> None:
    rng, steps = random.Random(24), 36
    twice_fails = ["host", "program"] * 4
    others = [*WORKERS * (4 if links else 5), *links * 2, "all", "all"]
    moments = range(0, LIFE_STEPS * len(twice_fails), LIFE_STEPS)
    victims = [*zip(moments, twice_fails, strict=True), *((rng.randrange(moments.stop), victim) for victim in others)]
    assert len(victims) == 30
    run = start(tmp_path, FAIR + ONE, steps=steps, **options)
    kill_in_turn(run, sorted(victims), others=kill_one_of)
    assert_each_turn_earned_a_quarter(run, steps=steps)


@pytest.mark.timeout(400)
def test_programs_that_misbehave_are_counted_and_the_run_ends_well(tmp_path: Path) -> None:
    run = start(tmp_path, ODD + ONE, steps=12, step_s=0.0, timeoutSeconds=20, maxTurns=4, branches="Fail")
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    steps = lines(run, "steps.jsonl")
    assert len(steps) == 12
    dropped = sum(count for line in steps for count in line["dropped"].values())
    assert dropped > 0, "all samples of a group play the same game: what fails fails for the whole group"
    assert all(line["reward_failed"] == 0 for line in steps)
    longest = max(line["turns_mean"] for line in steps)
    assert 2 <= longest <= 4
    failed = [line["failed"] for line in lines(run, "evaluations.jsonl")]
    assert len(set(failed)) == 1, "the same held-out games fail each time"


@pytest.mark.timeout(300)
def test_when_every_program_fails_the_run_says_why(tmp_path: Path) -> None:
    run = start(tmp_path, "1 / 0\n", steps=5)
    assert run.wait_end() == 2, run.logs()
    line = "reward_failed): agent: ended with status 1: ZeroDivisionError: division by zero"
    assert line in (tmp_path / "run.out").read_text()
