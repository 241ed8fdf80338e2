"""What went wrong in a pod, what its job's failurePolicy says to it, and how restarts are accounted for: each failure once.

Owns the names of failures (each has one for ever) and the ordered rules. A container that ends with exit code 0 is no failure: the scheduler
and the trainer idle at the end, a drained generator ends. Nor is a rank that ends because one of another pod was lost: that one's end is the
failure. Nor is that of a scheduler whose data has changed: it waits for it. Nor is the end of the container with the user's functions: the scheduler asks again, so often at most, and ends itself then.
Nor is a pod that goes because we want it so: above the wanted number, or of an older template in a rolling update.
What is counted already is in the status (`seenFailures`): the failures that can be seen now, and the last few that cannot any more.

A rule that replaces a pod has no limit but time: another pod forgets the kubelet's back-off, and one that fails at once wherever it runs
would be made again for ever without a pause. So a pod is replaced only if it has lived for a time that doubles with each restart that
was not counted; before that its container is started again in place, and waits as the kubelet lets it.

A StatefulSet replaces a pod that a kubelet rejected at once, as often as it happens. So after the second rejection new pods of the set get
a scheduling gate (`hold_sets`), for a time that doubles too. Pods that run are not touched. When the time is over the gated pods are deleted, and
their set makes them without.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from streamrl.errors import EXIT_DATA_CHANGED, EXIT_DONE, EXIT_RANK_LOST
from streamrl.names import CONTAINER_AGENTS, CONTAINER_SCHEDULER, CONTAINER_TASKS, OWN_CONTAINERS
from streamrl.spec.training import FailurePolicy, FailureRule
from streamrl.status import RLJobStatus, SetHold
from streamrl_operator.planning import pods
from streamrl_operator.planning.values import JobEvent, Object, seconds_since, stamp

Role = Literal["Generator", "Trainer", "Scheduler", "Agents"]
Reason = Literal["Preempted", "Evicted", "NodeLost", "Rejected", "OOMKilled", "Deleted", "Error"]
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
    "Shutdown": "Evicted",
    "Preempting": "Preempted",
    "NodeLost": "NodeLost",
}
"""`status.reason` of a pod -> ours."""
_REJECTIONS = ("OutOf", "UnexpectedAdmissionError", "NodeAffinity", "TopologyAffinityError")
"""How `status.reason` begins where a kubelet refuses to start a pod. It has more; all of them are of pods in which no container has run."""
_END_REASONS: dict[str, Reason] = {
    "OOMKilled": "OOMKilled",
    "Unknown": "NodeLost",
    "ContainerStatusUnknown": "NodeLost",
}
"""`reason` of a container's end -> ours; all else is an error. Unknown: the node went down under the container."""
_COUNTED = frozenset(OWN_CONTAINERS) - {CONTAINER_TASKS, CONTAINER_AGENTS}
_LOST: tuple[Reason, ...] = ("Preempted", "Evicted", "NodeLost", "Rejected", "Deleted")


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
class JudgedFailure:
    """A failure, and what follows."""

    failure: Failure
    rule: str
    action: Action


def judge(failure: Failure, policy: FailurePolicy) -> JudgedFailure:
    """By the first rule that matches, or by the defaults that `failurePolicy.rules` describes."""
    for rule in policy.rules:
        if _matches(rule, failure):
            return JudgedFailure(failure=failure, rule=rule.name, action=rule.action)
    action: Action = RESTART
    if failure.exit_code == EXIT_USER_ERROR:
        action = FAIL
    elif failure.reason in _LOST:
        action = REPLACE
    return JudgedFailure(failure=failure, rule=NO_RULE, action=action)


def _matches(rule: FailureRule, failure: Failure) -> bool:
    return (
        rule.role in (None, failure.role)
        and (not rule.on_reasons or failure.reason in rule.on_reasons)
        and (not rule.on_exit_codes or failure.exit_code in rule.on_exit_codes)
    )


def failures_of_pod(pod: Object) -> list[Failure]:
    """What went wrong in it, as far as it can still be seen. Of a pod that is lost its containers' ends are no news."""
    lost = _lost(pod)
    if lost is not None:
        return [lost]
    return list(failures_of_containers(pod))


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
        role=_role(pod),
        reason=reason,
        exit_code=None,
        text=f"pod {pods.name(pod)} is lost ({reason}): {why}",
    )


def _why_lost(pod: Object) -> tuple[Reason | None, str]:
    status = pods.status(pod)
    disruption = pods.condition(pod, "DisruptionTarget")
    if disruption is not None and disruption.get("status") == "True":
        reported = str(disruption.get("reason") or "")
        return _DISRUPTIONS.get(reported, "Deleted"), str(disruption.get("message") or reported)
    reported = str(status.get("reason") or "")
    if reported in _POD_REASONS:
        return _POD_REASONS[reported], str(status.get("message") or reported)
    if is_rejected(pod):
        return "Rejected", f"{reported}: {status['message']}" if status.get("message") else reported
    if pods.is_leaving(pod):
        return "Deleted", "it was deleted"
    if status.get("phase") == "Failed":
        return "Error", str(status.get("message") or reported or "its phase is Failed")
    return None, ""


def is_rejected(pod: Object) -> bool:
    """Check whether a kubelet refused to start it: it has failed, for a reason, without any container."""
    reason = str(pods.status(pod).get("reason") or "")
    has_failed = pods.status(pod).get("phase") == "Failed"
    return has_failed and (reason.startswith(_REJECTIONS) or (bool(reason) and not pods.has_run(pod)))


def failures_of_containers(pod: Object) -> Iterator[Failure]:
    """Containers of ours in the pod that ended with an error: now, or the time before. Those that a job adds follow no codes of ours."""
    for container in (one for one in pods.containers(pod) if one.get("name") in _COUNTED):
        count, state = int(container.get("restartCount") or 0), container.get("state") or {}
        before = (container.get("lastState") or {}).get("terminated")
        if before is not None:
            # A kubelet raises restartCount with the next start, not while the container waits for it.
            yield from _ended(pod, container, before, life=count if "waiting" in state else count - 1)
        now = state.get("terminated")
        if now is not None:
            yield from _ended(pod, container, now, life=count)


def _ended(pod: Object, container: Mapping[str, Any], terminated: Mapping[str, Any], *, life: int) -> Iterator[Failure]:
    code, name = int(terminated.get("exitCode") or 0), str(container.get("name"))
    waits_for_data = code == EXIT_DATA_CHANGED and name == CONTAINER_SCHEDULER
    if waits_for_data or code in (EXIT_DONE, EXIT_RANK_LOST):
        return
    yield Failure(
        id=f"{pods.uid(pod)}/{name}/{_life(terminated, life)}",
        pod=pods.name(pod),
        container=name,
        role=_role(pod, name),
        reason=_END_REASONS.get(str(terminated.get("reason")), "Error"),
        exit_code=code,
        text=f"container {name} of pod {pods.name(pod)} {pods.exit_text(terminated)}",
    )


def _life(terminated: Mapping[str, Any], life: int) -> str:
    """The runtime's id of that container, which never comes again; its number where the runtime has forgotten it."""
    runtime_id = str(terminated.get("containerID") or "").rpartition("/")[2]
    return runtime_id[:_ID_CHARACTERS] or str(life)


_ID_CHARACTERS = 12
"""Of 64: enough to tell the containers of one pod apart."""


def _role(pod: Object, container: str = "") -> Role:
    if pods.is_pooled(pod):
        return "Generator" if pods.is_generator(pod) else "Agents"
    return "Scheduler" if container == CONTAINER_SCHEDULER else "Trainer"


MOST_SEEN = 256
"""As the status has it."""
KEPT_UNSEEN = 32
"""Failures that are remembered although they cannot be seen any more."""
MOST_EVENTS = 8
"""In one reconcile; the rest is one more event."""
FIRST_LIFE_S, LONGEST_LIFE_S = 10.0, 300.0
"""Of a pod before a rule replaces it: as a kubelet's back-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartAccounting:
    """After all pods were seen."""

    restarts: int
    ignored: int
    seen: tuple[str, ...]
    new: tuple[JudgedFailure, ...] = ()
    """Counted now."""
    delete_pods: tuple[str, ...] = ()


def count_restarts(
    before: RLJobStatus,
    *,
    policy: FailurePolicy,
    all_pods: Sequence[Object],
    sets: Mapping[str, Object],
    desired: Mapping[str, int],
    now: datetime,
) -> RestartAccounting:
    """Count what is new. `desired`: StatefulSet -> pods that it should have."""
    known = set(before.seen_failures)
    ours = {pods.uid(pod): pod for pod in all_pods if _is_ours(pod, sets=sets, desired=desired)}
    found = [failure for pod in _ordered(all_pods) if pods.uid(pod) not in ours for failure in failures_of_pod(pod)]
    counted = [failure.id for failure in found if failure.id in known]
    fresh = [failure for failure in found if failure.id not in known][: MOST_SEEN - len(counted)]
    new = tuple(judge(failure, policy) for failure in fresh)
    young = {pods.name(pod) for pod in all_pods if _is_young(pod, ignored=before.ignored_restarts or 0, now=now)}
    gone = {judged.failure.pod for judged in new if _is_replaced(judged)} - young
    marked = [pod_id(pod) for pod in all_pods if pods.uid(pod) in ours or pods.name(pod) in gone]
    return RestartAccounting(
        restarts=(before.restarts or 0) + sum(judged.action == RESTART for judged in new),
        ignored=(before.ignored_restarts or 0) + sum(judged.action == REPLACE for judged in new),
        seen=_remembered(before.seen_failures, [*counted, *(failure.id for failure in fresh), *marked]),
        new=new,
        delete_pods=tuple(sorted(gone)),
    )


def _is_replaced(judged: JudgedFailure) -> bool:
    """Whether a rule wants another pod instead of a container that is started again in place."""
    return judged.action == REPLACE and judged.rule != NO_RULE and bool(judged.failure.container)


def _wait_s(times: int) -> float:
    """Return the wait before the next pod, after so many replacements without one."""
    return min(FIRST_LIFE_S * 2.0 ** min(times - 1, 16), LONGEST_LIFE_S) if times else 0.0


def _is_young(pod: Object, *, ignored: int, now: datetime) -> bool:
    """Whether no rule may replace it yet, after so many restarts that were not counted; the first is replaced at once."""
    least_s = _wait_s(ignored)
    age_s = seconds_since(pod["metadata"].get("creationTimestamp"), now=now)
    return age_s is not None and age_s < least_s


def hold_sets(
    before: RLJobStatus,
    *,
    new: Sequence[JudgedFailure],
    all_pods: Sequence[Object],
    desired: Mapping[str, int],
    now: datetime,
) -> tuple[SetHold, ...]:
    """Return the sets of which kubelets rejected pods, until all of their pods run; the first rejection has no wait. `desired`: as of `count_restarts`."""
    fresh = {judged.failure.id for judged in new}
    rejected = {pods.place(pod)[0] for pod in all_pods if is_rejected(pod) and pod_id(pod) in fresh}
    known = {hold.name: hold for hold in before.holds}
    run = Counter(pods.place(pod)[0] for pod in all_pods if pods.has_run(pod) and not pods.is_leaving(pod))
    waiting = held_sets(before, now=now)
    holds: list[SetHold] = []
    for name, replicas in desired.items():
        was = known.get(name)
        if was is not None and name in waiting:
            holds.append(was)
        elif name in rejected and replicas:
            count = 1 if was is None else was.rejections + 1
            wait_s = _wait_s(count - 1)
            holds.append(SetHold(name=name, rejections=count, until=stamp(now + timedelta(seconds=wait_s))))
        elif was is not None and run[name] < replicas:
            holds.append(was)
    return tuple(holds)


def held_sets(status: RLJobStatus, *, now: datetime) -> dict[str, float]:
    """Return each StatefulSet whose new pods wait now, and for how many seconds."""
    left = {hold.name: -(seconds_since(hold.until, now=now) or 0.0) for hold in status.holds}
    return {name: seconds for name, seconds in left.items() if seconds > 0}


def released_pods(all_pods: Sequence[Object], *, held: Collection[str]) -> tuple[str, ...]:
    """Return the names of the pods that wait for a time that is over; their set makes them again, without a gate."""
    gated = (pod for pod in all_pods if pods.is_gated(pod) and not pods.is_leaving(pod))
    return tuple(sorted(pods.name(pod) for pod in gated if pods.place(pod)[0] not in held))


def mark_as_seen(before: RLJobStatus, *, all_pods: Sequence[Object]) -> tuple[str, ...]:
    """Return `seenFailures` while nothing is counted: all that can be seen now, so that it is never counted later."""
    lost = [pod_id(pod) for pod in all_pods if _lost(pod) is not None]
    ended = [failure.id for pod in _ordered(all_pods) for failure in failures_of_containers(pod)]
    return _remembered(before.seen_failures, [*ended, *lost])


def failure_events(accounting: RestartAccounting, *, most_restarts: int) -> list[JobEvent]:
    """One for each failure that was counted now."""
    reported = [
        _event(judged, accounting=accounting, most_restarts=most_restarts) for judged in accounting.new[:MOST_EVENTS]
    ]
    if rest := len(accounting.new) - len(reported):
        reported.append(JobEvent(kind="Warning", reason="PodFailed", message=f"and {rest} more failures of pods"))
    return reported


def _event(judged: JudgedFailure, *, accounting: RestartAccounting, most_restarts: int) -> JobEvent:
    counts = f"restarts that count: {accounting.restarts} of {most_restarts}"
    is_clean = _is_replaced(judged) and judged.failure.pod not in accounting.delete_pods
    left = "; its pod is new and stays: the container is started again in place" if is_clean else ""
    message = f"{judged.failure.text}; rule {judged.rule}: {judged.action}; {counts}{left}"
    reason = pods.REJECTED if judged.failure.reason == "Rejected" else "PodFailed"
    return JobEvent(kind="Normal" if judged.action == REPLACE else "Warning", reason=reason, message=message)


def _ordered(all_pods: Sequence[Object]) -> list[Object]:
    """The trainer's first: where there are more failures than can be remembered, its count."""
    return sorted(all_pods, key=lambda pod: (not pods.is_trainer(pod), not pods.trains(pod), pods.place(pod)))


def _is_ours(pod: Object, *, sets: Mapping[str, Object], desired: Mapping[str, int]) -> bool:
    if not pods.is_leaving(pod):
        return False
    owner, ordinal = pods.place(pod)
    if pods.is_gated(pod) or ordinal >= desired.get(owner, 0):
        return True
    found = sets.get(owner) or {}
    told, generation = found.get("status") or {}, (found.get("metadata") or {}).get("generation")
    seen, newest, made_from = (
        told.get("observedGeneration"),
        told.get("updateRevision"),
        pods.label(pod, pods.LABEL_REVISION),
    )
    if isinstance(generation, int) and isinstance(seen, int) and seen < generation:
        return True  # its controller deletes pods first and tells of our last change of the template after
    return bool(newest and made_from and newest != made_from)


def _remembered(before: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """At most `MOST_SEEN`: first what can be seen and is known, then what is new, then what cannot be seen any more.

    The order stays, so that nothing is written while nothing is new.
    """
    now, known = dict.fromkeys(visible), set(before)
    unseen = [one for one in before if one not in now]
    kept = len(before) - len(unseen)
    new = [one for one in now if one not in known][: MOST_SEEN - kept]
    room = min(KEPT_UNSEEN, MOST_SEEN - kept - len(new))
    dropped = set(unseen[: max(len(unseen) - room, 0)])
    return (*(one for one in before if one not in dropped), *new)
