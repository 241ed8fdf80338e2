"""The conditions of a job and of a pool (`CONDITIONS`), and the reasons that they and events give (`REASONS`).

A job has the first six from the first visit, TrainInferLogprobDiffHigh from the first page of numbers that speaks of it, ProcessFrozen from the first page with such a warning, CostAboveMax where it has `maxCost`, SpecWarnings from the first warning about its fields, AdmissionWarning from the first warning of the API server, ClusterUnreachable where it is in a member cluster. Succeeded and Failed are its memory: once one is True the job has ended.
A transition time moves only when the condition's status does. `docs/reference/reasons.md` is generated from both tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from streamrl.status import Condition
from streamrl_operator.planning.values import JobEvent, stamp

READY, SUSPENDED, SUCCEEDED, FAILED = "Ready", "Suspended", "Succeeded", "Failed"
RECONCILING, STALLED = "Reconciling", "Stalled"
"""Names that kstatus gives: GitOps tools read them of every kind."""
RUNNING = "Running"
LOGPROB_DIFF_HIGH = "TrainInferLogprobDiffHigh"
"""A warning of the scheduler's page by the same name."""
PROCESS_FROZEN = "ProcessFrozen"
"""The same."""
COST_ABOVE_MAX = "CostAboveMax"
ADMISSION_WARNING = "AdmissionWarning"
CLUSTER_UNREACHABLE = "ClusterUnreachable"
"""A condition, and its reason."""
SPEC_WARNINGS = "SpecWarnings"
WARNINGS = (LOGPROB_DIFF_HIGH, PROCESS_FROZEN, COST_ABOVE_MAX, SPEC_WARNINGS, ADMISSION_WARNING, CLUSTER_UNREACHABLE)
"""What is said beside the state of a job, in this order."""
CONDITIONS = {
    READY: "The trainer and at least one generator (where the job has pools) are ready, and the scheduler's status can be read; or all steps are done. Otherwise the reason says what is awaited.",
    SUSPENDED: "`suspend` is set, `maxCost` is reached or the queue does not admit the job, and no pod is left.",
    SUCCEEDED: "All steps are done; the status has step, reward and `checkpointPath`.",
    FAILED: "The job cannot go on; the message has the error, rule or limit.",
    RECONCILING: "The job has not ended, is not suspended by its owner or its cost, and nothing of it waits for a person: for GitOps tools it is in progress.",
    STALLED: "The job has failed, or only a change by a person lets it go on: for GitOps tools it has failed.",
    LOGPROB_DIFF_HIGH: "A warning: the generators' log-probs are too far from the trainer's.",
    PROCESS_FROZEN: "A warning: a process within a container shows no sign of life; the message names it, and when it is killed and started again.",
    COST_ABOVE_MAX: "A warning: the job has cost more than `maxCost.amount`.",
    SPEC_WARNINGS: "A warning: fields of the job do not go together, though it may start; the message has each.",
    ADMISSION_WARNING: "A warning: the API server takes the job's objects and warns of them, of Pod Security for example; the message has its words.",
    CLUSTER_UNREACHABLE: "A warning: nothing newer is known of a member cluster that the job is in; its pools there have Ready Unknown.",
}
"""Condition of a job -> when it is True."""
REASONS = {
    "AboveBound": "The train-infer log-prob difference is above `trainer.trainInferLogprobDiff`; the message says what to do.",
    "AboveMaxCost": "The job has cost more than `maxCost.amount`; the message says what follows.",
    "AgentsPending": "No agent host is ready yet, so no prompt is made.",
    "AllReady": "All pods of the pool are ready.",
    "AllAlive": "Each process that a container of the job watches shows signs of life.",
    "AdmissionWarnings": "The API server warns of objects of the job.",
    "Authorized": "The operator has all rights that it needs in the member cluster.",
    "ClusterNotAllowed": "A pool or the trainer names a member cluster, or an object there, that jobs of this namespace may not use.",
    "ClusterPending": "A job that starts waits for a member cluster to have its part; no pod is made before.",
    "ClusterRefused": "A member cluster refuses an object of the job; the message has its words.",
    "ClusterUnreachable": "Nothing newer is known of a member cluster; its pods may well run.",
    "ClustersReachable": "All member clusters of the job answer.",
    "Completed": "All steps are done.",
    "Connected": "The member cluster answers.",
    "Connecting": "The member cluster was not reached yet.",
    "CrashLoopBackOff": "A container ends again and again; the kubelet waits before the next start.",
    "DeadlineExceeded": "`activeDeadlineSeconds` is over.",
    "DataChanged": "The data is not what the journal was written with; the message says what changed. The scheduler looks again at each start of its container.",
    "Deleting": "The job is being deleted.",
    "Evicted": "Kueue took the quota back; the job waits in its queue again.",
    "ExposurePending": "The address by which generators of another cluster reach the scheduler is not known yet.",
    "Failed": "The job has failed; the message has the reason.",
    "FailurePolicy": "A rule of `failurePolicy` fails the job.",
    "GeneratorsPending": "No generator is ready yet.",
    "ImagePullBackOff": "An image cannot be pulled.",
    "InProgress": "The job has not ended.",
    "Internal": "An error of the operator's own; its log has it.",
    "InvalidDefaults": "What the job would inherit has a mistake, or does not go with it; the message names the object. Jobs that have begun are as they were.",
    "InvalidSpec": "The specification has a mistake; what runs stays.",
    "KubeconfigRefused": "The member's kubeconfig is missing, is none, or would start programs or read files.",
    "KueueMissing": "The job has a queue, and the operator knows no Kueue.",
    "NameTaken": "An object of a name that the job needs belongs to somebody else.",
    "NoAdmissionWarnings": "The API server warns of no object of the job any more.",
    "NoGenerators": "No pool is asked for any generator.",
    "NoPodsWanted": "The pool is asked for no pods.",
    "NoWarnings": "All fields of the job go together, as far as the operator knows.",
    "NoSignOfLife": "A process within a container is stopped, or blocked, for a third of the bound after which it is killed; the message names it.",
    "NotAsked": "The member cluster was not asked yet what the operator may do there.",
    "NotSuspended": "The job is not suspended.",
    "NumbersUnreachable": "The scheduler is ready and its numbers cannot be read.",
    "ObjectMissing": "Pods of the job name a ConfigMap, Secret or claim that is not there; no pod is made before it is.",
    "PodFailed": "A pod or one of its containers has failed.",
    "PodRejected": "A node's kubelet rejected a pod before a container started. It does not count as a restart; new pods of its StatefulSet wait, up to five minutes.",
    "Preparing": "The model is made ready.",
    "Queued": "The job waits in its queue; the message says for what.",
    "Refused": "The API server refuses an object of the job.",
    "Restarting": "A container has ended with an error and is started again.",
    "Resumed": "The job goes on after a suspension.",
    "RightsMissing": "The operator lacks a right in the member cluster; the message has the first.",
    "RunFailed": "The run has ended with an error.",
    "Running": "The trainer and at least one generator are ready; without pools, the trainer.",
    "Scaled": "A pool has another number of replicas.",
    "ServerError": "The API server fails time after time.",
    "StartDeadlineExceeded": "The job held nodes for `startDeadlineSeconds` while a pod could not start. It has no pods for as long; the message says why.",
    "Started": "The first pods are made.",
    "Starting": "A pod starts.",
    "Succeeded": "The job has succeeded.",
    "Suspended": "The job is suspended and has no pods.",
    "Suspending": "The job is suspended and its pods end.",
    "Terminating": "A pod ends.",
    "TooManyRestarts": "More restarts than `failurePolicy.maxRestarts`.",
    "TrainerPending": "A StatefulSet of the trainer has not made its pods yet.",
    "Unauthorized": "The member cluster does not know the operator's credentials.",
    "Unreachable": "The member cluster does not answer.",
    "Unschedulable": "A pod finds no node.",
    "UserError": "A container was given something that a person must change.",
    "WithinMaxCost": "The job has cost no more than `maxCost.amount`.",
    "WarningsFound": "Fields of the job do not go together.",
    "WithinBound": "The train-infer log-prob difference is within `trainer.trainInferLogprobDiff`.",
}
"""Reason of a condition or an event -> what it says. A container's or a scheduler's own reason is given as Kubernetes words it."""
_STALLED_REASONS = ("ClusterNotAllowed", "DataChanged", "InvalidDefaults", "InvalidSpec", "NameTaken")
"""Reasons of Ready that only a person clears."""
LONGEST_MESSAGE = 1024
"""Characters, of a condition and of an event; an API server takes no more in an event, and people read less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aspect:
    """What is to be said of one aspect."""

    type: str
    holds: bool | None
    """None: nobody can know."""
    reason: str
    message: str = ""


def renewed(
    before: Sequence[Condition], aspects: Sequence[Aspect], *, now: datetime, generation: int | None
) -> tuple[Condition, ...]:
    """The conditions by `aspects`, in their order; times are kept where nothing flips."""
    return tuple(_renewed(find(before, aspect.type), aspect, now=now, generation=generation) for aspect in aspects)


def _renewed(was: Condition | None, aspect: Aspect, *, now: datetime, generation: int | None) -> Condition:
    status: Literal["True", "False", "Unknown"] = "Unknown"
    if aspect.holds is not None:
        status = "True" if aspect.holds else "False"
    return Condition(
        type=aspect.type,
        status=status,
        observed_generation=generation,
        last_transition_time=was.last_transition_time if was is not None and was.status == status else stamp(now),
        reason=aspect.reason,
        message=aspect.message[:LONGEST_MESSAGE],
    )


def find(conditions: Sequence[Condition], kind: str) -> Condition | None:
    """The condition of that type."""
    return next((condition for condition in conditions if condition.type == kind), None)


def false_since(conditions: Sequence[Condition], kind: str) -> str | None:
    """Since when it is False; None: it is not."""
    condition = find(conditions, kind)
    return None if condition is None or condition.status == "True" else condition.last_transition_time


def of_job(ready: Aspect, *, suspended: Aspect | None = None) -> tuple[Aspect, ...]:
    """All aspects of a job that has not ended."""
    return (
        ready,
        suspended or Aspect(type=SUSPENDED, holds=False, reason="NotSuspended"),
        Aspect(type=SUCCEEDED, holds=False, reason="InProgress"),
        Aspect(type=FAILED, holds=False, reason="InProgress"),
    )


def status_update(
    before: Sequence[Condition], aspects: Sequence[Aspect], *, now: datetime, generation: int | None
) -> dict[str, Any]:
    """Return the fields of a job's status that its aspects give: `conditions` and `state`."""
    whole = (*aspects, *_progress({one.type: one for one in aspects}))
    return {
        "conditions": renewed(before, whole, now=now, generation=generation),
        "state": state({one.type: (bool(one.holds), one.reason) for one in aspects}),
    }


def _progress(found: Mapping[str, Aspect]) -> tuple[Aspect, Aspect]:
    """Return Reconciling and Stalled. kstatus calls a job with the first InProgress, with the second Failed, else Current if it is Ready."""
    ready, suspended = found[READY], found[SUSPENDED]
    why = found[FAILED] if found[FAILED].holds else ready
    is_stalled = bool(found[FAILED].holds) or ready.reason in _STALLED_REASONS
    is_halted = bool(suspended.holds) and suspended.reason == SUSPENDED
    is_reconciling = not (found[SUCCEEDED].holds or is_stalled or is_halted)
    held = ((RECONCILING, is_reconciling), (STALLED, is_stalled))
    reconciling, stalled = (
        Aspect(type=kind, holds=holds, reason=why.reason, message=why.message if holds else "") for kind, holds in held
    )
    return reconciling, stalled


def state(found: Mapping[str, tuple[bool, str]]) -> str:
    """Return how a job is, in one word; empty if no operator has looked at it. `found`: condition -> whether it holds, and its reason."""
    absent = (False, "")
    for end in (SUCCEEDED, FAILED):
        if found.get(end, absent)[0]:
            return end
    is_suspended, why = found.get(SUSPENDED, absent)
    if is_suspended:
        return why  # by its owner, its cost, or its queue
    is_ready, why = found.get(READY, absent)
    return RUNNING if is_ready else why


_HOLDS = {"True": True, "False": False, "Unknown": None}


def kept(before: Sequence[Condition], kind: str) -> Aspect | None:
    """What was said of an aspect; None if nothing was."""
    condition = find(before, kind)
    if condition is None:
        return None
    return Aspect(type=kind, holds=_HOLDS[condition.status], reason=condition.reason, message=condition.message)


def admission_warning(before: Sequence[Condition], warnings: Sequence[str] | None) -> Aspect | None:
    """What the API server warned of when the job started last; None: of nothing, ever. `warnings`: as of `Observed`."""
    was = kept(before, ADMISSION_WARNING)
    if warnings is None or (not warnings and was is None):
        return was
    reason = "AdmissionWarnings" if warnings else "NoAdmissionWarnings"
    return Aspect(type=ADMISSION_WARNING, holds=bool(warnings), reason=reason, message="; ".join(warnings))


def warning(reason: str, message: str) -> JobEvent:
    """As long as an event may be."""
    return JobEvent(kind="Warning", reason=reason, message=message[:LONGEST_MESSAGE])
