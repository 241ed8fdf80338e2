"""What a StatefulSet may have and its pods may not, and what pods name that is not there: none of the job's pods is made, and Ready says why."""

from typing import Any

import pytest

from cluster.operators import Lab, Operator
from streamrl import names
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(900)

LIMITS = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
GPU = "nvidia.com/gpu"


def job(name: str, *, trainer: dict[str, Any] | None = None, pool: dict[str, Any] | None = None) -> dict[str, Any]:
    """A job whose pods are changed so."""
    document = simulated_job()
    document["metadata"]["name"] = name
    document["spec"]["trainer"]["pod"] = trainer or {}
    document["spec"]["generators"][0]["pod"] = pool or {}
    return document


def ready(lab: Lab, job_name: str) -> str:
    """Reason and message of Ready."""
    found = lab.condition(job_name, "Ready")
    return f"{found.get('reason')}: {found.get('message')}"


def sizes(lab: Lab) -> dict[str, int]:
    """Pods that the StatefulSets are asked for."""
    return {each["metadata"]["name"]: each["spec"]["replicas"] for each in lab.list("statefulsets")}


def test_what_the_pods_of_one_part_lack_holds_up_all(lab: Lab, operator: Operator) -> None:
    lacking = {
        "urgent": (job("urgent", trainer={"priorityClassName": "nonsense"}), "no PriorityClass with name nonsense"),
        "boxed": (job("boxed", pool={"runtimeClassName": "nonsense"}), 'RuntimeClass "nonsense" not found'),
        "lonely": (job("lonely", pool={"envFrom": [{"secretRef": {"name": "keys"}}]}), "ObjectMissing: Secret keys"),
    }
    for document, _ in lacking.values():
        lab.create("rljobs", document)
    for name, (_, words) in lacking.items():
        lab.wait(lambda name=name, words=words: words in ready(lab, name), f"{name} to say {words}", operator)
    assert (sizes(lab), lab.list("pods")) == ({}, [])
    lab.create("secrets", {"metadata": {"name": "keys"}})
    trainer, pool = names.trainer("lonely"), names.pool("lonely", "sim")
    lab.wait(lambda: sizes(lab) == {trainer: 1, pool: 2}, "the job to start by itself", operator)


def test_a_quota_of_limits_wants_a_limit_range(lab: Lab, operator: Operator) -> None:
    quota = {"spec": {"hard": {"limits.cpu": "20", "limits.memory": "40Gi"}}}
    base = f"/api/v1/namespaces/{lab.namespace}"
    lab.cluster.api.create(f"{base}/resourcequotas", {"metadata": {"name": "q"}} | quota).expect()
    lab.create("rljobs", job("sums", trainer=LIMITS, pool=LIMITS))
    lab.wait(lambda: "must specify limits.cpu for: scheduler" in ready(lab, "sums"), "the quota to refuse", operator)
    assert sizes(lab) == {}
    limits = {"limits": [{"type": "Container", "default": {"cpu": "2", "memory": "4Gi"}}]}
    lab.cluster.api.create(f"{base}/limitranges", {"metadata": {"name": "l"}, "spec": limits}).expect()
    lab.wait(lambda: len(lab.list("pods")) == 3, "all pods of the job", operator)


def test_a_quota_must_have_room_for_trainer_and_generators(lab: Lab, operator: Operator) -> None:
    quotas = f"/api/v1/namespaces/{lab.namespace}/resourcequotas"
    gpus = {"resources": {"limits": {GPU: "2"}}}
    hard = {f"requests.{GPU}": "5"}
    lab.cluster.api.create(quotas, {"metadata": {"name": "q"}, "spec": {"hard": hard}}).expect()
    lab.wait(
        lambda: lab.cluster.api.get(f"{quotas}/q").expect().get("status", {}).get("hard") == hard,
        "it to hold",
        operator,
    )
    lab.create("rljobs", job("sums", trainer=gpus, pool=gpus))
    lack = f"ResourceQuota q: requests.{GPU}: the job asks for 6, left are 5 of 5"
    lab.wait(lambda: lack in ready(lab, "sums"), "the quota to be named", operator)
    assert sizes(lab) == {}
    lab.cluster.api.patch(f"{quotas}/q", {"spec": {"hard": {f"requests.{GPU}": "6"}}}).expect()
    lab.wait(lambda: len(lab.list("pods")) == 3, "all pods of the job", operator)
