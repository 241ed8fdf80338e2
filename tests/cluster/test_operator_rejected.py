"""Pods that a node's kubelet refuses to start, with Kubernetes' own controller of StatefulSets, which replaces a failed pod at once."""

from typing import Any

import pytest

from cluster.operators import Lab, Operator
from cluster.test_operator_unread import running
from streamrl import names
from streamrl_operator.planning.failures import FIRST_LIFE_S
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)
JOB, POOL = "turned-away", "turned-away-sim"
BAD = f"{POOL}-1"
REASONS = ("UnexpectedAdmissionError", "OutOfcpu", "NodeAffinity", "TopologyAffinityError", "Shutdown")


def run_pod(lab: Lab, name: str) -> None:
    """Say of a pod what a kubelet says of one that works."""
    container = "trainer" if name.startswith(names.trainer(JOB)) else "generator"
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [running(container)]}
    lab.patch("pods", name, {"status": {"phase": "Running", **ready}}, part="status")


def uid(lab: Lab, name: str) -> str:
    found = lab.get("pods", name)
    return "" if found is None else str(found["metadata"]["uid"])


def is_gated(lab: Lab, name: str) -> bool:
    found = lab.get("pods", name)
    return found is not None and [one["name"] for one in found["spec"].get("schedulingGates", ())] == [names.GATE]


def reject(lab: Lab, reason: str, operator: Operator) -> None:
    """Refuse the pod as its kubelet does; returns when another one is there."""
    before = uid(lab, BAD)
    status = {"phase": "Failed", "reason": reason, "message": f"Pod was rejected: {reason}"}
    lab.patch("pods", BAD, {"status": status}, part="status")
    lab.wait(lambda: uid(lab, BAD) not in ("", before), "another pod", operator)


def hold(lab: Lab) -> dict[str, Any]:
    holds = lab.must("rljobs", JOB)["status"].get("holds", [])
    return next((one for one in holds if one["name"] == POOL), {})


@pytest.mark.parametrize("pod", [{}, {"maxUnavailable": 2}], ids=["rolling", "portions"])
def test_pods_that_kubelets_reject_are_replaced_slowly_and_not_counted(
    lab: Lab, operator: Operator, pod: dict[str, Any]
) -> None:
    """The one in the middle of a pool: those around it stay."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    document["spec"]["generators"][0] |= {"scaling": {"static": {"replicas": 3}}, "pod": pod}
    lab.create("rljobs", document)
    lab.wait(lambda: len(lab.list("pods")) == 4, "all pods", operator)
    others = [f"{names.trainer(JOB)}-0", f"{POOL}-0", f"{POOL}-2"]
    for name in others:
        run_pod(lab, name)
    made = {name: uid(lab, name) for name in others}
    rounds = 0
    while not is_gated(lab, BAD):  # an operator need not see each of them: such a pod is gone in a moment
        reject(lab, REASONS[rounds % len(REASONS)], operator)
        rounds += 1
        operator.wait_for_looks(1)
    assert hold(lab)["rejections"] == 2
    held = uid(lab, BAD)
    lab.wait(
        lambda: uid(lab, BAD) not in ("", held) and not is_gated(lab, BAD),
        "a pod that waits no more",
        operator,
        deadline_s=FIRST_LIFE_S + 60,
    )
    run_pod(lab, BAD)
    lab.wait(lambda: not hold(lab), "the hold to end", operator)
    operator.wait_for_looks(2)
    assert {name: uid(lab, name) for name in others} == made, "pods that run stay"
    strategy = lab.must("statefulsets", POOL)["spec"]["updateStrategy"]["type"]
    assert strategy == ("OnDelete" if pod else "RollingUpdate")
    status = lab.must("rljobs", JOB)["status"]
    assert (lab.condition(JOB, "Failed")["status"], status["restarts"]) == ("False", 0)
    told = [one["note"] for one in lab.list("events") if one["reason"] == "PodRejected"]
    assert any("restarts that count: 0 of" in note for note in told)
