"""A job whose data has changed is held, not failed: its scheduler looks again, and nothing else runs or is counted meanwhile."""

from typing import Any

import pytest

from streamrl.changes import when
from streamrl.errors import EXIT_DATA_CHANGED, EXIT_RETRY, EXIT_USER_ERROR
from streamrl_operator.planning.values import Observed
from support.job_lives import conditions, edited, lived, message, reasons, running
from support.observed_jobs import all_ready, container, generator_whose, trainer

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


def test_another_mistake_still_fails_the_job() -> None:
    _, decision = lived({"pods": (scheduler(code=EXIT_USER_ERROR),), "numbers": None}, start=held())
    assert conditions(decision)["Failed"] == ("True", "UserError")


def test_the_deadline_of_a_held_job_holds() -> None:
    _, decision = lived({}, start=edited(held(), activeDeadlineSeconds=1))
    assert conditions(decision)["Failed"] == ("True", "DeadlineExceeded")


def test_the_field_that_allows_other_data_changes_while_the_job_is_suspended() -> None:
    assert when("task.allowChangedData") == "WhileSuspended"
    assert when("task.groupSize") is None
