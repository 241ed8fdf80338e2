"""A scheduler that is ready, and that the API server has no way to: the job's owner is told, once."""

from typing import Any

import pytest

from cluster.operators import RESYNC_S, SOON_S, Lab, Operator
from streamrl import names
from streamrl_operator.planning.readiness import RESYNCS, UNREACHABLE
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)

JOB = "sums"
NOWHERE = "198.51.100.7"
"""For documentation: nobody has it."""


def running(name: str) -> dict[str, Any]:
    """Status of a container that is ready."""
    state = {"running": {"startedAt": "2026-01-01T12:00:00Z"}}
    return {
        "name": name,
        "image": "x",
        "imageID": "",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "state": state,
    }


def make_ready(lab: Lab) -> None:
    """As a kubelet would tell, of every pod that there is."""
    for pod in lab.list("pods"):
        spec = pod["spec"]
        told = {
            "phase": "Running",
            "podIP": NOWHERE,
            "podIPs": [{"ip": NOWHERE}],
            "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")],
            "initContainerStatuses": [running(each["name"]) for each in spec.get("initContainers", ())],
            "containerStatuses": [running(each["name"]) for each in spec["containers"]],
        }
        lab.patch("pods", pod["metadata"]["name"], {"status": told}, part="status")


def warnings(lab: Lab) -> int:
    """Events of that reason about the job."""
    return sum(each["reason"] == UNREACHABLE and each["regarding"]["name"] == JOB for each in lab.list("events"))


def test_numbers_that_cannot_be_read_are_told(lab: Lab, operator: Operator) -> None:
    document = simulated_job()
    document["metadata"]["name"] = JOB
    lab.create("rljobs", document)
    lab.wait(lambda: len(lab.list("pods")) == 3, "the pods", operator)
    make_ready(lab)
    lab.wait(
        lambda: lab.condition(JOB, "Ready").get("reason") == UNREACHABLE,
        "the operator to say so",
        operator,
        deadline_s=RESYNCS * (RESYNC_S + 3.0) + SOON_S,
    )
    told = lab.condition(JOB, "Ready")
    assert (told["status"], f"port {names.PORT_SIGNALS}" in told["message"]) == ("False", True)
    assert "/services/http:sums-scheduler:signals/proxy/numbers" in told["message"]
    lab.wait(lambda: warnings(lab) == 1, "an event", operator)
    assert operator.metric("streamrl_operator_unreachable_jobs") == 1

    assert operator.stop() == 0
    operator.start().wait_until_leading()
    lab.wait(lambda: operator.metric("streamrl_operator_unreachable_jobs") == 1, "it to be said again", operator)
    operator.wait_for_looks()
    assert (lab.condition(JOB, "Ready")["reason"], warnings(lab)) == (UNREACHABLE, 1)

    lab.patch("rljobs", JOB, {"spec": {"suspend": True}})
    lab.wait(lambda: operator.metric("streamrl_operator_unreachable_jobs") == 0, "nobody to miss them", operator)
