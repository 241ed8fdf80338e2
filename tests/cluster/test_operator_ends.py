"""The end of a job where something is in the way: a spec that is no longer valid, a late wish, what somebody runs under the job's label."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import rights
from cluster.harness.control_plane import ControlPlane
from cluster.operators import Lab, Operator
from cluster.test_operator_unread import running
from streamrl import keys, names
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)

JOB = "sums"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.streamrl.io"
LIMIT = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/ttlSecondsAfterFinished/maximum"
CLAIM = f"{JOB}-checkpoints"


@pytest.fixture
def lax(own_control_plane: ControlPlane) -> Iterator[None]:
    """The API server takes a number that the operator does not, as after an upgrade of the operator that made a bound narrower."""

    def bound(value: int) -> None:
        change = [{"op": "replace", "path": LIMIT, "value": value}]
        own_control_plane.api.patch(CRD, change, kind="json").expect()

    bound(2_000_000_000)
    yield
    bound(31_536_000)


def job(**spec: Any) -> dict[str, Any]:
    """A small job."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    document["spec"] |= spec
    return document


def start(lab: Lab, operator: Operator, **spec: Any) -> dict[str, Any]:
    """A job whose objects are made."""
    lab.create("rljobs", job(**spec))
    lab.wait(lambda: sum(sizes(lab)) > 1 and bool(lab.condition(JOB, "Ready")), "the StatefulSets", operator)
    return lab.must("rljobs", JOB)


def sizes(lab: Lab) -> list[int]:
    """Pods that its StatefulSets are asked for."""
    return [each["spec"]["replicas"] for each in lab.list("statefulsets")]


def owners(lab: Lab) -> Any:
    """Of the claim of the checkpoints."""
    return lab.must("persistentvolumeclaims", CLAIM)["metadata"].get("ownerReferences")


def pod(name: str, **metadata: Any) -> dict[str, Any]:
    """What somebody runs under the label of the job."""
    labels = {names.LABEL_JOB: JOB, names.LABEL_ROLE: "trainer"}
    secure = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec = {
        "containers": [{"name": "c", "image": "x:test", "securityContext": secure}],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels} | metadata, "spec": spec}


RESULT = {"status": "succeeded", "steps": 40, "final_reward": 0.75, "checkpoint": "checkpoints/step-00000040"}


def tell_end(lab: Lab, *, life: str, of: str = JOB) -> None:
    """As a kubelet does when the scheduler's container has ended with its last word; "lastState": it runs again; "killed": not for the first time."""
    word = json.dumps({"attempt": 1, "step": 40, "cost": 1.5, "result": RESULT})
    was_killed = life == "killed"
    how = {"exitCode": 137, "reason": "OOMKilled"} if was_killed else {"exitCode": 0, "reason": "Completed"}
    ended = {"terminated": {**how, "message": word}}
    status = {
        **running("scheduler"),
        "state": ended if life == "state" else {"running": {}},
        "lastState": {} if life == "state" else ended,
        "restartCount": ("state", "lastState", "killed").index(life),
    }
    told = {"phase": "Running", "initContainerStatuses": [status], "containerStatuses": [running("trainer")]}
    lab.patch("pods", f"{of}-trainer-0", {"status": told}, part="status")


@pytest.mark.parametrize("life", ["state", "lastState", "killed"])
@pytest.mark.parametrize("is_down", [False, True], ids=["up", "down"])
def test_the_end_is_seen_with_the_pod_whoever_can_be_reached(
    own_control_plane: ControlPlane, lab: Lab, *, life: str, is_down: bool
) -> None:
    """Without the right to the API server's proxy, without a way to the pods, and while no operator runs."""
    user = f"no-proxy-{lab.namespace}"
    rights.grant(own_control_plane.api, user, home=lab.namespace, namespaces=(lab.namespace,), numbers="Service")
    operator = Operator(own_control_plane, lab.namespace, user=user, **{keys.ENV_NUMBERS: "Service"}).start()
    try:
        operator.wait_until_leading()
        start(lab, operator)
        lab.wait(lambda: lab.get("pods", f"{JOB}-trainer-0") is not None, "the trainer's pod", operator)
        if is_down:
            operator.stop(kill=True)
        tell_end(lab, life=life)
        if is_down:
            operator.start().wait_until_leading()
        lab.wait(lambda: lab.condition(JOB, "Succeeded").get("status") == "True", "the end to be seen", operator)
        lab.wait(lambda: sum(sizes(lab)) == 0, "its pods to go", operator)
        status = lab.must("rljobs", JOB)["status"]
        assert (status["step"], status["reward"], status["restarts"], status["cost"]) == (40, 0.75, 0, 1.5)
        assert status["checkpointPath"].endswith("/checkpoints/step-00000040")
    finally:
        operator.stop()


@pytest.mark.usefixtures("lax")
def test_pods_of_a_job_that_became_invalid_go_when_it_ends(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    change = {"spec": {"ttlSecondsAfterFinished": 1_000_000_000}}
    lab.wait(
        lambda: lab.cluster.api.patch(lab.path("rljobs", JOB), change).ok, "the API server to take the change", operator
    )
    lab.wait(lambda: lab.condition(JOB, "Ready").get("reason") == "InvalidSpec", "the operator to say so", operator)
    assert sum(sizes(lab)) > 1  # what runs stays
    lab.patch("rljobs", JOB, {"spec": {"activeDeadlineSeconds": 1}})
    lab.wait(lambda: lab.condition(JOB, "Failed").get("status") == "True", "the deadline to end it", operator)
    lab.wait(lambda: sum(sizes(lab)) == 0, "its pods to go", operator)
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the job to be gone", operator)


@pytest.mark.parametrize("seen_before_the_end", [True, False])
def test_checkpoints_stay_where_somebody_wishes_it_at_last(
    lab: Lab, operator: Operator, *, seen_before_the_end: bool
) -> None:
    start(lab, operator, storage={"checkpoints": {"whenDeleted": "Delete"}})
    assert owners(lab)
    wish = {"metadata": {"annotations": {names.ANNOTATION_KEEP_CHECKPOINTS: "true"}}}
    if seen_before_the_end:
        lab.patch("rljobs", JOB, wish)
        lab.wait(lambda: not owners(lab), "the owner to be taken away", operator)
        lab.delete("rljobs", JOB)
    else:  # both are news at once, and the claim is still owned
        assert operator.stop() == 0
        lab.patch("rljobs", JOB, wish)
        lab.delete("rljobs", JOB)
        operator.start().wait_until_leading()
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the job to be gone", operator)
    assert lab.get("persistentvolumeclaims", f"{JOB}-journal") is None
    assert "deletionTimestamp" not in lab.must("persistentvolumeclaims", CLAIM)["metadata"]
    assert not owners(lab)


def test_what_an_earlier_job_kept_does_not_go_with_a_later_one(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the job to be gone", operator)
    lab.create("rljobs", job(storage={"checkpoints": {"whenDeleted": "Delete"}}))
    lab.wait(lambda: lab.condition(JOB, "Ready").get("reason") == "NameTaken", "the operator to say so", operator)
    assert CLAIM in lab.condition(JOB, "Ready")["message"]
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the job to be gone", operator)
    start(lab, operator)  # one that keeps them too may have them
    assert not owners(lab)


def test_what_somebody_runs_under_the_jobs_label_is_none_of_it(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    owner = lab.create("configmaps", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "owner",
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    lab.create("pods", pod("other", ownerReferences=[reference]))
    ended = {"name": "c", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    ended |= {"state": {"terminated": {"exitCode": 2, "reason": "Error", "startedAt": None, "finishedAt": None}}}
    lab.patch("pods", "other", {"status": {"phase": "Failed", "containerStatuses": [ended]}}, part="status")
    operator.wait_for_looks()
    assert lab.condition(JOB, "Failed")["status"] == "False"
    assert lab.must("rljobs", JOB)["status"]["restarts"] == 0
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the job to be gone", operator)
    assert "deletionTimestamp" not in lab.must("pods", "other")["metadata"]
