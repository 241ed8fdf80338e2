"""What is taken and comes to nothing: StatefulSets whose pods the cluster will not have. The condition says where to look, and the remedy works."""

from typing import Any

import pytest

from cluster.operators import Lab, Operator
from streamrl import names
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(900)

LONG_S = 240.0
"""Half a minute goes by before anything is said; a StatefulSet whose pods are refused tries again after as long as it has tried."""
LIMITS = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}


def job(name: str, *, trainer: dict[str, Any] | None = None, pool: dict[str, Any] | None = None) -> dict[str, Any]:
    """A job whose pods are changed so."""
    document = simulated_job()
    document["metadata"]["name"] = name
    document["spec"]["trainer"]["pod"] = trainer or {}
    document["spec"]["generators"][0]["pod"] = pool or {}
    return document


def pool_ready(lab: Lab, job_name: str) -> str:
    """What the pool says of itself."""
    status = lab.must("generatorpools", names.pool(job_name, "sim")).get("status", {})
    return next((each["message"] for each in status.get("conditions", []) if each["type"] == "Ready"), "")


def causes(lab: Lab, stateful_set: str) -> str:
    """What `kubectl describe statefulset` shows of its pods."""
    found = [each for each in lab.list("events") if each["regarding"].get("name") == stateful_set]
    return " ".join(each["note"] for each in found if each["reason"] == "FailedCreate")


def test_classes_that_are_not_there(lab: Lab, operator: Operator) -> None:
    lab.create("rljobs", job("urgent", trainer={"priorityClassName": "nonsense"}))
    lab.create("rljobs", job("boxed", pool={"runtimeClassName": "nonsense"}))
    advice = "kubectl describe statefulset {} says why (usual are a quota, a LimitRange, a priority or runtime class"
    trainer, pool = names.trainer("urgent"), names.pool("boxed", "sim")
    lab.wait(
        lambda: (
            advice.format(trainer) in lab.condition("urgent", "Ready").get("message", "")
            and advice.format(pool) in pool_ready(lab, "boxed")
        ),
        "both to say where to look",
        operator,
        deadline_s=LONG_S,
    )
    assert "no PriorityClass with name nonsense" in causes(lab, trainer)
    assert 'RuntimeClass "nonsense" not found' in causes(lab, pool)


def test_a_quota_of_limits_wants_a_limit_range(lab: Lab, operator: Operator) -> None:
    quota = {"spec": {"hard": {"limits.cpu": "20", "limits.memory": "40Gi"}}}
    base = f"/api/v1/namespaces/{lab.namespace}"
    lab.cluster.api.create(f"{base}/resourcequotas", {"metadata": {"name": "q"}} | quota).expect()
    lab.create("rljobs", job("sums", trainer=LIMITS, pool=LIMITS))
    trainer = names.trainer("sums")
    lab.wait(lambda: "must specify limits.cpu for: scheduler" in causes(lab, trainer), "the quota to refuse", operator)
    lab.wait(
        lambda: f"describe statefulset {trainer}" in lab.condition("sums", "Ready").get("message", ""),
        "the condition to say where to look",
        operator,
        deadline_s=LONG_S,
    )
    limits = {"limits": [{"type": "Container", "default": {"cpu": "2", "memory": "4Gi"}}]}
    lab.cluster.api.create(f"{base}/limitranges", {"metadata": {"name": "l"}, "spec": limits}).expect()
    lab.wait(
        lambda: "describe" not in lab.condition("sums", "Ready")["message"] and len(lab.list("pods")) == 3,
        "all pods of the job",
        operator,
        deadline_s=LONG_S,
    )
