"""What holds at every look of any life: stable, valid, within bounds, ended once and for all."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.status import GeneratorPoolStatus, RLJobStatus
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.replicas import bounds
from streamrl_operator.planning.values import JobDecision, Observed, SignalsUnreachable
from support.observed_jobs import (
    NOW,
    SETTINGS,
    carried_out,
    container,
    generator,
    job_document,
    observed,
    page,
    trainer,
    validated,
)

TYPES = ["Ready", "Suspended", "Succeeded", "Failed", "Reconciling", "Stalled"]
WARNED = {"type": "TrainInferLogprobDiffHigh", "message": "0.2 is above 0.05"}
SCALINGS = [
    {"static": {"replicas": 1}},
    {"static": {"replicas": 3}},
    {"external": {"initialReplicas": 2}},
    {"auto": {"initialReplicas": 2, "maxReplicas": 4, "cooldownSeconds": 0.0}},
]
SPECS = st.fixed_dictionaries(
    {"scaling": st.sampled_from(SCALINGS), "suspend": st.sampled_from([False, False, True])},
    optional={
        "activeDeadlineSeconds": st.integers(1, 200),
        "ttlSecondsAfterFinished": st.integers(0, 100),
        "failurePolicy": st.sampled_from(
            [
                {"maxRestarts": 0},
                {"rules": [{"name": "r", "onExitCodes": [139], "action": "ReplacePodAndIgnoreMaxRestarts"}]},
            ]
        ),
    },
)
CODES = st.sampled_from([None, None, None, 0, 1, 2, 139])


def _states(name: str) -> st.SearchStrategy[dict[str, Any]]:
    waiting = st.sampled_from([None, None, "CrashLoopBackOff", "ErrImagePull", "ContainerCreating"])
    return st.builds(container, st.just(name), restarts=st.integers(0, 2), code=CODES, last=CODES, waiting=waiting)


def _pods(make: Any, name: str, *ordinals: int) -> st.SearchStrategy[dict[str, Any]]:
    given_ = {
        "containers": st.lists(_states(name), min_size=1, max_size=1),
        "ready": st.booleans(),
        "leaving": st.sampled_from([False, False, True]),
        "disruption": st.sampled_from([None, None, None, "PreemptionByScheduler"]),
        "unscheduled": st.sampled_from([None, None, "0/1 nodes are available"]),
        "uid": st.uuids().map(str),
    }
    return st.builds(make, *([st.sampled_from(ordinals)] if ordinals else []), **given_)


PODS = st.tuples(
    st.lists(_pods(trainer, "trainer"), max_size=1),
    st.lists(_pods(generator, "generator", 0, 1, 2, 3), max_size=3, unique_by=lambda pod: pod["metadata"]["name"]),
).map(lambda both: [*both[0], *both[1]])
PAGES = st.sampled_from(
    [None, None, *(page(step=step) for step in range(0, 20, 4)), page(warnings=[]), page(warnings=[WARNED])] * 3
    + [
        page(ended=True, result={"status": "succeeded", "steps": 20, "final_reward": None}),
        page(ended=True, result={"status": "failed", "reason": "r"}),
    ]
)
LOOKS = st.lists(st.tuples(SPECS, PODS, PAGES, st.booleans(), st.integers(0, 60)), min_size=1, max_size=8)
UNREAD = SignalsUnreachable(since=NOW - timedelta(hours=1), error="no answer within 3 s")


def look_of(before: Observed, *, spec: dict[str, Any], pods: Sequence[Any], numbers: Any, valid: bool) -> Observed:
    document = job_document(**spec)
    document["metadata"]["generation"] = before.raw["metadata"]["generation"] + 1
    raw = {**document, "status": before.raw.get("status", {})}
    signals_unreachable = UNREAD if numbers is None and pods else None
    return replace(
        before,
        raw=raw,
        job=validated(document) if valid else None,
        pods=pods,
        numbers=numbers,
        signals_unreachable=signals_unreachable,
    )


def check(look: Observed, decision: JobDecision) -> None:
    """What holds for any one verdict."""
    status = RLJobStatus.model_validate_json(_json(decision.status))
    assert [one.type for one in status.conditions if one.type != WARNED["type"]] == TYPES
    assert len(status.conditions) <= len(TYPES) + 1
    assert not (ended(decision) and decision.wanted.trainers)
    for pool_status in decision.pool_statuses.values():
        GeneratorPoolStatus.model_validate_json(_json(pool_status))
    if look.job is not None:
        (pool,) = look.job.spec.generators
        least, most = bounds(pool.scaling)
        desired = decision.wanted.generators["sim"]
        assert desired == 0 or (decision.wanted.trainers and least <= desired <= most)
        assert decision.pool_statuses["sim"]["desiredReplicas"] == desired


def ended(decision: JobDecision) -> bool:
    return any(
        one["type"] in ("Succeeded", "Failed") and one["status"] == "True" for one in decision.status["conditions"]
    )


def _json(document: Any) -> str:
    return json.dumps(document)


@given(LOOKS)
@settings(max_examples=200, deadline=None)
def test_any_life(looks: list[tuple]) -> None:
    first = observed()
    now, was_ended, counters = carried_out(first, decide(first, settings=SETTINGS)), None, (0, 0)
    for spec, pods, numbers, invalid, seconds in looks:
        now = look_of(now, spec=spec, pods=pods, numbers=numbers, valid=not invalid or seconds > 10)
        decision = decide(now, settings=SETTINGS)
        check(now, decision)
        now = carried_out(now, decision)
        again = decide(now, settings=SETTINGS)  # the same look: nothing is new
        assert again.status == decision.status
        assert again.pool_statuses == decision.pool_statuses
        assert (again.events, again.delete_pods) == ((), ())
        assert (again.wanted.trainers, again.wanted.generators) == (
            decision.wanted.trainers,
            decision.wanted.generators,
        )
        assert again.wanted.requested == {}
        if was_ended is not None:
            assert decision.status["conditions"] == was_ended["conditions"]
            assert decision.events == ()
        was_ended = decision.status if ended(decision) else None
        tallied = (decision.status["restarts"], decision.status["ignoredRestarts"])
        assert tallied >= counters
        assert tallied[1] >= counters[1]
        counters = tallied
        now = carried_out(now, again, seconds=float(seconds))
        rests(now)


def rests(now: Observed) -> None:
    """Once its numbers are shown, time alone changes nothing, but for the deadline; and a job that rests needs nothing for that time."""
    late = replace(now, now=now.now + timedelta(seconds=SETTINGS.resync_s))
    settled = decide(late, settings=SETTINGS)
    if settled.rests_s:
        soon = carried_out(late, settled, seconds=settled.rests_s - 0.001)
        moved = decide(replace(soon, numbers={**(late.numbers or {}), "step": 99, "queue": 3}), settings=SETTINGS)
        assert (moved.status, moved.wanted, moved.events) == (settled.status, replace(settled.wanted, requested={}), ())
    later = decide(carried_out(late, settled, seconds=600.0), settings=SETTINGS)
    assert later.status == settled.status or (ended(later) and not ended(settled))
