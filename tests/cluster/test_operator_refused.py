"""What the API server will not or cannot take. A pool whose pods it refuses: the rest of the job scales, is suspended and ends as if nothing were."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.control_plane import ControlPlane
from cluster.harness.processes import wait_until
from cluster.operators import SOON_S, Lab, Operator
from streamrl import names
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)

JOB = "sums"
RUNNING = {"trainer": 1, "fixed": 2, "free": 3}
STOPPED = dict.fromkeys(RUNNING, 0)
BAD = {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}


def job(*, pod: dict[str, Any] | None = None, replicas: int = 2, **spec: Any) -> dict[str, Any]:
    """`pod`, `replicas`: of the pool `fixed`."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    engine = document["spec"]["generators"][0]["engine"]
    document["spec"]["generators"] = [
        {"name": "fixed", "engine": engine, "scaling": {"static": {"replicas": replicas}}, "pod": pod or {}},
        {"name": "free", "engine": engine, "scaling": {"external": {"initialReplicas": 3}}},
    ]
    document["spec"] |= spec
    return document


def sizes(lab: Lab) -> dict[str, int]:
    """Pods that the StatefulSets are asked for."""
    return {each["metadata"]["name"].rpartition("-")[2]: each["spec"]["replicas"] for each in lab.list("statefulsets")}


@pytest.fixture
def refused(lab: Lab, operator: Operator) -> Lab:
    """A job that runs, whose pool `fixed` was edited into something that the API server refuses."""
    lab.create("rljobs", job())
    lab.wait(lambda: sizes(lab) == RUNNING, "the job to run", operator)
    lab.wait(lambda: len(lab.list("pods")) == sum(RUNNING.values()), "its pods", operator)
    lab.patch("rljobs", JOB, job(pod=BAD))
    lab.wait(lambda: lab.condition(JOB, "Ready").get("reason") == "Refused", "the refusal to be said", operator)
    assert "resources.requests" in lab.condition(JOB, "Ready")["message"]
    return lab


@pytest.fixture
def elastic(own_control_plane: ControlPlane, namespace: str) -> Iterator[str]:
    """A class whose claims may be enlarged; it goes with the volume of its name."""
    body = {"metadata": {"name": namespace}, "provisioner": "test.example/none", "allowVolumeExpansion": True}
    own_control_plane.api.create("/apis/storage.k8s.io/v1/storageclasses", body).expect()
    yield namespace
    own_control_plane.api.delete(f"/apis/storage.k8s.io/v1/storageclasses/{namespace}")
    own_control_plane.api.delete(f"/api/v1/persistentvolumes/{namespace}")


def bind(lab: Lab, claim: dict[str, Any]) -> None:
    """Give the claim a volume, as a provisioner does."""
    about, spec = claim["metadata"], claim["spec"]
    volume = {
        "capacity": spec["resources"]["requests"],
        "accessModes": spec["accessModes"],
        "storageClassName": spec["storageClassName"],
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": lab.namespace, "name": about["name"], "uid": about["uid"]},
        "hostPath": {"path": "/nowhere"},
    }
    body = {"metadata": {"name": lab.namespace}, "spec": volume}
    lab.cluster.api.create("/api/v1/persistentvolumes", body).expect()


def test_a_claim_that_was_enlarged_keeps_its_size_and_holds_nothing_up(
    lab: Lab, operator: Operator, elastic: str
) -> None:
    storage = {"journal": {"storageClassName": elastic}}
    lab.create("rljobs", job(storage=storage))
    lab.wait(lambda: sizes(lab) == RUNNING, "the job to run", operator)
    claims, name = "persistentvolumeclaims", names.journal_claim(JOB)
    made = lab.must(claims, name)
    bind(lab, made)
    lab.wait(lambda: lab.must(claims, name)["status"]["phase"] == "Bound", "the claim to be bound", operator)
    large = {"requests": {"storage": "7Ti"}}
    lab.patch(claims, name, {"spec": {"resources": large}, "metadata": {"labels": {names.LABEL_JOB_UID: "other"}}})
    labels = made["metadata"]["labels"]
    lab.wait(lambda: lab.must(claims, name)["metadata"]["labels"] == labels, "its label to be put right", operator)
    assert lab.must(claims, name)["spec"]["resources"] == large
    lab.patch("rljobs", JOB, job(replicas=4, storage=storage))
    lab.wait(lambda: sizes(lab) == RUNNING | {"fixed": 4}, "the job to go on", operator)
    assert lab.condition(JOB, "Ready")["reason"] != "Refused"


def test_another_pool_scales_and_the_refused_one_shrinks(refused: Lab, operator: Operator) -> None:
    lab = refused
    lab.patch("generatorpools", names.pool(JOB, "free"), {"spec": {"replicas": 6}}, part="scale")
    lab.wait(lambda: sizes(lab) == RUNNING | {"free": 6}, "six of the free pool", operator)
    lab.patch("rljobs", JOB, job(pod=BAD, replicas=1))
    lab.wait(lambda: sizes(lab) == RUNNING | {"free": 6, "fixed": 1}, "one of the refused pool", operator)
    lab.patch("rljobs", JOB, job(pod=BAD, replicas=4))
    operator.wait_for_looks(3)
    assert sizes(lab)["fixed"] == 1
    lab.patch("rljobs", JOB, job(replicas=4))
    lab.wait(lambda: sizes(lab) == RUNNING | {"free": 6, "fixed": 4}, "four, once they are had", operator)
    lab.wait(lambda: lab.condition(JOB, "Ready")["reason"] != "Refused", "nothing to be in the way", operator)


def test_it_can_be_suspended_and_goes_on(refused: Lab, operator: Operator) -> None:
    lab = refused
    lab.patch("rljobs", JOB, {"spec": {"suspend": True}})
    lab.wait(lambda: lab.condition(JOB, "Suspended").get("status") == "True", "Suspended", operator)
    assert (sizes(lab), lab.list("pods")) == (STOPPED, [])
    lab.patch("rljobs", JOB, job(suspend=False))
    lab.wait(lambda: sizes(lab) == RUNNING, "the job to go on", operator)


def test_its_end_is_final(refused: Lab, operator: Operator) -> None:
    lab = refused
    lab.patch("rljobs", JOB, {"spec": {"activeDeadlineSeconds": 1}})
    lab.wait(lambda: lab.condition(JOB, "Failed").get("status") == "True", "the deadline to end it", operator)
    lab.wait(lambda: sizes(lab) == STOPPED and lab.list("pods") == [], "its pods to go", operator)
    ended = lab.must("rljobs", JOB)["status"]
    looks = operator.looks
    lab.patch("rljobs", JOB, {"metadata": {"annotations": {"any": "change"}}})  # a look that nothing else would cause
    operator.wait_for_looks(1, since=looks)
    assert lab.must("rljobs", JOB)["status"] == ended
    assert sizes(lab) == STOPPED


SMALL = {
    "metadata": {"name": "small"},
    "spec": {
        "selector": {"matchLabels": {"app": "small"}},
        "template": {"metadata": {"labels": {"app": "small"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
    },
}
HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


@pytest.fixture
def broken_webhook(lab: Lab) -> Iterator[str]:
    """A webhook of somebody that nobody answers: the API server itself says 500 to each new StatefulSet."""
    hook = {
        "name": "broken.example.com",
        "clientConfig": {"service": {"namespace": lab.namespace, "name": "nobody"}},
        "rules": [
            {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["statefulsets"]}
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": lab.namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    lab.cluster.api.create(HOOKS, {"metadata": {"name": lab.namespace}, "webhooks": [hook]}).expect()
    # An API server asks a new webhook a moment later.
    wait_until(
        lambda: (
            "failed calling webhook" in lab.cluster.api.create(lab.path("statefulsets"), SMALL, dryRun="All").message
        ),
        what="the API server to ask the webhook",
        deadline_s=SOON_S,
    )
    yield f"{HOOKS}/{lab.namespace}"
    lab.cluster.api.delete(f"{HOOKS}/{lab.namespace}")


def test_a_webhook_that_fails_is_told_of(lab: Lab, operator: Operator, broken_webhook: str) -> None:
    lab.create("rljobs", job())
    lab.wait(lambda: lab.condition(JOB, "Ready").get("reason") == "ServerError", "the failure to be said", operator)
    assert "failed calling webhook" in lab.condition(JOB, "Ready")["message"]
    assert sizes(lab) == {}
    lab.cluster.api.delete(broken_webhook).expect()
    lab.wait(lambda: sizes(lab) == RUNNING, "the job to begin by itself", operator, deadline_s=150.0)
    lab.wait(lambda: lab.condition(JOB, "Ready")["reason"] != "ServerError", "nothing to be in the way", operator)
