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
        "conditions": [{"type": kind, "status": value} for kind, value in conditions.items()],
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
    metrics.job(KEY, status(Ready="True", Failed="False"), clusters=CLUSTERS)
    metrics.certificates(KEY, {"ca": datetime(2027, 1, 1, tzinfo=UTC)})
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
