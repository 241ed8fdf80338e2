"""What breaks on a cluster, broken on a real one while a job runs: the job ends as planned, and its journal is exact.

Each fault says what it costs: restarts that count towards maxRestarts, restarts that do not, lives of the trainer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from e2e.jobs import simulated
from e2e.release import Release, kill_container, stop_container
from e2e.stage import Stage, count_steps
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

JOB, STEPS, STEP_S = "sim", 60, 0.5
"""Half a minute at least: there is always enough left to do after the fault."""
BEGUN_STEPS, MORE_STEPS = 4, 8
OUTAGE_S = 30.0
FROZEN_S = 240.0
"""For the kubelet to see it: 90 s, and what a busy machine takes."""
TRAINER, GENERATOR = f"{names.trainer(JOB)}-0", f"{names.pool(JOB, 'sim')}-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a fault may cost."""

    restarts: int = 0
    ignored: int = 0
    attempts: int = 1


def generator_pod_deleted(stage: Stage, release: Release) -> None:
    stage.kubectl("delete", "pod", GENERATOR, "--wait=false")


def generator_killed(stage: Stage, release: Release) -> None:
    kill_container(release.cluster, stage.pods(JOB)[GENERATOR], names.CONTAINER_GENERATOR)


def trainer_pod_deleted(stage: Stage, release: Release) -> None:
    stage.kubectl("delete", "pod", TRAINER, "--wait=false")


def trainer_killed(stage: Stage, release: Release) -> None:
    kill_container(release.cluster, stage.pods(JOB)[TRAINER], names.CONTAINER_TRAINER)


def scheduler_killed(stage: Stage, release: Release) -> None:
    kill_container(release.cluster, stage.pods(JOB)[TRAINER], names.CONTAINER_SCHEDULER)


def generators_frozen(stage: Stage, release: Release) -> None:
    """Both: while one works the job goes on without the other."""
    for name in (GENERATOR, f"{names.pool(JOB, 'sim')}-0"):
        stop_container(release.cluster, stage.pods(JOB)[name], names.CONTAINER_GENERATOR)
    told_and_killed(stage, times=2)


def trainer_frozen(stage: Stage, release: Release) -> None:
    stop_container(release.cluster, stage.pods(JOB)[TRAINER], names.CONTAINER_TRAINER)
    told_and_killed(stage)


def scheduler_frozen(stage: Stage, release: Release) -> None:
    stop_container(release.cluster, stage.pods(JOB)[TRAINER], names.CONTAINER_SCHEDULER)
    told_and_killed(stage)


def told_and_killed(stage: Stage, *, times: int = 1) -> None:
    """A person sees it in the pod's events, first the word, then the end."""
    for line in ("no sign of life for", "failed liveness probe"):
        stage.wait_for(
            lambda said=line: stage.kubectl("get", "events", check=False).count(said) >= times,  # type: ignore[misc]
            f"the event {line!r} of {times} pods",
            job=JOB,
            deadline_s=FROZEN_S,
        )


def operator_killed(stage: Stage, release: Release) -> None:
    release.kill()


def apiserver_away(stage: Stage, release: Release) -> None:
    run_dir = stage.run_dir(JOB)
    begun_s, done = time.monotonic(), count_steps(run_dir)
    with release.cluster.without_apiserver():
        until(lambda: count_steps(run_dir) >= done + MORE_STEPS, f"{MORE_STEPS} steps without an API server")
        until(lambda: time.monotonic() > begun_s + OUTAGE_S, "the end of the outage")


def kubelet_away(stage: Stage, release: Release) -> None:
    node, run_dir = release.cluster.the_node, stage.run_dir(JOB)
    done = count_steps(run_dir)
    node.stop_kubelet(kill=True)
    until(lambda: count_steps(run_dir) >= done + MORE_STEPS, f"{MORE_STEPS} steps without a kubelet")
    node.start_kubelet_again()


def until(check: Callable[[], bool], what: str) -> None:
    """Where there may be nobody to ask about the job."""
    end = time.monotonic() + 2 * OUTAGE_S
    while not check():
        assert time.monotonic() < end, f"waited {2 * OUTAGE_S:.0f} s for {what}"
        time.sleep(0.1)  # a poll with a deadline


FAULTS: dict[Callable[[Stage, Release], None], Cost] = {
    generator_pod_deleted: Cost(ignored=1),
    generator_killed: Cost(restarts=1),
    trainer_pod_deleted: Cost(ignored=1, attempts=2),
    trainer_killed: Cost(restarts=1, attempts=2),
    scheduler_killed: Cost(restarts=1),
    generators_frozen: Cost(restarts=2),
    trainer_frozen: Cost(restarts=1, attempts=2),
    scheduler_frozen: Cost(restarts=1),
    operator_killed: Cost(),
    apiserver_away: Cost(),
    kubelet_away: Cost(),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_job_ends_as_planned(stage: Stage, release: Release, fault: Callable[[Stage, Release], None]) -> None:
    stage.apply(simulated(JOB, steps=STEPS, step_s=STEP_S))
    stage.wait_step(JOB, BEGUN_STEPS)
    stage.wait_for(lambda: stage.ready_generators(JOB) == 2, "both generators", job=JOB)
    fault(stage, release)
    status = stage.wait_succeeded(JOB)
    found = Cost(restarts=status["restarts"], ignored=status.get("ignoredRestarts", 0), attempts=status["attempt"])
    assert (status["step"], found) == (STEPS, FAULTS[fault]), stage.explain(JOB)
    assert count_steps(stage.run_dir(JOB)) == STEPS
    stage.assert_exact(JOB)
