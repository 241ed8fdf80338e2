"""How a job comes to run, and when one that cannot lets its nodes go.

    pods are made ──a pod cannot start, others hold nodes──▶ stuck ──startDeadlineSeconds──▶ no pods, for as long ─▶ pods are made
        │                                                      │
        └──────────────────── ready ◀──────────────────────────┘      from then on it has no such deadline

A pod that makes progress has no deadline either: a model may take an hour to load. Where pods find no node, the oldest job that is stuck
waits twice as long: the younger ones let go first, and it runs. The status is the memory.
"""

from collections.abc import Sequence
from datetime import timedelta

from streamrl.status import StartStatus
from streamrl_operator.planning import pods
from streamrl_operator.planning.conditions import READY, Aspect
from streamrl_operator.planning.values import Object, Observed, seconds_since, stamp

RELEASED = "StartDeadlineExceeded"
"""Reason of the condition Ready, and of an event."""
_NO_NODE = "Unschedulable"
_NO_SANDBOX = "NoSandbox"
_CANNOT_START = (
    _NO_NODE,
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
)
"""What a pod waits for that no time mends, or that others have."""
_PATIENCE = 2
"""Deadlines that the oldest waits for a node."""


def next_start(
    before: StartStatus | None, *, observed: Observed, ready: Aspect, missing_pods: str, is_new: bool
) -> StartStatus:
    """Return the status of the start now. `missing_pods`: why pods are not made, at home or in a member; `is_new`: the pods are made with this look."""
    now = stamp(observed.now)
    if before is None and not is_new:  # of a release that knew no deadline
        return StartStatus(since=now, ready_time=now)
    if before is None or before.released_until is not None:
        before = StartStatus(since=now)
    if before.ready_time is not None or ready.holds is None:
        return before
    if ready.holds:
        return StartStatus(since=before.since, ready_time=now)
    if not _why_stuck(observed.pods, missing_pods=missing_pods) or not any(map(_holds_node, observed.pods)):
        return StartStatus(since=before.since)
    return StartStatus(since=before.since, stuck_since=before.stuck_since or now)


def seconds_to_release(start: StartStatus, *, observed: Observed) -> float | None:
    """Return how long a job that is stuck may go on so; None: it is not."""
    waited_s = seconds_since(start.stuck_since, now=observed.now)
    if waited_s is None or observed.job is None:
        return None
    finds_no_node = _why_stuck(observed.pods, missing_pods="") == _NO_NODE
    patience = _PATIENCE if finds_no_node and not observed.older_stuck else 1
    return max(patience * observed.job.spec.start_deadline_seconds - waited_s, 0.0)


def released(observed: Observed) -> StartStatus:
    """Return the status of a job that lets go now."""
    assert observed.job is not None, "asked only of a valid job"
    return StartStatus(released_until=stamp(observed.now + timedelta(seconds=observed.job.spec.start_deadline_seconds)))


def not_ready(start: StartStatus, *, observed: Observed, why: str) -> Aspect:
    """Return the condition Ready of a job that has let go."""
    assert observed.job is not None, "asked only of a valid job"
    within = f"it could not start within startDeadlineSeconds {observed.job.spec.start_deadline_seconds}"
    older = f"; job {observed.older_stuck} is older and waits too" if observed.older_stuck else ""
    message = f"{within}, so it has no pods until {start.released_until}: {why}{older}"
    return Aspect(type=READY, holds=False, reason=RELEASED, message=message)


def seconds_released(start: StartStatus | None, *, observed: Observed) -> float | None:
    """Return for how long it has no pods yet; None: it may have some."""
    past_s = seconds_since(start.released_until if start else None, now=observed.now)
    return None if past_s is None or past_s >= 0 else -past_s


def _why_stuck(all_pods: Sequence[Object], *, missing_pods: str) -> str:
    waiting = [reason.reason for pod in all_pods if (reason := pods.waiting_reason(pod)) is not None]
    found = [reason for reason in waiting if reason in _CANNOT_START]
    found += [_NO_SANDBOX for pod in all_pods if pods.lacks_sandbox(pod)]
    # What no node can mend counts first: then no other job is in the way.
    return next((reason for reason in found if reason != _NO_NODE), "") or missing_pods or next(iter(found), "")


def _holds_node(pod: Object) -> bool:
    scheduled = pods.condition(pod, "PodScheduled")
    return scheduled is not None and scheduled.get("status") == "True"
