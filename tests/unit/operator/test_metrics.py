"""What the operator says of jobs: as their last reconcile wrote it, until they are gone."""

from datetime import UTC, datetime
from typing import Any

import pytest

from streamrl.metrics import OPERATOR
from streamrl_operator.metrics import OperatorMetrics
from support.metric_pages import families, mistakes, series

KEY = ("ml", "sums")
SUMS = {"namespace": "ml", "rljob": "sums"}
CLUSTERS = {"a": "east"}


def status(*, desired: int = 2, ready: int = 0, restarts: int = 0, **conditions: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "conditions": [{"type": kind, "status": value, "reason": "Starting"} for kind, value in conditions.items()],
        "pools": [{"name": "a", "desired": desired, "ready": ready}, {"name": "b", "desired": 1, "ready": 1}],
    }
    return found | ({"restarts": restarts} if restarts else {})


@pytest.fixture
def metrics() -> OperatorMetrics:
    return OperatorMetrics()


def test_the_page_is_what_the_table_says(metrics: OperatorMetrics) -> None:
    metrics.read("operator_queue_depth", lambda: 3)
    metrics.read("operator_kopf_restarts", lambda: 2)
    metrics.read("operator_cluster_connected", lambda: {"east": 1.0})
    metrics.read("operator_cache_stale_seconds", lambda: {"pods": 7.0, "rljobs": 0.0})
    metrics.reconciled("Internal", seconds=0.1)
    metrics.requested("get", "pods", 200, 0.1)
    metrics.seen("ml", True)
    pools = {"a": {"conditions": [{"type": "Ready", "status": "False", "reason": "Unschedulable"}]}}
    started = status(Ready="True", Failed="False") | {"startTime": "2027-01-01T00:00:00Z", "attempt": 1}
    metrics.job(KEY, started, clusters=CLUSTERS, pools=pools)
    metrics.certificates(KEY, {"ca": (datetime(2027, 1, 1, tzinfo=UTC), datetime(2027, 1, 31, tzinfo=UTC))})
    page = metrics.page()
    assert list(mistakes(page, OPERATOR)) == []
    assert all(one.samples for one in families(page).values())
    assert series(page, "streamrl_operator_queue_depth") == 3
    assert series(page, "streamrl_operator_kopf_restarts_total") == 2
    assert series(page, "streamrl_operator_cache_stale_seconds", resource="pods") == 7


def test_a_jobs_conditions_replicas_and_restarts(metrics: OperatorMetrics) -> None:
    metrics.job(KEY, status(Ready="False", Suspended="Unknown"), clusters=CLUSTERS)
    metrics.job(KEY, status(ready=2, restarts=1, Ready="True", Failed="False"), clusters=CLUSTERS)
    page = metrics.page()
    assert series(page, "streamrl_job_condition", type="Ready", **SUMS) == 1
    assert series(page, "streamrl_job_condition", type="Failed", **SUMS) == 0
    assert len(families(page)["streamrl_job_condition"].samples) == 2, "what is said no more is gone"
    assert series(page, "streamrl_pool_desired_replicas", pool="a", cluster="east", **SUMS) == 2
    assert series(page, "streamrl_pool_ready_replicas", pool="a", cluster="east", **SUMS) == 2
    assert series(page, "streamrl_pool_ready_replicas", pool="b", cluster="", **SUMS) == 1
    assert series(page, "streamrl_job_restarts", **SUMS) == 1


def test_what_a_job_and_its_pools_wait_for(metrics: OperatorMetrics) -> None:
    def told(of_job: tuple[str, str], **of_pools: str) -> set[tuple[str, str]]:
        state, reason = of_job
        seen = status() | {
            "conditions": [{"type": state, "status": "True" if state == "Failed" else "False", "reason": reason}]
        }
        pools = {
            name: {"conditions": [{"type": "Ready", "status": "Unknown", "reason": reason}]}
            for name, reason in of_pools.items()
        }
        metrics.job(KEY, seen, clusters=CLUSTERS, pools=pools or None)
        samples = families(metrics.page())["streamrl_job_waiting"].samples
        return {(sample.labels["pool"], sample.labels["reason"]) for sample in samples}

    assert told(("Ready", "Unschedulable"), a="Starting", b="NoPodsWanted") == {
        ("", "Unschedulable"),
        ("a", "Starting"),
    }
    assert told(("Ready", "Refused")) == {("", "Refused"), ("a", "Starting")}, "nothing newer is known of the pools"
    assert told(("Ready", "CreateContainerConfigError"), a="Starting") == {("", "Other"), ("a", "Starting")}
    assert told(("Failed", "RunFailed"), a="Starting") == set()


def test_a_job_without_pods_has_no_start(metrics: OperatorMetrics) -> None:
    metrics.job(KEY, status() | {"startTime": "1970-01-01T00:01:00Z"}, clusters=CLUSTERS)
    page = metrics.page()
    assert series(page, "streamrl_job_start_timestamp_seconds", **SUMS) == 60
    assert series(page, "streamrl_job_trainer_attempts", **SUMS) == 0
    metrics.job(KEY, status() | {"attempt": 3}, clusters=CLUSTERS)
    page = metrics.page()
    assert families(page)["streamrl_job_start_timestamp_seconds"].samples == []
    assert series(page, "streamrl_job_trainer_attempts", **SUMS) == 3


def test_scale_events_are_changes_of_what_is_desired(metrics: OperatorMetrics) -> None:
    for desired in (2, 2, 5, 5, 4, 1):
        metrics.job(KEY, status(desired=desired), clusters=CLUSTERS)
    page = metrics.page()
    counted = {
        (pool, direction): series(page, "streamrl_pool_scale_events_total", pool=pool, direction=direction, **SUMS)
        for pool in "ab"
        for direction in ("up", "down")
    }
    assert counted == {("a", "up"): 1, ("a", "down"): 2, ("b", "up"): 0, ("b", "down"): 0}


def test_a_job_that_is_gone_is_forgotten(metrics: OperatorMetrics) -> None:
    metrics.job(KEY, status(Ready="True"), clusters=CLUSTERS)
    metrics.job(("ml", "other"), status(Ready="True"), clusters=CLUSTERS)
    metrics.forget(KEY)
    assert {sample.labels["rljob"] for sample in families(metrics.page())["streamrl_job_condition"].samples} == {
        "other"
    }
