"""What jobs inherit from administrators, on a real API server: taken when a job begins, kept from then on, and told where it has a mistake."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.control_plane import ControlPlane
from cluster.operators import Lab, Operator
from streamrl import keys
from streamrl_cli.yaml_document import read_documents
from support.jobs import simulated_job
from support.tree import ROOT

pytestmark = pytest.mark.timeout(300)

SETS = ("trainer", "sim")


def defaults(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJobDefaults",
        "metadata": {"name": "default"},
        "spec": spec,
    }


def operated(plane: ControlPlane, namespace: str, spec: Any) -> Operator:
    """An operator whose chart has these `jobDefaults`."""
    return Operator(plane, namespace, **{keys.ENV_JOB_DEFAULTS: json.dumps(spec)})


@pytest.fixture
def operator(own_control_plane: ControlPlane, namespace: str) -> Iterator[Operator]:
    made = operated(own_control_plane, namespace, {"pod": {"nodeSelector": {"from": "cluster", "zone": "a"}}}).start()
    yield made.wait_until_leading()
    if made.runs:
        assert made.stop() == 0, made.tail()


def create(lab: Lab, name: str, **pod: Any) -> None:
    document = simulated_job()
    document["metadata"]["name"] = name
    document["spec"]["trainer"]["pod"] = document["spec"]["generators"][0]["pod"] = pod
    lab.create("rljobs", document)


def selectors(lab: Lab, job: str) -> list[dict[str, str]]:
    """Of trainer and generators; empty before they are made."""
    found = [lab.get("statefulsets", f"{job}-{name}") for name in SETS]
    return [one["spec"]["template"]["spec"].get("nodeSelector", {}) for one in found if one]


AT_WORK = [1, 2]
"""Generations of the trainer's StatefulSet, and of the pool's: without pods at first, until the trainer is ready."""


def versions(lab: Lab, job: str) -> list[int]:
    return [lab.must("statefulsets", f"{job}-{name}")["metadata"]["generation"] for name in SETS]


def test_a_job_keeps_what_it_began_with(lab: Lab, operator: Operator) -> None:
    lab.create(
        "rljobdefaults",
        defaults(pod={"nodeSelector": {"zone": "b"}, "schedulerName": "mine"}, enforced=["schedulerName"]),
    )
    create(lab, "first", nodeSelector={"gpu": "h100"}, schedulerName="other")
    want = {"from": "cluster", "zone": "b", "gpu": "h100"}
    lab.wait(lambda: selectors(lab, "first") == [want, want], "the pods of the first job", operator)
    template = lab.must("statefulsets", "first-trainer")["spec"]["template"]["spec"]
    assert template["schedulerName"] == "mine"
    kept = json.loads(lab.must("configmaps", "first-job")["data"][keys.FILE_DEFAULTS])
    assert [one["source"] for one in kept] == ["the chart's jobDefaults", f"RLJobDefaults {lab.namespace}/default"]
    lab.wait(lambda: versions(lab, "first") == AT_WORK, "its generators, behind the trainer", operator)

    lab.patch("rljobdefaults", "default", {"spec": {"pod": {"nodeSelector": {"zone": "c"}}}})
    create(lab, "second")
    lab.wait(lambda: selectors(lab, "second") == [{"from": "cluster", "zone": "c"}] * 2, "the second job", operator)
    lab.patch("rljobs", "first", {"spec": {"failurePolicy": {"maxRestarts": 9}}})
    lab.delete("rljobdefaults", "default")
    operator.wait_for_looks(4)
    assert (versions(lab, "first"), selectors(lab, "first")) == (AT_WORK, [want, want])


def test_a_mistake_holds_up_new_jobs_alone(lab: Lab, operator: Operator, own_control_plane: ControlPlane) -> None:
    create(lab, "runs")
    lab.wait(lambda: len(selectors(lab, "runs")) == 2, "the job that runs", operator)
    lab.wait(lambda: versions(lab, "runs") == AT_WORK, "its generators, behind the trainer", operator)
    assert operator.stop() == 0
    broken = operated(own_control_plane, lab.namespace, {"pod": {"nodeSelectors": {"a": "b"}}}).start()
    try:
        broken.wait_until_leading()
        create(lab, "waits")
        lab.wait(lambda: lab.condition("waits", "Ready").get("reason") == "InvalidDefaults", "the mistake", broken)
        assert lab.condition("waits", "Ready")["message"] == (
            "the chart's jobDefaults: spec.pod.nodeSelectors: is not a known field; did you mean nodeSelector?"
        )
        assert selectors(lab, "waits") == []
        assert (versions(lab, "runs"), lab.condition("runs", "Ready")["reason"] != "InvalidDefaults") == (AT_WORK, True)
    finally:
        assert broken.stop() == 0, broken.tail()
    operator.start().wait_until_leading()
    lab.wait(lambda: len(selectors(lab, "waits")) == 2, "the job that waited", operator)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"metadata": {"name": "mine"}}, "metadata.name must be default: a namespace has one"),
        ({"spec": {"enforced": ["image", "image"]}}, "fields of enforced must differ"),
        ({"spec": {"enforced": ["suspend"]}}, "spec.enforced[0]"),
        ({"spec": {"pod": {"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}}}, "hostPath"),
        ({"spec": {"pod": {"env": [{"name": "STREAMRL_X", "value": "1"}]}}}, "name must not begin with STREAMRL_"),
    ],
)
def test_an_api_server_refuses_what_validate_refuses(lab: Lab, change: dict[str, Any], told: str) -> None:
    answer = lab.cluster.api.create(lab.path("rljobdefaults"), defaults() | change, dryRun="All")
    assert (answer.code in (400, 422), told in answer.message) == (True, True), answer.message


def test_the_node_s_network_is_for_namespaces_that_may(lab: Lab, operator: Operator) -> None:
    create(lab, "rdma", hostNetwork=True)
    lab.wait(lambda: lab.condition("rdma", "Ready").get("reason") == "InvalidSpec", "the refusal", operator)
    assert "does not allow it in namespace" in lab.condition("rdma", "Ready")["message"]
    assert selectors(lab, "rdma") == []


def test_the_example_needs_nothing_before_it(lab: Lab, operator: Operator) -> None:
    text = (ROOT / "examples/kubernetes/chain-sum.yaml").read_text()
    lab.cluster.kubectl("apply", "--namespace", lab.namespace, "-f", "-", stdin=text)
    lab.wait(lambda: lab.get("statefulsets", "chain-sum-trainer") is not None, "its pods", operator)
    volumes = lab.must("statefulsets", "chain-sum-trainer")["spec"]["template"]["spec"]["volumes"]
    (code,) = (one["configMap"]["name"] for one in volumes if one["name"] == "streamrl-code")
    assert "chain_sum.py" in lab.must("configmaps", code)["data"]
    defaulted = read_documents((ROOT / "examples/kubernetes/defaults.yaml").read_text())[0].data
    assert lab.create("rljobdefaults", defaulted)["spec"]["enforced"] == ["nodeSelector", "priorityClassName"]
