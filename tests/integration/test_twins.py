"""Two living generators with one id, as by a mistake or on both sides of a cut: one of them works, the other waits its turn.

Each has a run folder of its own, as on two machines, and is started again whenever it ends, as by a kubelet.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import simulated_job, write_prompts
from support.runs import streamrl, wait_for
from support.worker_processes import Workers

LEASE_S = 15.0
"""A generator that a busy machine holds up for some seconds is not given up."""
NAME = "generator-sim-0"
REFUSED = f"ALREADY_EXISTS: generator {NAME} is connected as instance "


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Workers, Workers]]:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=5000, latency=[{"batch": 1, "milliseconds": 60.0}])
    job["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    first = Workers.prepare(job, folder=tmp_path / "run")
    second = Workers.prepare(job, folder=tmp_path / "elsewhere")
    second.token, second.scheduler_port = first.token, first.scheduler_port
    yield first, second
    second.close()
    first.close()


def joined(workers: Workers, name: str = NAME) -> int:
    return workers.text("scheduler").count(f"generator {name} has joined")


def wait_steps(workers: Workers, *sides: Workers) -> None:
    """Until two steps more are done; whoever of the two has ended is started again."""
    steps = len(workers.lines("steps.jsonl"))

    def done() -> bool:
        for side in sides:
            if side.ended(NAME):
                side.start(NAME)
        return len(workers.lines("steps.jsonl")) >= steps + 2

    wait_for(done, what=f"steps {workers.text('scheduler')}")


def test_two_of_one_id_do_not_evict_each_other(sides: tuple[Workers, Workers]) -> None:
    workers, twin = sides
    workers.start_all(generators=2)
    wait_for(lambda: joined(workers) == joined(workers, "generator-sim-1") == 1, what="both generators")
    wait_steps(workers)

    twin.start(NAME)
    wait_for(lambda: REFUSED in twin.text(NAME) or joined(workers) > 1, what=f"a refusal {twin.text(NAME)}")
    for _ in range(3):  # the newcomer waits, or begins anew: it gets nothing while the other one is heard
        wait_steps(workers, workers, twin)
        twin.kill(NAME)
        wait_steps(workers, workers, twin)
    assert joined(workers) == 1
    assert workers.numbers()["reissued"] == 0
    assert workers.text("scheduler").count("refused generator") >= 1

    workers.processes[NAME].send_signal(signal.SIGSTOP)
    wait_for(lambda: joined(workers) == 2, what=f"the other one in its place {workers.text('scheduler')}")
    workers.processes[NAME].send_signal(signal.SIGCONT)
    wait_for(lambda: REFUSED in workers.text(NAME), what=f"its refusal {workers.text(NAME)}")
    wait_steps(workers, workers, twin)
    assert joined(workers) == 2, "one that wakes up takes nothing back"

    twin.kill(NAME)
    wait_for(lambda: joined(workers) == 3, what=f"the first one again {workers.text('scheduler')}")
    wait_steps(workers, workers)
    assert joined(workers, "generator-sim-1") == 1, "nobody else noticed"
    assert workers.terminate("scheduler") == 75
    check = streamrl("journal", "check", str(workers.folder))
    assert check.returncode == 0, check.stdout
