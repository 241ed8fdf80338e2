"""How many pods a pool should have, by static, auto and external, and who writes the number."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl import names
from streamrl.spec.generators import Scaling
from streamrl.status import PoolSummary, RLJobStatus
from streamrl_operator.autoscaler.values import ScalingState, generator_name
from streamrl_operator.planning import job_status, replicas
from streamrl_operator.planning.replicas import PoolPlan
from streamrl_operator.planning.values import Observed
from support.observed_jobs import BY_AN_HPA, JOB, NOW, OURS, generator, observed, page, pod, pool_object

AUTO = {"auto": {"initialReplicas": 2, "minReplicas": 1, "maxReplicas": 4, "cooldownSeconds": 0.0}}
EXTERNAL = {"external": {"initialReplicas": 3}}


def static(count: int) -> dict[str, Any]:
    return {"static": {"replicas": count}}


def look(scaling: dict[str, Any], found: dict[str, Any] | None = None, /, **changes: Any) -> Observed:
    return observed(spec={"scaling": scaling}, pools={} if found is None else {"sim": found}, **changes)


def plan(seen: Observed, *, before: RLJobStatus = RLJobStatus(), halted: str = "") -> PoolPlan:  # noqa: B008 - frozen
    (only,) = replicas.plan(seen, before=before, halted=halted)
    return only


def held(count: int, kind: str) -> dict[str, Any]:
    return pool_object(count, scaling=kind)


def taken(count: int, kind: str) -> dict[str, Any]:
    return pool_object(count, scaling=kind, managers=[BY_AN_HPA])


@pytest.mark.parametrize(
    ("scaling", "found", "desired", "requested"),
    [
        (static(2), None, 2, 2),
        (static(2), held(2, "static"), 2, None),
        (static(2), pool_object(2, scaling="static", managers=[]), 2, None),
        (static(4), held(2, "static"), 4, 4),
        (static(2), held(5, "static"), 2, 2),
        (static(5), taken(5, "external"), 5, 5),
        (AUTO, None, 2, 2),
        (AUTO, held(3, "auto"), 3, None),
        (AUTO, taken(3, "external"), 3, 3),
        (AUTO, held(9, "static"), 4, 4),
        (EXTERNAL, None, 3, 3),
        (EXTERNAL, held(3, "external"), 3, None),
        (EXTERNAL, taken(7, "external"), 7, None),
        (EXTERNAL, taken(0, "external"), 0, None),
        (EXTERNAL, held(2, "static"), 2, None),
        (EXTERNAL, taken(2, "static"), 2, 2),
        (EXTERNAL, held(5000, "external"), 1024, None),
    ],
)
def test_what_is_asked_and_who_writes_it(
    scaling: dict[str, Any], found: dict[str, Any] | None, desired: int, requested: int | None
) -> None:
    reported = plan(look(scaling, found))
    assert (reported.desired, reported.requested) == (desired, requested)
    halted = plan(look(scaling, found), halted="the job is suspended")
    assert (halted.desired, halted.status.desired_replicas, halted.status.reason) == (0, 0, "the job is suspended")
    if found is None or scaling is not AUTO:
        assert halted.requested == requested  # what is asked is the same; the override is not written


def test_a_pools_pods_are_counted_whatever_they_do() -> None:
    found = [generator(0), generator(1, ready=False), pod(f"{JOB}-other-0")]
    for each in found:
        each["metadata"]["labels"][names.LABEL_ROLE] = "environment"
    reported = plan(look(static(3), held(3, "static"), pods=found))
    assert (reported.desired, reported.status.replicas, reported.status.ready_replicas) == (3, 2, 1)


@pytest.mark.parametrize("scaling", [AUTO, EXTERNAL], ids=["auto", "external"])
def test_a_pool_made_by_an_operator_that_died_then_begins_as_another(scaling: dict[str, Any]) -> None:
    """Found by the crash-point campaign: the history told of a /scale that nobody had asked for."""
    (kind,) = scaling
    first = scaling[kind]["initialReplicas"]
    assert plan(look(scaling, held(first, kind))).status.reason == "initialReplicas"
    assert plan(look(scaling, held(first - 1, kind))).status.reason != "initialReplicas"  # somebody was quicker


@pytest.mark.parametrize("count", [1, 9])
def test_new_bounds_hold_in_a_suspended_job_too(count: int) -> None:
    """Else a suspended job asks for a number that a fresh one would not have, and begins with it when it goes on."""
    scaling = {"auto": {"initialReplicas": 3, "minReplicas": 3, "maxReplicas": 3}}
    assert plan(look(scaling, held(count, "auto")), halted="the job is suspended").requested == 3


def test_a_pool_whose_object_is_not_seen_does_not_begin_again() -> None:
    before = RLJobStatus(pools=(PoolSummary(name="sim", desired=4, ready=4),))
    assert plan(look(AUTO), before=before).desired == 4
    assert plan(look(EXTERNAL), before=before).desired == 4


def test_auto_goes_on_from_the_object_after_a_restart_of_the_operator() -> None:
    first = plan(look(AUTO, held(3, "auto"), numbers=None))
    assert first.state is not None
    assert (first.state.wanted, first.desired) == (3, 3)


def test_auto_goes_on_from_what_somebody_sets_through_scale() -> None:
    for count, within in ((4, 4), (9, 4)):
        reported = plan(look(AUTO, taken(count, "auto"), scaling={"sim": ScalingState(wanted=2)}))
        assert reported.desired == reported.requested == within
        assert reported.status.scaling_history[-1].reason.startswith(f"set to {count} through /scale")
        assert reported.state is not None
        assert plan(look(AUTO, held(within, "auto"), scaling={"sim": reported.state})).desired == within


def test_auto_grows_when_the_queue_and_the_pace_ask_for_it() -> None:
    found, seen_desired, state, reason = held(2, "auto"), [], {}, None
    for second in range(0, 100, 5):
        numbers = busy_page(wall_s=100.0 + second, step=second // 10)
        reported = plan(look(AUTO, found, numbers=numbers, scaling=state, at_s=float(second)))
        state = {"sim": reported.state}
        found = held(2, "auto") | {"status": job_status.plain_status(reported.status)}
        seen_desired.append(reported.desired)
        if reported.events:
            reason = reported.events[0].message
            break
    assert seen_desired[-2:] == [2, 3]
    assert reported.requested == 3
    assert reason is not None
    assert reason.startswith("pool sim: 2 -> 3 replicas: T_gen ")
    assert reported.status.scaling_history[-1].reason in reason


def test_why_auto_does_not_grow_although_generation_is_slower_is_in_the_status_and_stays_there() -> None:
    found, state, reasons = held(2, "auto"), {}, []
    for second in range(0, 200, 5):
        numbers = busy_page(wall_s=100.0 + second, step=second // 10, used=0.2, queue=0)
        reported = plan(look(AUTO, found, numbers=numbers, scaling=state, at_s=float(second)))
        state = {"sim": reported.state}
        found = held(2, "auto") | {"status": job_status.plain_status(reported.status)}
        reasons.append(reported.status.reason)
        assert reported.desired == 2
    assert reasons[0] == "initialReplicas"
    (held_for,) = set(reasons[10:])
    assert held_for is not None
    assert held_for.startswith("one more would bring less than a third of an even split")
    assert len(reported.status.scaling_history) == 1


def test_auto_never_shrinks_without_numbers() -> None:
    state = {"sim": ScalingState(wanted=4)}
    for second in range(0, 1000, 30):
        reported = plan(look(AUTO, held(4, "auto"), scaling=state, at_s=float(second)))
        state = {"sim": reported.state}
        assert (reported.desired, reported.requested) == (4, None)


def test_the_memory_of_auto_is_dropped_while_another_scales() -> None:
    assert plan(look(static(2), held(2, "static"), scaling={"sim": ScalingState(wanted=4)})).state is None
    assert plan(look(AUTO, held(2, "auto")), halted="x").state is None


def busy_page(*, wall_s: float, step: int, used: float = 1.0, queue: int = 7) -> dict[str, Any]:
    """Two generators that never idle, with so many of their slots in use, a trainer that mostly does; a step each ten seconds."""
    lines = [
        {
            "id": generator_name("sim", ordinal=n),
            "slots": 8,
            "active": 8,
            "tokens": int(100 * wall_s),
            "bubbles": {"busy": used * wall_s, "skew": (1 - used) * wall_s},
            "wall_s": wall_s,
        }
        for n in range(2)
    ]
    waits = {"pipeline_no_samples": 0.9 * wall_s}
    speed = {"speed": "known", "step_s": {"1": 0.01}}
    whole = page(
        step=step,
        queue=queue,
        dispatch={"pools": {"sim": speed}},
        generators=lines,
        trainer={"id": "trainer-0", "bubbles": waits, "wall_s": wall_s},
    )
    whole["scaling"]["since_step_s"] = wall_s % 10
    return whole


def test_history_tells_of_each_change_once_and_of_its_beginning() -> None:
    first = plan(look(EXTERNAL))
    assert [(one.from_replicas, one.to_replicas, one.reason) for one in first.status.scaling_history] == [
        (0, 3, "initialReplicas")
    ]
    assert first.events == ()
    found = taken(5, "external") | {"status": job_status.plain_status(first.status)}
    second = plan(look(EXTERNAL, found))
    (event,) = second.events
    assert (event.reason, event.message) == ("Scaled", "pool sim: 3 -> 5 replicas: set to 5 through /scale")
    assert second.status.reason == "set to 5 through /scale"
    found["status"] = job_status.plain_status(second.status)
    third = plan(look(EXTERNAL, found))
    assert (third.events, third.status) == ((), second.status)


def test_history_is_bounded() -> None:
    status: dict[str, Any] = {}
    for count in range(1, 20):
        reported = plan(look(static(count), held(count, "static") | {"status": status}))
        status = job_status.plain_status(reported.status)
    assert [one.to_replicas for one in reported.status.scaling_history] == list(range(10, 20))


def test_a_number_out_of_bounds_is_clamped_and_said() -> None:
    reported = plan(look(EXTERNAL, held(5000, "external")))
    assert reported.status.reason == "set to 5000 through /scale; bounds are 0 to 1024"


def test_the_status_counts_pods() -> None:
    pods = [generator(0), generator(1, ready=False, unscheduled="0/1 nodes"), generator(2, leaving=True)]
    status = plan(look(static(2), held(2, "static"), pods=pods)).status
    assert (status.replicas, status.ready_replicas, status.desired_replicas) == (2, 1, 2)
    assert status.selector == "streamrl.io/job=simulated,streamrl.io/pool=sim"
    (ready,) = status.conditions
    assert (ready.status, ready.reason) == ("False", "Unschedulable")
    assert ready.message == "1 of 2 pods are ready; pod simulated-sim-1 has no node: 0/1 nodes"


def test_after_the_end_whatever_is_asked_changes_nothing() -> None:
    seen = look(static(9), held(2, "static"))
    for one in (seen, replace(seen, job=None)):
        (reported,) = replicas.stopped(one, why="the job has ended")
        assert (reported.desired, reported.requested, reported.events, reported.state) == (0, None, (), None)


SCALINGS = st.sampled_from([static(1), static(6), AUTO, EXTERNAL])
FOUND = st.one_of(
    st.none(),
    st.builds(
        pool_object,
        st.one_of(st.none(), st.integers(0, 2000)),
        scaling=st.sampled_from(["static", "auto", "external"]),
        managers=st.sampled_from([(), (OURS,), (BY_AN_HPA,), (OURS, BY_AN_HPA)]),
    ),
)


@given(SCALINGS, FOUND, st.one_of(st.none(), st.integers(1, 2000)), st.booleans())
def test_wanted_is_within_bounds_and_halted_is_none(
    scaling: dict[str, Any], found: dict[str, Any] | None, memory: int | None, halted: bool
) -> None:
    state = {} if memory is None else {"sim": ScalingState(wanted=memory)}
    reported = plan(look(scaling, found, scaling=state, now=NOW), halted="x" if halted else "")
    least, most = replicas.bounds(Scaling.model_validate(scaling))
    assert reported.desired == 0 if halted else least <= reported.desired <= most
    if (
        scaling is EXTERNAL
        and found is not None
        and found["spec"]["scaling"] == "external"
        and found["spec"]["replicas"] is not None
    ):
        assert reported.requested is None
