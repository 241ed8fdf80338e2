"""Pods that are asked for and not made: when that is told of, in which condition, and with what to do."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from streamrl_operator.planning.life import decide
from streamrl_operator.planning.values import JobDecision, Observed
from support.observed_jobs import JOB, SETTINGS, all_ready, carried_out, job_document, observed, trainer, validated

TRAINER, POOL = f"{JOB}-trainer", f"{JOB}-sim"
ASKED = {TRAINER: 1, POOL: 2}


def sets(asked: dict[str, int]) -> dict[str, Any]:
    template = {"spec": {"containers": [{"image": "i"}]}}
    return {name: {"spec": {"replicas": replicas, "template": template}} for name, replicas in asked.items()}


def passed(look: Observed, seconds: float, **changes: Any) -> tuple[Observed, JobDecision]:
    """The job so much later, after a look; and its verdict."""
    now = replace(look, now=look.now + timedelta(seconds=seconds), **changes)
    decision = decide(now, settings=SETTINGS)
    return carried_out(now, decision), decision


def ready(decision: JobDecision) -> str:
    return str(decision.status["conditions"][0]["message"])


def pool_ready(decision: JobDecision) -> str:
    return str(decision.pool_statuses["sim"]["conditions"][0].get("message", ""))


def advice(stateful_set: str) -> str:
    return f"; kubectl describe statefulset {stateful_set} says why (usual are a quota, a LimitRange, a priority or runtime class"


@pytest.mark.parametrize(
    ("pods", "said", "stateful_set"),
    [
        ((), f"StatefulSet {TRAINER} has not made its pod yet", TRAINER),
        ((trainer(),), "0 of 2 generators are ready", POOL),
        (all_ready(1), "the trainer is ready; 1 of 2 generators are ready", POOL),
    ],
)
def test_told_after_half_a_minute(pods: Sequence[Any], said: str, stateful_set: str) -> None:
    now, _ = passed(observed(pods=pods, sets=sets(ASKED)), 0)
    for seconds, is_told in ((0, False), (29, False), (1, True), (3600, True)):
        now, decision = passed(now, seconds)
        assert ready(decision).startswith(said + (advice(stateful_set) if is_told else ""))
        assert (advice(POOL) in pool_ready(decision)) is is_told
    now, decision = passed(now, 1, pods=all_ready())
    assert (ready(decision), pool_ready(decision)) == (
        "the trainer is ready; 2 of 2 generators are ready",
        "2 of 2 pods are ready",
    )


@pytest.mark.parametrize("asked", [{}, dict.fromkeys(ASKED, 0)], ids=["no StatefulSets", "held up"])
def test_not_told_where_no_pods_are_asked_for_yet(asked: dict[str, int]) -> None:
    now, _ = passed(observed(sets=sets(asked)), 0)
    _, decision = passed(now, 3600)
    assert ready(decision) == f"StatefulSet {TRAINER} has not made its pod yet"
    assert pool_ready(decision) == "0 of 2 pods are ready"


def test_a_pool_that_grows_or_loses_a_pod_has_time_again() -> None:
    asked = sets(ASKED | {POOL: 4})
    now, _ = passed(observed(pods=all_ready(), sets=asked), 0)
    now, _ = passed(now, 3600)
    lost, decision = passed(now, 0, pods=all_ready(1))
    assert "describe" not in ready(decision) + pool_ready(decision)
    document = {**lost.raw, "spec": {**lost.raw["spec"], "generators": job_document()["spec"]["generators"]}}
    document["spec"]["generators"][0]["scaling"] = {"static": {"replicas": 4}}
    grown, _ = passed(lost, 20, raw=document, job=validated(document))
    grown, decision = passed(grown, 20)
    assert "describe" not in pool_ready(decision)
    _, decision = passed(grown, 10)
    assert advice(POOL) in pool_ready(decision)


def test_a_trainer_whose_pod_is_made_again_has_time() -> None:
    now, _ = passed(observed(pods=all_ready(), sets=sets(ASKED)), 0)
    now, _ = passed(now, 3600)
    now, decision = passed(now, 0, pods=all_ready()[1:])
    assert ready(decision) == f"StatefulSet {TRAINER} has not made its pod yet"
    _, decision = passed(now, 30)
    assert advice(TRAINER) in ready(decision)
