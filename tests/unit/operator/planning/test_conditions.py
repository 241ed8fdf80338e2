"""Conditions, and the reading of a stored status that is not quite ours."""

from datetime import timedelta
from typing import Any

import pytest

from streamrl.status import RLJobStatus
from streamrl_operator.planning import conditions, job_status, pods
from streamrl_operator.planning.conditions import Aspect
from streamrl_operator.planning.values import seconds_since, stamp
from support.observed_jobs import NOW, container, generator, trainer

LATER = NOW + timedelta(seconds=90)


def ready(holds: bool, reason: str = "A", message: str = "") -> Aspect:
    return Aspect(type="Ready", holds=holds, reason=reason, message=message)


@pytest.mark.parametrize(("second", "moved"), [(ready(False, "B", "other words"), False), (ready(True, "A"), True)])
def test_the_time_moves_with_a_flip_alone(second: Aspect, moved: bool) -> None:
    first = conditions.renewed((), [ready(False)], now=NOW, generation=1)
    (after,) = conditions.renewed(first, [second], now=LATER, generation=2)
    assert after.last_transition_time == stamp(LATER if moved else NOW)
    assert (after.reason, after.message, after.observed_generation) == (second.reason, second.message, 2)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-01T11:59:00Z", 60.0),
        ("2026-01-01T11:59:00+00:00", 60.0),
        ("2026-01-01T11:59:00", 60.0),
        ("soon", None),
        (None, None),
    ],
)
def test_times_as_they_may_be_written(text: str | None, seconds: float | None) -> None:
    assert seconds_since(text, now=NOW) == seconds


def test_what_cannot_be_read_is_clean_out_and_the_rest_is_kept() -> None:
    end = {"type": "Failed", "status": "True", "lastTransitionTime": stamp(NOW), "reason": "R", "message": "m"}
    newer = {**end, "type": "Ready", "severity": "new"}
    document = {"status": {"kopf": {"progress": {}}, "conditions": [newer, end], "step": "many", "restarts": 2}}
    status = job_status.read_job_status(document)
    assert [one.type for one in status.conditions] == ["Failed"]
    assert (status.step, status.restarts) == (None, 2)


@pytest.mark.parametrize("document", [{}, {"status": None}, {"status": []}, {"status": {"conditions": "none"}}])
def test_a_status_that_is_none_reads_as_empty(document: dict) -> None:
    assert job_status.read_job_status(document) == RLJobStatus()


def test_a_status_is_written_without_what_is_unknown() -> None:
    assert job_status.plain_status(RLJobStatus(restarts=0, step=None)) == {"restarts": 0}


def unready(**state: Any) -> dict[str, Any]:
    return trainer(ready=False, containers=[container("trainer", **state)])


PULL = "image registry/x cannot be pulled; kubectl describe pod simulated-trainer-0 says why"


@pytest.mark.parametrize(
    ("pod", "reason", "words"),
    [
        (trainer(ready=False, unscheduled="0/1 nodes are available"), "Unschedulable", "0/1 nodes are available"),
        (trainer(ready=False, leaving=True), "Terminating", "simulated-trainer-0 is ending"),
        (trainer(leaving=True), "Terminating", "simulated-trainer-0 is ending"),
        (unready(waiting="ErrImagePull"), "ImagePullBackOff", PULL),
        (unready(waiting="ImagePullBackOff"), "ImagePullBackOff", PULL),
        (unready(waiting="CreateContainerConfigError"), "CreateContainerConfigError", "kubelet says"),
        (
            unready(waiting="CrashLoopBackOff", last=7, message="no GPU\n"),
            "CrashLoopBackOff",
            "container trainer of pod simulated-trainer-0 ended with exit code 7 (Error): no GPU",
        ),
        (
            trainer(
                ready=False,
                init=[container("prepare"), container("scheduler", waiting="PodInitializing")],
                containers=[container("trainer", waiting="PodInitializing")],
            ),
            "Preparing",
            "makes the model ready",
        ),
        (unready(code=1), "Restarting", "exit code 1"),
        (
            trainer(ready=False, init=[container("prepare", waiting="ContainerCreating")]),
            "Starting",
            "starts container prepare",
        ),
        (trainer(ready=False, phase="Failed", reason="OutOfcpu"), "PodFailed", "OutOfcpu"),
        (unready(), "Starting", "is not ready yet"),
        (generator(3, ready=False), "Starting", "simulated-sim-3"),
    ],
)
def test_what_a_pod_waits_for(pod: dict, reason: str, words: str) -> None:
    waiting_reason = pods.waiting_reason(pod)
    assert waiting_reason is not None
    assert waiting_reason.reason == reason
    assert words in waiting_reason.message


def test_a_ready_pod_waits_for_nothing_and_an_empty_one_for_a_node() -> None:
    assert pods.waiting_reason(trainer()) is None
    waiting_reason = pods.waiting_reason({"metadata": {"name": "simulated-sim-0"}})
    assert waiting_reason is not None
    assert waiting_reason.message == "pod simulated-sim-0 waits for a node"
