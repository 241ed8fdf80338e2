"""How a job ends: by its result, by a failure that is not tried again, by its deadline. And when it is deleted after it.

An end is final: the conditions Succeeded and Failed are the memory, whatever is observed or edited later. What stands in the way of a job and
only somebody else can clear is its condition Ready (`with_blocked_condition`), never over an end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from streamrl.spec.training import FailurePolicy
from streamrl.status import RLJobStatus
from streamrl_operator.planning import conditions, job_status
from streamrl_operator.planning.conditions import (
    FAILED,
    READY,
    SUCCEEDED,
    SUSPENDED,
    Aspect,
    warning,
)
from streamrl_operator.planning.failures import FAIL, NO_RULE, RestartAccounting
from streamrl_operator.planning.values import JobEvent, Object, seconds_since, stamp

COMPLETED, DEADLINE = "Completed", "DeadlineExceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job is over."""

    succeeded: bool
    reason: str
    message: str


def end_of_status(status: RLJobStatus) -> End | None:
    """The end that is written; None: the job has not ended."""
    for kind in (SUCCEEDED, FAILED):
        reported = conditions.find(status.conditions, kind)
        if reported is not None and reported.status == "True":
            return End(succeeded=kind == SUCCEEDED, reason=reported.reason, message=reported.message)
    return None


def end_by_result(page: Mapping[str, Any] | None) -> End | None:
    """By the result that the scheduler has written."""
    result = _result(page)
    if result.get("status") == "succeeded":
        steps, reward = job_status.whole_number(result.get("steps")), job_status.rounded(result.get("final_reward"))
        reported = "" if reward is None else f"; held-out reward {reward:g}"
        return End(
            succeeded=True, reason=COMPLETED, message=f"{'all' if steps is None else steps} steps are done{reported}"
        )
    if result.get("status") == "failed":
        return End(
            succeeded=False, reason="RunFailed", message=job_status.text(result.get("reason")) or "no reason is given"
        )
    return None


def end_by_failure(accounting: RestartAccounting, *, policy: FailurePolicy) -> End | None:
    """By a container's end that fails the job, or by too many restarts."""
    fatal = next((judged for judged in accounting.new if judged.action == FAIL), None)
    if fatal is not None:
        if fatal.rule == NO_RULE:
            return End(succeeded=False, reason="UserError", message=fatal.failure.text)
        why = f"rule {fatal.rule} of failurePolicy: {fatal.failure.text}"
        return End(succeeded=False, reason="FailurePolicy", message=why)
    if accounting.restarts > policy.max_restarts:
        last = f"; the last: {accounting.new[-1].failure.text}" if accounting.new else ""
        why = f"{accounting.restarts} restarts, and failurePolicy.maxRestarts is {policy.max_restarts}{last}"
        return End(succeeded=False, reason="TooManyRestarts", message=why)
    return None


def end_by_deadline(status: RLJobStatus, *, deadline_s: int | None, now: datetime) -> End | None:
    """By its time."""
    left_s = seconds_left(status, deadline_s=deadline_s, now=now)
    if left_s is None or left_s > 0:
        return None
    why = f"activeDeadlineSeconds is {deadline_s}; the job ran since {status.start_time}"
    return End(succeeded=False, reason=DEADLINE, message=why)


def seconds_left(status: RLJobStatus, *, deadline_s: int | None, now: datetime) -> float | None:
    """Until the deadline; None: there is none, or its clock stands."""
    since_s = seconds_since(status.start_time, now=now)
    return None if deadline_s is None or since_s is None else deadline_s - since_s


def with_end(
    before: RLJobStatus, end: End, *, page: Mapping[str, Any] | None, store: str, now: datetime
) -> RLJobStatus:
    """The status with the last numbers and the time of the end; its conditions are `aspects`."""
    result = _result(page) if end.succeeded else {}
    step, reward = job_status.whole_number(result.get("steps")), job_status.rounded(result.get("final_reward"))
    return before.model_copy(
        update={
            "completion_time": before.completion_time or stamp(now),
            "step": before.step if step is None else step,
            "reward": before.reward if reward is None else reward,
            "checkpoint_path": job_status.checkpoint_path(store, result.get("checkpoint")) or before.checkpoint_path,
            "start": None,
            "queue": None,
            "tokens_per_second": None,
            "holds": (),
        }
    )


def end_aspects(end: End) -> tuple[Aspect, ...]:
    """All conditions of a job that has ended."""
    return (
        Aspect(type=READY, holds=end.succeeded, reason=end.reason, message="the job has ended"),
        Aspect(type=SUSPENDED, holds=False, reason="NotSuspended"),
        Aspect(type=SUCCEEDED, holds=end.succeeded, reason=end.reason, message=end.message),
        Aspect(type=FAILED, holds=not end.succeeded, reason=end.reason, message="" if end.succeeded else end.message),
    )


def end_event(end: End) -> JobEvent:
    """Told once."""
    if end.succeeded:
        return JobEvent(kind="Normal", reason="Succeeded", message=end.message)
    if end.reason == DEADLINE:
        return warning(DEADLINE, end.message)
    return warning("Failed", f"{end.reason}: {end.message}")


def seconds_to_deletion(status: RLJobStatus, spec: Object, *, now: datetime) -> float | None:
    """Until the ended job is deleted; None: it is kept. `spec` as stored: the time may be set after the end too."""
    ttl_s = job_status.whole_number(spec.get("ttlSecondsAfterFinished"))
    since_s = seconds_since(status.completion_time, now=now)
    return None if ttl_s is None or since_s is None else ttl_s - since_s


def _result(page: Mapping[str, Any] | None) -> Mapping[str, Any]:
    result = None if page is None else page.get("result")
    return result if isinstance(result, Mapping) else {}


def with_deletion(status: Object, left: Sequence[Object]) -> Object:
    """The status with the message of Ready saying what the deletion of the job waits for, of one that has ended too."""
    ordered = sorted(f"{obj['kind']} {obj['metadata']['name']}" for obj in left)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    message = f"the job is being deleted; it waits until these are gone: {', '.join(ordered[:_NAMED])}{more}"
    told = [{**one, "message": message} if one["type"] == READY else one for one in status["conditions"]]
    return {**status, "conditions": told}


_NAMED = 3
"""Of those: names have 253 characters at most, and a message 1,024."""


def with_blocked_condition(raw: Object, blocked: Aspect, *, status: Object, now: datetime) -> Object:
    """The status as it is written with `blocked` as its condition Ready. An end is never written over. `raw`: the job as stored."""
    found = job_status.read_job_status({"status": status})
    if end_of_status(found) is not None:
        return status
    before, generation = job_status.read_job_status(raw).conditions, raw["metadata"].get("generation")
    aspects = conditions.of_job(blocked, suspended=conditions.kept(found.conditions, SUSPENDED))
    others = (conditions.kept(found.conditions, kind) for kind in conditions.WARNINGS)
    aspects += tuple(one for one in others if one is not None)
    update = conditions.status_update(before, aspects, now=now, generation=generation)
    update |= {"observed_generation": generation}
    return job_status.plain_status(found.model_copy(update=update))
