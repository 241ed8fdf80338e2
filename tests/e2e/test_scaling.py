"""Generators come and go on a real node: by queue and pace, by `kubectl scale`, by an HPA; nobody fights over the number."""

import json
import sys
from collections.abc import Iterator

import pytest

from cluster.operators import Operator
from e2e.jobs import Document, simulated, small_pod
from e2e.metric_server import MetricServer
from e2e.stage import Stage
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(1500)]

SLOW = {"slots": 1, "latency": [{"batch": 1, "milliseconds": 7.0}], "meanTokens": 16.0}
GROUPS = 8
"""One generator needs about 4 s for the 32 samples of a step, the trainer 1 s: three of them keep up best. A sample alone is short, so one
that has little to do is idle for most of a step."""
HELPER_SLOTS = 16
"""A pool that does the work of sixteen of those: beside it one is enough."""
LEAVE_S = 60.0
"""Less than the 90 s that a pod may take to finish: a first process that does not hear SIGTERM takes them all."""
MANY_STEPS = 20
PHASE_S = 400.0
"""For two changes of size: windows of whole steps, cool-downs, and pods that start on a machine that does other things too."""


def pools(stage: Stage, job: str) -> dict[str, tuple[int, int]]:
    """Pool -> (replicas wanted, pods ready)."""
    return {one["name"]: (one["desired"], one["ready"]) for one in stage.status(job).get("pools", [])}


def wait_size(stage: Stage, job: str, pool: str, size: int, *, deadline_s: float = PHASE_S) -> None:
    """Until so many generators of a pool are wanted and ready."""
    stage.wait_for(
        lambda: pools(stage, job).get(pool) == (size, size) and ready(stage, job, pool) == size,
        f"{size} generators of pool {pool}",
        job=job,
        deadline_s=deadline_s,
    )


def ready(stage: Stage, job: str, pool: str) -> int:
    """Pods of a pool, those that are leaving not counted."""
    mine = [pod for name, pod in stage.pods(job).items() if name.startswith(f"{names.pool(job, pool)}-")]
    return sum("deletionTimestamp" not in pod["metadata"] for pod in mine)


def scale(stage: Stage, job: str, pool: str, size: int) -> None:
    stage.kubectl("scale", "generatorpool", names.pool(job, pool), f"--replicas={size}")


def stop(stage: Stage, job: str) -> Document:
    """Suspend a job, which ends all its pods, and prove its journal; its status."""
    stage.change(job, suspend=True)
    stage.wait_for(lambda: not stage.pods(job), "no pods", job=job, deadline_s=PHASE_S)
    stage.assert_exact(job)
    return stage.status(job)


def elastic_job() -> Document:
    job = simulated("elastic", steps=10_000, step_s=1.0, batch_groups=GROUPS, **SLOW)
    job["spec"]["task"]["evaluation"] = {"maxPrompts": 2, "intervalSteps": 100}
    (pool,) = job["spec"]["generators"]
    pool["scaling"] = {"auto": {"initialReplicas": 1, "maxReplicas": 3, "cooldownSeconds": 5}}
    helper = {"simulated": {**SLOW, "slots": HELPER_SLOTS}}
    job["spec"]["generators"].append(
        {"name": "helper", "engine": helper, "scaling": {"external": {}}, "pod": small_pod()}
    )
    return job


def test_a_queue_takes_a_pool_from_one_to_three_and_back(watched: tuple[Stage, Operator]) -> None:
    stage, operator = watched
    stage.apply(elastic_job())
    stage.wait_for(lambda: pools(stage, "elastic"), "the pools to be there", job="elastic")
    stage.wait_for(lambda: ready(stage, "elastic", "helper"), "the helper's pod", job="elastic")
    scale(stage, "elastic", "helper", 0)
    helper = f"{names.pool('elastic', 'helper')}-0"
    stage.wait_for(
        lambda: helper not in stage.pods("elastic"),
        "a pod that has just begun to go",
        job="elastic",
        deadline_s=LEAVE_S,
    )
    wait_size(stage, "elastic", "sim", 3)
    scale(stage, "elastic", "helper", 1)
    wait_size(stage, "elastic", "sim", 1)
    history = stage.pool("elastic", "sim")["status"]["scalingHistory"]
    sys.stderr.write("".join(f"{one['time']} {one['toReplicas']}: {one['reason']}\n" for one in history))
    assert [one["toReplicas"] for one in history] == [1, 2, 3, 2, 1], history
    assert all("≥ Δ'" in one["reason"] or "samples wait" in one["reason"] for one in history[1:3])
    assert all("of T_train" in one["reason"] for one in history[3:])
    status = stop(stage, "elastic")
    assert (status["restarts"], status.get("ignoredRestarts", 0)) == (0, 0), "an ordered end is no failure"
    assert stage.steps("elastic") > MANY_STEPS
    assert operator.runs


def quiet_job(name: str, **scaling: Document) -> Document:
    """Long enough for what a test does meanwhile; slow enough to cost nothing."""
    job = simulated(name, steps=10_000, step_s=0.5)
    job["spec"]["generators"][0]["scaling"] = scaling
    return job


def test_whoever_owns_the_number_it_stays_when_the_owner_changes(watched: tuple[Stage, Operator]) -> None:
    stage, operator = watched
    stage.apply(quiet_job("flips", static={"replicas": 2}))
    wait_size(stage, "flips", "sim", 2)
    (pool,) = quiet_job("flips")["spec"]["generators"]
    stage.change("flips", generators=[{**pool, "scaling": {"external": {}}}])
    operator.wait_for_looks(3)
    assert stage.pool("flips", "sim")["spec"]["replicas"] == 2, "a new owner takes the number over as it is"
    scale(stage, "flips", "sim", 1)
    wait_size(stage, "flips", "sim", 1)
    operator.wait_for_looks(3)
    assert stage.pool("flips", "sim")["spec"]["replicas"] == 1
    stage.change("flips", generators=[{**pool, "scaling": {"static": {"replicas": 2}}}])
    wait_size(stage, "flips", "sim", 2)
    stage.change("flips", generators=[{**pool, "scaling": {"external": {}}}])
    operator.wait_for_looks(3)
    assert stage.pool("flips", "sim")["spec"]["replicas"] == 2
    scale(stage, "flips", "sim", 3)
    wait_size(stage, "flips", "sim", 3)
    reasons = [one["reason"] for one in stage.pool("flips", "sim")["status"]["scalingHistory"]]
    assert len(reasons) == 4, reasons
    stop(stage, "flips")
    assert stage.pool("flips", "sim")["spec"]["replicas"] == 3, "suspend overrides the number, it does not change it"


@pytest.fixture
def metrics(watched: tuple[Stage, Operator]) -> Iterator[MetricServer]:
    server = MetricServer(watched[0].nodes)
    yield server
    server.close()


def test_an_hpa_scales_by_the_queue(watched: tuple[Stage, Operator], metrics: MetricServer) -> None:
    stage, operator = watched
    stage.apply(quiet_job("hpa", external={}))
    wait_size(stage, "hpa", "sim", 1)
    metrics.value = 10
    stage.apply(autoscaler("hpa"))
    wait_size(stage, "hpa", "sim", 3)
    metrics.value = 1
    wait_size(stage, "hpa", "sim", 1)
    sizes = [one["toReplicas"] for one in stage.pool("hpa", "sim")["status"]["scalingHistory"]]
    assert (sizes[0], sizes[-1], max(sizes)) == (1, 1, 3)
    assert metrics.asked > 0
    operator.wait_for_looks(2)
    told = json.loads(stage.kubectl("get", "hpa", "hpa-sim", "-o", "json"))["status"]["conditions"]
    assert all(one["status"] == "True" for one in told if one["type"] in ("AbleToScale", "ScalingActive")), told
    stop(stage, "hpa")


def autoscaler(job: str) -> Document:
    """An HPA as the documentation has it, but that it goes down at once: a test has no five minutes."""
    target = {"apiVersion": "streamrl.io/v1alpha1", "kind": "GeneratorPool", "name": names.pool(job, "sim")}
    metric = {
        "metric": {"name": "streamrl_queue_samples", "selector": {"matchLabels": {"job": job}}},
        "target": {"type": "AverageValue", "averageValue": "4"},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": names.pool(job, "sim")},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 1,
            "maxReplicas": 3,
            "metrics": [{"type": "External", "external": metric}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }
