"""A job that cannot go on is mended: a change where it may be made at once, else `streamrl suspend`, the change, `streamrl resume`.

Pods' states are written as kubelets and schedulers write them.
"""

import json
from typing import Any

import pytest

from cluster.operators import Lab, Operator
from streamrl import keys, names
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)

JOB = "sums"
TRAINER = names.trainer(JOB)


def job(**spec: Any) -> dict[str, Any]:
    """A job with one pool of two generators."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    document["spec"] |= spec
    return document


def start(lab: Lab, operator: Operator, **trainer: Any) -> dict[str, Any]:
    """A job whose pods are made."""
    engine = job()["spec"]["trainer"]
    lab.create("rljobs", job(trainer={**engine, **trainer}))
    lab.wait(lambda: pods(lab) == {"trainer-0", "sim-0", "sim-1"}, "the pods", operator)
    return lab.must("rljobs", JOB)


def pods(lab: Lab) -> set[str]:
    """By what follows the job's name."""
    return {pod["metadata"]["name"].removeprefix(f"{JOB}-") for pod in lab.list("pods")}


def uids(lab: Lab, plural: str) -> set[str]:
    return {each["metadata"]["uid"] for each in lab.list(plural)}


def spec_of(lab: Lab, pod: str) -> dict[str, Any]:
    found: dict[str, Any] = lab.must("pods", f"{JOB}-{pod}")["spec"]
    return found


def job_json(lab: Lab) -> dict[str, Any]:
    """What workers read."""
    spec: dict[str, Any] = json.loads(lab.must("configmaps", names.resolved(JOB))["data"][keys.FILE_JOB])["spec"]
    return spec


def edit(lab: Lab, **spec: Any) -> None:
    """As `kubectl edit` does."""
    lab.patch("rljobs", JOB, {"spec": spec})


def mend(lab: Lab, operator: Operator, **spec: Any) -> None:
    """`streamrl suspend`, `kubectl edit`, `streamrl resume`."""
    refused = lab.cluster.api.patch(lab.path("rljobs", JOB), {"spec": spec})
    assert (refused.code, "only while the job is suspended" in refused.message) == (422, True)
    edit(lab, suspend=True)
    lab.wait(lambda: lab.condition(JOB, "Suspended").get("status") == "True", "no pods", operator)
    edit(lab, **spec)
    edit(lab, suspend=False)
    lab.wait(lambda: pods(lab) >= {"trainer-0", "sim-0"}, "the pods to be made again", operator)


def container_status(name: str, image: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "image": image, "imageID": "", "ready": False, "restartCount": 0, "state": state}


def ready_reason(lab: Lab) -> str:
    return str(lab.condition(JOB, "Ready").get("reason"))


def test_a_trainer_without_a_node_gets_another_selector(lab: Lab, operator: Operator) -> None:
    start(lab, operator, pod={"nodeSelector": {"gpu": "h1000"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]})
    claims = uids(lab, "persistentvolumeclaims")
    nowhere = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    lab.patch("pods", f"{TRAINER}-0", {"status": {"conditions": [nowhere]}}, part="status")
    lab.wait(lambda: ready_reason(lab) == "Unschedulable", "the condition to say so", operator)
    engine = lab.must("rljobs", JOB)["spec"]["trainer"]
    mend(lab, operator, trainer={"pod": {**engine["pod"], "nodeSelector": {"gpu": "h100"}, "tolerations": []}})
    assert spec_of(lab, "trainer-0")["nodeSelector"] == {"gpu": "h100"}
    assert "gpu" not in {each.get("key") for each in spec_of(lab, "trainer-0")["tolerations"]}
    assert uids(lab, "persistentvolumeclaims") == claims, "journal and checkpoints stay"


def test_a_typing_error_in_the_image_is_mended(lab: Lab, operator: Operator) -> None:
    start(lab, operator, pod={"image": "registry.example/trainre:1"})
    waiting = container_status("trainer", "registry.example/trainre:1", waiting={"reason": "ImagePullBackOff"})
    told = {"phase": "Pending", "conditions": [], "containerStatuses": [waiting]}
    lab.patch("pods", f"{TRAINER}-0", {"status": told}, part="status")
    lab.wait(lambda: ready_reason(lab) == "ImagePullBackOff", "the condition to say so", operator)
    mend(lab, operator, trainer={"pod": {"image": "registry.example/trainer:1"}})
    assert spec_of(lab, "trainer-0")["containers"][0]["image"] == "registry.example/trainer:1"
    pools = lab.must("rljobs", JOB)["spec"]["generators"]
    edit(lab, generators=[{**pools[0], "pod": {"image": "registry.example/generator:2"}}])
    lab.wait(
        lambda: (
            "generator:2"
            in lab.must("statefulsets", f"{JOB}-sim")["spec"]["template"]["spec"]["containers"][0]["image"]
        ),
        "the pool's image, without a pause",
        operator,
    )


def test_too_little_memory_is_mended_and_what_was_counted_stays(lab: Lab, operator: Operator) -> None:
    start(lab, operator, pod={"resources": {"limits": {"memory": "1Mi"}, "requests": {"memory": "1Mi"}}})
    end = {"exitCode": 137, "reason": "OOMKilled", "startedAt": None, "finishedAt": None}
    killed = container_status("trainer", "x", terminated=end)
    lab.patch("pods", f"{TRAINER}-0", {"status": {"phase": "Running", "containerStatuses": [killed]}}, part="status")
    lab.wait(lambda: lab.must("rljobs", JOB)["status"].get("restarts") == 1, "the failure to be counted", operator)
    more = {"limits": {"memory": "8Gi"}, "requests": {"memory": "4Gi"}}
    mend(lab, operator, trainer={"pod": {"resources": more}})
    assert spec_of(lab, "trainer-0")["containers"][0]["resources"] == more
    operator.wait_for_looks()
    assert lab.must("rljobs", JOB)["status"]["restarts"] == 1


def test_steps_pools_and_costs_change_together(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    spec = lab.must("rljobs", JOB)["spec"]
    other = {**spec["generators"][0], "name": "other", "costPerHour": "7", "scaling": {"static": {"replicas": 1}}}
    edit(lab, suspend=True, generators=[other], pipeline={"steps": 99}, storage={"checkpoints": {"keepLast": 7}})
    lab.wait(lambda: job_json(lab)["pipeline"]["steps"] == 99, "job.json, once no pod is left", operator)
    assert lab.list("pods") == []
    lab.wait(lambda: lab.get("statefulsets", f"{JOB}-sim") is None, "the pool to be gone", operator)
    lab.wait(lambda: lab.get("networkpolicies", f"{JOB}-sim") is None, "all of it", operator)
    edit(lab, suspend=False)
    lab.wait(lambda: pods(lab) == {"trainer-0", "other-0"}, "the pods of the new pool", operator)
    assert job_json(lab)["generators"][0]["costPerHour"] == "7"
    assert job_json(lab)["storage"]["checkpoints"]["keepLast"] == 7


def test_a_change_that_nobody_saw_suspended_makes_all_pods_again(lab: Lab, operator: Operator) -> None:
    """Suspended, changed and resumed while no operator ran: the same end."""
    start(lab, operator)
    before = uids(lab, "pods")
    assert operator.stop() == 0
    edit(lab, suspend=True, pipeline={"steps": 99})
    edit(lab, suspend=False)
    operator.start().wait_until_leading()
    lab.wait(lambda: job_json(lab)["pipeline"]["steps"] == 99, "job.json", operator)
    lab.wait(lambda: pods(lab) == {"trainer-0", "sim-0", "sim-1"}, "the pods", operator)
    assert not uids(lab, "pods") & before, "each reads it at its start"


def test_an_operator_that_is_killed_amid_a_change_is_followed(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    spec = lab.must("rljobs", JOB)["spec"]
    pools = [*spec["generators"], {**spec["generators"][0], "name": "more"}]
    edit(lab, suspend=True, generators=pools)
    operator.stop(kill=True)
    edit(lab, suspend=False)
    operator.start().wait_until_leading()
    wanted = {"trainer-0", "sim-0", "sim-1", "more-0", "more-1"}
    lab.wait(lambda: pods(lab) == wanted, "the pods of both pools", operator)
    assert [pool["name"] for pool in job_json(lab)["generators"]] == ["sim", "more"]
