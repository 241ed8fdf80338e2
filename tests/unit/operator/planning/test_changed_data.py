"""A job whose data has changed is held, not failed: its scheduler looks again, and nothing else runs or is counted meanwhile."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from streamrl import names
from streamrl.changes import when
from streamrl.errors import EXIT_DATA_CHANGED, EXIT_RETRY, EXIT_USER_ERROR
from streamrl_operator.planning.values import Observed
from support.job_lives import conditions, edited, lived, message, reasons, reported, running
from support.observed_jobs import (
    JOB,
    all_ready,
    carried_out,
    container,
    generator,
    generator_whose,
    observed,
    page,
    trainer,
    trainer_worker,
)

LINE = "spec.task.dataset: the data has changed since the journal was written; recorded: 180 rows; now: 181 rows"


def scheduler(**state: Any) -> dict[str, Any]:
    """The trainer's pod, whose scheduler is in that state; the trainer has lost it."""
    lost = container("trainer", waiting="CrashLoopBackOff", last=EXIT_RETRY, restarts=9)
    return trainer(init=[container("scheduler", message=LINE, **state)], containers=[lost], ready=False)


STATES = {
    "ended": {"code": EXIT_DATA_CHANGED},
    "backing off": {"waiting": "CrashLoopBackOff", "last": EXIT_DATA_CHANGED, "restarts": 5},
    "looking again": {"last": EXIT_DATA_CHANGED, "restarts": 6},
}


def held() -> Observed:
    """A job that ran, until its scheduler found other data."""
    return lived({"pods": (scheduler(**STATES["backing off"]),), "numbers": None}, start=running())[0]


@pytest.mark.parametrize("state", STATES)
def test_a_job_whose_data_has_changed_is_held_and_says_what_changed(state: str) -> None:
    pods = (scheduler(**STATES[state]), generator_whose(code=EXIT_RETRY, restarts=3))
    _, decision = lived({"pods": pods, "numbers": None}, start=running())
    assert conditions(decision)["Ready"] == ("False", "DataChanged")
    assert message(decision, "Ready") == LINE
    assert conditions(decision)["Failed"] == ("False", "InProgress")
    assert (decision.wanted.trainers, decision.wanted.generators) == (1, {"sim": 0})
    assert decision.status["restarts"] == decision.status["ignoredRestarts"] == 0
    assert reasons(decision) == ["DataChanged"]


def test_it_is_said_once_and_nothing_flaps_while_the_scheduler_looks_again() -> None:
    look = held()
    for state in STATES.values():
        look, decision = lived({"pods": (scheduler(**state),)}, start=look)
        assert (conditions(decision)["Ready"], decision.events) == (("False", "DataChanged"), ())
        assert decision.wanted.generators == {"sim": 0}


def test_a_job_whose_data_is_back_goes_on_and_counts_nothing_of_the_wait() -> None:
    back = container("scheduler", last=EXIT_DATA_CHANGED, restarts=7) | {"ready": True}
    ended = container("trainer", last=EXIT_RETRY, restarts=10)
    _, decision = lived({"pods": (trainer(init=[back], containers=[ended]), *all_ready()[1:])}, start=held())
    assert conditions(decision)["Ready"] == ("True", "Running")
    assert decision.wanted.generators["sim"] > 0
    assert decision.status["restarts"] == 0


REJECTED = generator(1, phase="Failed", reason="OutOfcpu", uid="u-lost")
EVICTED = generator(1, phase="Failed", reason="Evicted", uid="u-lost", containers=[container("generator", code=137)])


@pytest.mark.parametrize(("lost", "gone"), [(REJECTED, True), (REJECTED, False), (EVICTED, False)])
def test_a_pod_that_is_lost_during_the_wait_is_not_counted_afterwards(lost: dict[str, Any], gone: bool) -> None:
    rules = [{"name": "none", "onReasons": ["Rejected", "Evicted"], "action": "FailJob"}]
    during: dict[str, Any] = {"rejected": [lost]} if gone else {"pods": (scheduler(**STATES["backing off"]), lost)}
    back: dict[str, Any] = {"pods": all_ready()} if gone else {"pods": (*all_ready(1), lost)}
    look, decision = lived(during, start=edited(held(), failurePolicy={"rules": rules}))
    assert reported(look).status == decision.status
    _, decision = lived(back, start=look)
    assert conditions(decision)["Failed"] == ("False", "InProgress")
    assert (decision.status["ignoredRestarts"], decision.status.get("holds")) == (0, None)
    assert not {"PodRejected", "PodFailed"} & set(reasons(decision))


def test_workers_that_kubelets_reject_during_the_wait_are_made_slowly() -> None:
    waiting, workers = scheduler(**STATES["backing off"]), f"{JOB}-trainer-workers"
    start = observed(
        spec={"trainer": {"engine": {"torch": {}}, "nodes": 2}, "generators": [{"name": "sim", "engine": {"hf": {}}}]}
    )
    look, _ = lived({"pods": [*all_ready(), trainer_worker()]}, {"numbers": page()}, start=start)
    for time, hold in ((0, frozenset()), (1, frozenset({workers}))):
        rejected = trainer_worker(phase="Failed", reason="OutOfcpu", uid=f"u-{time}")
        look = replace(look, pods=[waiting, rejected], numbers=None)
        decision = reported(look)
        assert (decision.wanted.held, decision.status["ignoredRestarts"]) == (hold, 0)
        look = carried_out(look, decision)
        assert reported(look).status == decision.status
    assert decision.requeue_after_s == 10
    gated = trainer_worker(ready=False) | {"spec": {"schedulingGates": [{"name": names.GATE}]}}
    for seconds, released in ((9, ()), (10, (f"{workers}-0",))):
        decision = reported(replace(look, pods=[waiting, gated], now=look.now + timedelta(seconds=seconds)))
        assert (conditions(decision)["Ready"], decision.delete_pods) == (("False", "DataChanged"), released)


def test_another_mistake_still_fails_the_job() -> None:
    _, decision = lived({"pods": (scheduler(code=EXIT_USER_ERROR),), "numbers": None}, start=held())
    assert conditions(decision)["Failed"] == ("True", "UserError")


def test_the_deadline_of_a_held_job_holds() -> None:
    _, decision = lived({}, start=edited(held(), activeDeadlineSeconds=1))
    assert conditions(decision)["Failed"] == ("True", "DeadlineExceeded")


def test_the_field_that_allows_other_data_changes_while_the_job_is_suspended() -> None:
    assert when("task.allowChangedData") == "WhileSuspended"
    assert when("task.groupSize") is None
