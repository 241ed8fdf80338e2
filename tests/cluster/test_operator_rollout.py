"""A change of a pool's pods, with Kubernetes' own controller of StatefulSets: as many at once as `pod.maxUnavailable` says."""

from typing import Any

import pytest

from cluster.operators import Lab, Operator
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)
JOB, POOL = "rolls", "rolls-sim"


def pods(lab: Lab) -> dict[str, dict[str, Any]]:
    found = {one["metadata"]["name"]: one for one in lab.list("pods")}
    return {name: one for name, one in found.items() if name.startswith(POOL)}


def make_ready(lab: Lab) -> None:
    """As a kubelet says it."""
    for name in pods(lab):
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        lab.patch("pods", name, {"status": status}, part="status")


def new(lab: Lab) -> set[str]:
    """Pods that have the change."""
    return {name for name, one in pods(lab).items() if one["metadata"]["labels"].get("changed") == "yes"}


def test_a_pool_is_replaced_in_portions(lab: Lab, operator: Operator) -> None:
    document = simulated_job()
    document["metadata"]["name"] = JOB
    (pool,) = document["spec"]["generators"]
    pool |= {"scaling": {"static": {"replicas": 5}}, "pod": {"maxUnavailable": 2}}
    lab.create("rljobs", document)
    lab.wait(lambda: len(pods(lab)) == 5, "five pods", operator)
    make_ready(lab)
    lab.wait(lambda: lab.must("statefulsets", POOL)["status"].get("readyReplicas") == 5, "them to be ready", operator)
    pool["pod"] = {"maxUnavailable": 2, "labels": {"changed": "yes"}}
    lab.patch("rljobs", JOB, {"spec": {"generators": [pool]}})
    for done in (2, 4, 5):
        lab.wait(lambda done=done: len(new(lab)) == done, f"{done} pods with the change", operator)
        operator.wait_for_looks(2)
        assert (len(new(lab)), len(pods(lab))) == (done, 5)
        make_ready(lab)
    assert new(lab) == set(pods(lab))


def test_a_pool_of_a_running_job_is_given_to_the_operator_and_back(lab: Lab, operator: Operator) -> None:
    """The API server refuses one strategy with the fields of the other."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    (pool,) = document["spec"]["generators"]
    lab.create("rljobs", document)
    for pod, kind in (({}, "RollingUpdate"), ({"maxUnavailable": 2}, "OnDelete"), ({}, "RollingUpdate")):
        lab.patch("rljobs", JOB, {"spec": {"generators": [pool | {"pod": pod}]}})
        lab.wait(
            lambda kind=kind: (
                (found := lab.get("statefulsets", POOL)) is not None and found["spec"]["updateStrategy"]["type"] == kind
            ),
            f"strategy {kind}",
            operator,
        )
