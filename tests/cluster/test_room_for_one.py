"""Two jobs, and room for one, with Kubernetes' own scheduler and nodes that KWOK plays: the older runs, and the younger holds nothing."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cluster.harness import kwok
from cluster.harness.control_plane import ControlPlane, Settings
from cluster.harness.processes import wait_until
from cluster.operators import Lab, Operator
from support.jobs import simulated_job

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]

NAMESPACE, OLDER, YOUNGER = "room-for-one", "older", "younger"
DEADLINE_S, LONG_S = 20, 240.0
GPUS = {"resources": {"limits": {"nvidia.com/gpu": "24"}}}
"""Of a pod: the node has 64, so two trainers leave no room for a generator, and one job fits."""


def job(name: str) -> dict[str, Any]:
    document = simulated_job(replicas=1)
    document["metadata"]["name"] = name
    document["spec"]["startDeadlineSeconds"] = DEADLINE_S
    document["spec"]["trainer"]["pod"] = GPUS
    document["spec"]["generators"][0]["pod"] = GPUS
    return document


def volume(number: int) -> dict[str, Any]:
    """For a claim of a job: the scheduler waits until they are bound."""
    spec = {"capacity": {"storage": "1Ti"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/nowhere"}}
    return {"metadata": {"name": f"volume-{number}"}, "spec": spec}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane(Settings(scheduler=True)) as made:
        made.apply_crds()
        player = kwok.start(made, nodes=1)
        made.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}}).expect()
        for number in range(4):
            made.api.create("/api/v1/persistentvolumes", volume(number)).expect()
        yield made
        player.stop()


@pytest.fixture
def operator(plane: ControlPlane) -> Iterator[Operator]:
    made = Operator(plane, NAMESPACE).start()
    yield made.wait_until_leading()
    made.stop()


def sizes(lab: Lab, job_name: str) -> list[int]:
    """Pods that the job's StatefulSets are asked for."""
    found = [each for each in lab.list("statefulsets") if each["metadata"]["name"].startswith(job_name)]
    return [each["spec"]["replicas"] for each in found]


def has_been_ready(lab: Lab, job_name: str) -> bool:
    start = lab.must("rljobs", job_name).get("status", {}).get("start", {})
    return "readyTime" in start


def let_go(lab: Lab) -> set[str]:
    """Jobs that have let their nodes go."""
    return {each["regarding"]["name"] for each in lab.list("events") if each["reason"] == "StartDeadlineExceeded"}


def cordon(plane: ControlPlane, *, value: bool) -> None:
    plane.api.patch("/api/v1/nodes/kwok-0", {"spec": {"unschedulable": value}}).expect()


def test_the_younger_lets_go_and_runs_when_the_older_has_gone(plane: ControlPlane, operator: Operator) -> None:
    lab = Lab(plane, NAMESPACE)

    def wait(check: Any, what: str) -> None:
        wait_until(check, what=what, deadline_s=LONG_S, log=operator.log)

    cordon(plane, value=True)
    made = datetime.fromisoformat(lab.create("rljobs", job(OLDER))["metadata"]["creationTimestamp"])
    wait(lambda: datetime.now(UTC) > made + timedelta(seconds=1), "the next second")
    lab.create("rljobs", job(YOUNGER))
    wait(lambda: len(lab.list("pods")) == 2, "both trainers")
    cordon(plane, value=False)
    wait(lambda: has_been_ready(lab, OLDER), "the older to run")
    assert (let_go(lab), sizes(lab, OLDER)) == ({YOUNGER}, [1, 1])
    assert not has_been_ready(lab, YOUNGER)
    lab.delete("rljobs", OLDER)
    wait(lambda: has_been_ready(lab, YOUNGER), "the younger to run")
