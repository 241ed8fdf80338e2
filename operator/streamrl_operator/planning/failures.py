"""What went wrong in a pod, and what its job's failurePolicy says to it.

Owns the names of failures (each has one for ever, so that it is counted once) and the ordered rules. A container that
ends with exit code 0 is no failure: the scheduler and the trainer idle at the end, a drained generator ends. Nor is a rank
that ends because one of another pod was lost: that one's end is the failure.
Counting is tally.py's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from streamrl.errors import EXIT_DONE, EXIT_RANK_LOST
from streamrl.names import CONTAINER_SCHEDULER
from streamrl.spec.training import FailurePolicy, FailureRule
from streamrl_operator.planning import pods
from streamrl_operator.planning.values import Object

Role = Literal["Generator", "Trainer", "Scheduler"]
Reason = Literal["Preempted", "Evicted", "NodeLost", "OOMKilled", "Deleted", "Error"]
Action = Literal["FailJob", "Restart", "ReplacePodAndIgnoreMaxRestarts"]

FAIL: Final = "FailJob"
RESTART: Final = "Restart"
REPLACE: Final = "ReplacePodAndIgnoreMaxRestarts"
NO_RULE = "default"
EXIT_USER_ERROR = 2
"""A container has been given something that a person must change."""

_DISRUPTIONS: dict[str, Reason] = {
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
    "EvictionByEvictionAPI": "Deleted",
    "TerminationByKubelet": "Evicted",
}
"""Reason of a pod's condition DisruptionTarget -> ours. The eviction API is how a node is drained."""
_POD_REASONS: dict[str, Reason] = {
    "Evicted": "Evicted",
    "Terminated": "Evicted",
    "NodeShutdown": "Evicted",
    "Preempting": "Preempted",
    "NodeLost": "NodeLost",
}
"""`status.reason` of a pod -> ours."""
_END_REASONS: dict[str, Reason] = {
    "OOMKilled": "OOMKilled",
    "Unknown": "NodeLost",
    "ContainerStatusUnknown": "NodeLost",
}
"""`reason` of a container's end -> ours; all else is an error. Unknown: the node went down under the container."""
_LOST: tuple[Reason, ...] = ("Preempted", "Evicted", "NodeLost", "Deleted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One container that ended with an error, or one pod that is lost."""

    id: str
    pod: str
    container: str
    """Empty: the pod as a whole."""
    role: Role
    reason: Reason
    exit_code: int | None
    text: str
    """What happened, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A failure, and what follows."""

    failure: Failure
    rule: str
    action: Action


def judge(failure: Failure, policy: FailurePolicy) -> Judged:
    """By the first rule that matches, or by the defaults that `failurePolicy.rules` describes."""
    for rule in policy.rules:
        if _matches(rule, failure):
            return Judged(failure=failure, rule=rule.name, action=rule.action)
    action: Action = RESTART
    if failure.exit_code == EXIT_USER_ERROR:
        action = FAIL
    elif failure.reason in _LOST:
        action = REPLACE
    return Judged(failure=failure, rule=NO_RULE, action=action)


def _matches(rule: FailureRule, failure: Failure) -> bool:
    return (
        rule.role in (None, failure.role)
        and (not rule.on_reasons or failure.reason in rule.on_reasons)
        and (not rule.on_exit_codes or failure.exit_code in rule.on_exit_codes)
    )


def of_pod(pod: Object) -> list[Failure]:
    """What went wrong in it, as far as it can still be seen. Of a pod that is lost its containers' ends are no news."""
    lost = _lost(pod)
    if lost is not None:
        return [lost]
    return list(of_containers(pod))


def pod_id(pod: Object) -> str:
    """Name of the failure that consists in the pod's loss."""
    return f"{pods.uid(pod)}/pod"


def _lost(pod: Object) -> Failure | None:
    reason, why = _why_lost(pod)
    if reason is None:
        return None
    return Failure(
        id=pod_id(pod),
        pod=pods.name(pod),
        container="",
        role="Generator" if pods.is_generator(pod) else "Trainer",
        reason=reason,
        exit_code=None,
        text=f"pod {pods.name(pod)} is lost ({reason}): {why}",
    )


def _why_lost(pod: Object) -> tuple[Reason | None, str]:
    status = pods.status(pod)
    disruption = pods.condition(pod, "DisruptionTarget")
    if disruption is not None and disruption.get("status") == "True":
        told = str(disruption.get("reason") or "")
        return _DISRUPTIONS.get(told, "Deleted"), str(disruption.get("message") or told)
    told = str(status.get("reason") or "")
    if told in _POD_REASONS:
        return _POD_REASONS[told], str(status.get("message") or told)
    if pods.is_leaving(pod):
        return "Deleted", "it was deleted"
    if status.get("phase") == "Failed":
        return "Error", str(status.get("message") or told or "its phase is Failed")
    return None, ""


def of_containers(pod: Object) -> Iterator[Failure]:
    """Containers of the pod that ended with an error: now, or the time before."""
    for container in pods.containers(pod):
        count, state = int(container.get("restartCount") or 0), container.get("state") or {}
        before = (container.get("lastState") or {}).get("terminated")
        if (
            before is not None
        ):  # a kubelet raises restartCount with the next start, not while the container waits for it
            yield from _ended(pod, container, before, life=count if "waiting" in state else count - 1)
        now = state.get("terminated")
        if now is not None:
            yield from _ended(pod, container, now, life=count)


def _ended(pod: Object, container: Mapping[str, Any], terminated: Mapping[str, Any], *, life: int) -> Iterator[Failure]:
    code = int(terminated.get("exitCode") or 0)
    if code in (EXIT_DONE, EXIT_RANK_LOST):
        return
    name = str(container.get("name"))
    yield Failure(
        id=f"{pods.uid(pod)}/{name}/{_life(terminated, life)}",
        pod=pods.name(pod),
        container=name,
        role=_role(pod, name),
        reason=_END_REASONS.get(str(terminated.get("reason")), "Error"),
        exit_code=code,
        text=f"container {name} of pod {pods.name(pod)} {pods.ending(terminated)}",
    )


def _life(terminated: Mapping[str, Any], life: int) -> str:
    """The runtime's id of that container, which never comes again; its number where the runtime has forgotten it."""
    runtime_id = str(terminated.get("containerID") or "").rpartition("/")[2]
    return runtime_id[:_ID_CHARACTERS] or str(life)


_ID_CHARACTERS = 12
"""Of 64: enough to tell the containers of one pod apart."""


def _role(pod: Object, container: str) -> Role:
    if pods.is_generator(pod):
        return "Generator"
    return "Scheduler" if container == CONTAINER_SCHEDULER else "Trainer"
