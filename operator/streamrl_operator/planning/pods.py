"""What a pod says of itself: whose it is, whether it is ready, what it waits for.

Owns the reading of a Pod's status. Texts are made so that they stay the same while nothing happens: a kubelet's own words
change with every back-off.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl import names
from streamrl.errors import EXIT_DATA_CHANGED
from streamrl.names import (
    AGENTS,
    CONTAINER_PREPARE,
    CONTAINER_SCHEDULER,
    LABEL_CLUSTER,
    LABEL_JOB,
    LABEL_POOL,
    LABEL_ROLE,
)
from streamrl_operator.planning.values import Object, Observed, seconds_since

ROLE_TRAINER, ROLE_TRAINER_WORKER, ROLE_GENERATOR, ROLE_AGENTS = "trainer", "trainer-worker", "generator", AGENTS
LABEL_REVISION = "controller-revision-hash"
"""Of a StatefulSet's pods: the template that they were made from."""
REJECTED = "PodRejected"
"""Reason of a condition and of an event."""
_BEGINNING = ("", "ContainerCreating", "PodInitializing")
"""Waiting reasons of a container that will start soon."""
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff")
"""The kubelet alternates between the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingReason:
    """Why a pod is not ready: a reason in one CamelCase word, and a line for people."""

    reason: str
    message: str


def name(pod: Object) -> str:
    """Its name."""
    return str(pod["metadata"]["name"])


def uid(pod: Object) -> str:
    """Its identity; a pod made again by the same name has another one."""
    return str(pod["metadata"].get("uid") or name(pod))


def label(pod: Object, key: str) -> str:
    """A label's value; empty if it has none."""
    return str((pod["metadata"].get("labels") or {}).get(key, ""))


def cluster_of(obj: Object) -> str:
    """The member cluster that an object is in; empty: home."""
    return label(obj, LABEL_CLUSTER)


def is_generator(pod: Object) -> bool:
    """Whether it is a generator."""
    return label(pod, LABEL_ROLE) == ROLE_GENERATOR


def is_pooled(pod: Object) -> bool:
    """Whether it is one of a pool: what it does is done again by others."""
    return label(pod, LABEL_ROLE) in (ROLE_GENERATOR, ROLE_AGENTS)


def is_of_pool(pod: Object, pool: str) -> bool:
    """Whether it is one of a pool's pods, whatever they do: a job has no two pools of one name."""
    return label(pod, LABEL_POOL) == pool


def is_trainer(pod: Object) -> bool:
    """Whether the trainer's first ranks and the scheduler run in it."""
    return label(pod, LABEL_ROLE) == ROLE_TRAINER


def trains(pod: Object) -> bool:
    """Whether ranks of the trainer run in it: the first pod, or one of a further node."""
    return label(pod, LABEL_ROLE) in (ROLE_TRAINER, ROLE_TRAINER_WORKER)


def is_foreign(pod: Object) -> bool:
    """Whether it only has the job's label: no StatefulSet of the job has made it. One that was orphaned still is the job's."""
    job, (made_by, _, ordinal) = label(pod, LABEL_JOB), name(pod).rpartition("-")
    if made_by not in (names.trainer(job), names.trainer_workers(job), names.pool(job, label(pod, LABEL_POOL))):
        return True
    owners = pod["metadata"].get("ownerReferences") or ()
    is_made_otherwise = any(owner.get("controller") and owner.get("kind") != "StatefulSet" for owner in owners)
    return is_made_otherwise or not ordinal.isdigit()


def is_leaving(pod: Object) -> bool:
    """Whether it is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def place(pod: Object) -> tuple[str, int]:
    """(StatefulSet, ordinal) by its name; ordinal 0 if the name has none."""
    owner, _, ordinal = name(pod).rpartition("-")
    return (owner, int(ordinal)) if ordinal.isdigit() else (name(pod), 0)


def asked(stateful_set: Object | None) -> int:
    """Pods that a StatefulSet is asked for; none if it is not there."""
    return 0 if stateful_set is None else int((stateful_set.get("spec") or {}).get("replicas") or 0)


def status(pod: Object) -> Mapping[str, Any]:
    """Its status; empty if there is none yet."""
    return pod.get("status") or {}


def condition(pod: Object, kind: str) -> Mapping[str, Any] | None:
    """The condition of that type."""
    return next((one for one in status(pod).get("conditions") or () if one.get("type") == kind), None)


def is_ready(pod: Object) -> bool:
    """Whether it is ready and stays."""
    ready = condition(pod, "Ready")
    return not is_leaving(pod) and ready is not None and ready.get("status") == "True"


def trainer_ready_times(found: Sequence[Object]) -> list[str]:
    """When pods with ranks became ready, or last were no more; without those that do not say."""
    said = [condition(pod, "Ready") or {} for pod in found if trains(pod)]
    return [str(one["lastTransitionTime"]) for one in said if one.get("lastTransitionTime")]


def containers(pod: Object) -> Iterator[Mapping[str, Any]]:
    """The status of each container, in the order of their start."""
    yield from status(pod).get("initContainerStatuses") or ()
    yield from status(pod).get("containerStatuses") or ()


def has_run(pod: Object) -> bool:
    """Check whether any of its containers has started."""
    states = (one.get(life) or {} for one in containers(pod) for life in ("state", "lastState"))
    return any(state.get(kind) is not None for state in states for kind in ("running", "terminated"))


def lacks_sandbox(pod: Object) -> bool:
    """Check whether its node has not mounted its volumes yet, or has no network for it: no container can start."""
    sandbox = condition(pod, "PodReadyToStartContainers")
    is_made = sandbox is None or sandbox.get("status") != "False"
    return not is_made and status(pod).get("phase") == "Pending" and not is_leaving(pod) and not has_run(pod)


def is_gated(pod: Object) -> bool:
    """Check whether it was made to wait, since pods before it were rejected."""
    return any(gate.get("name") == names.GATE for gate in (pod.get("spec") or {}).get("schedulingGates") or ())


def last_word(pod: Object) -> Mapping[str, Any] | None:
    """The status that the scheduler left in its termination message when the run had ended; None: it has not, or says so otherwise.

    Its container ends once for that, and is then started again. It says the same in each life, so it may have ended by whatever.
    """
    for container in containers(pod) if is_trainer(pod) else ():
        if container.get("name") != CONTAINER_SCHEDULER:
            continue
        for life in ("state", "lastState"):
            ended = (container.get(life) or {}).get("terminated") or {}
            if (page := _parsed(ended.get("message"))) is not None:
                return page
    return None


def changed_data(pod: Object) -> str:
    """Return why the scheduler waits for its data, from its end until it is ready again; empty if it does not."""
    for container in containers(pod) if is_trainer(pod) else ():
        state = container.get("state") or {}
        ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
        waits = not container.get("ready") and ended.get("exitCode") == EXIT_DATA_CHANGED
        if container.get("name") == CONTAINER_SCHEDULER and waits:
            return str(ended.get("message") or "the data has changed").strip()
    return ""


def _parsed(text: object) -> Mapping[str, Any] | None:
    """A status with a result; None where a text is none."""
    try:
        page = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return page if isinstance(page, dict) and isinstance(page.get("result"), dict) else None


def waiting_reason(pod: Object) -> WaitingReason | None:
    """What it waits for; None: it is ready."""
    if is_ready(pod):
        return None
    if is_leaving(pod):
        return WaitingReason(reason="Terminating", message=f"pod {name(pod)} is ending")
    return _node(pod) or _trouble(pod) or _beginning(pod)


def first_waiting_reason(pods: Sequence[Object]) -> WaitingReason | None:
    """Of the first pod, by name, that is not ready."""
    ordered = sorted(pods, key=place)
    return next((what for pod in ordered if (what := waiting_reason(pod)) is not None), None)


def _node(pod: Object) -> WaitingReason | None:
    if is_gated(pod):
        message = f"pod {name(pod)} waits: kubelets rejected pods before it (status.holds says until when)"
        return WaitingReason(reason=REJECTED, message=message)
    scheduled = condition(pod, "PodScheduled")
    if scheduled is not None and scheduled.get("status") == "False":
        reason = str(scheduled.get("reason") or "Unschedulable")
        return WaitingReason(
            reason=reason, message=f"pod {name(pod)} has no node: {scheduled.get('message') or reason}"
        )
    if status(pod).get("phase") == "Failed":
        ends = ((container.get("state") or {}).get("terminated") for container in containers(pod))
        exits = next((f"its container {exit_text(end)}" for end in ends if end), "no reason is given")
        reported = status(pod).get("message") or status(pod).get("reason") or exits
        return WaitingReason(reason="PodFailed", message=f"pod {name(pod)} has failed: {reported}")
    return None


def _trouble(pod: Object) -> WaitingReason | None:
    for container in containers(pod):
        waiting = (container.get("state") or {}).get("waiting")
        reason = str(waiting.get("reason") or "") if waiting else ""
        if reason in _BEGINNING:
            continue
        of = f"container {container.get('name')} of pod {name(pod)}"
        if reason == "CrashLoopBackOff":
            return WaitingReason(
                reason=reason, message=f"{of} {exit_text((container.get('lastState') or {}).get('terminated'))}"
            )
        if reason in _NO_IMAGE:
            why = f"{of}: image {container.get('image')} cannot be pulled; kubectl describe pod {name(pod)} says why"
            return WaitingReason(reason="ImagePullBackOff", message=why)
        return WaitingReason(reason=reason, message=f"{of}: {(waiting or {}).get('message') or reason}")
    return None


def exit_text(terminated: Mapping[str, Any] | None) -> str:
    """How a container ended, with its last lines."""
    if terminated is None:
        return "has ended"
    text = f"ended with exit code {terminated.get('exitCode')} ({terminated.get('reason') or 'Error'})"
    last_lines = str(terminated.get("message") or "").strip()[-_LAST_CHARACTERS:]
    return f"{text}: {last_lines}" if last_lines else text


_LAST_CHARACTERS = 600
"""Of a container's last lines: they fit into a condition and an event (1,024 characters) with the words before them."""


def _beginning(pod: Object) -> WaitingReason:
    for container in containers(pod):
        state = container.get("state") or {}
        if container.get("name") == CONTAINER_PREPARE and "running" in state:
            return WaitingReason(
                reason="Preparing", message=f"pod {name(pod)} makes the model ready (container prepare)"
            )
        ended = state.get("terminated")
        if ended and (ended.get("exitCode") or 0) != 0:
            return WaitingReason(
                reason="Restarting", message=f"container {container.get('name')} of pod {name(pod)} {exit_text(ended)}"
            )
    if lacks_sandbox(pod):
        why = f"pod {name(pod)} waits for its volumes or its network; kubectl describe pod {name(pod)} says for which"
        return WaitingReason(reason="Starting", message=why)
    waiting = [one.get("name") for one in containers(pod) if "waiting" in (one.get("state") or {})]
    if waiting:
        return WaitingReason(reason="Starting", message=f"pod {name(pod)} starts container {waiting[0]}")
    if condition(pod, "PodScheduled") is None:
        return WaitingReason(reason="Starting", message=f"pod {name(pod)} waits for a node")
    return WaitingReason(reason="Starting", message=f"pod {name(pod)} runs and is not ready yet")


PATIENCE_S = 30.0
"""A StatefulSet makes its pods within a second or two; then something will not have them."""
_CAUSES = "usual are a quota, a LimitRange, a priority or runtime class that is not there"


def missing_pods_advice(stateful_set: str, *, observed: Observed, pods: int, since: Sequence[str | None]) -> str:
    """What to do about missing pods, to follow a text; empty while they may still come, or are not asked for yet.

    Args:
        stateful_set: its name.
        observed: it as it is, and the time.
        pods: that it should have.
        since: times of what the pods may have waited for, of which the last counts; None: for that they wait still.
    """
    waited_s = [seconds_since(each, now=observed.now) for each in since]
    if asked(observed.sets.get(stateful_set)) < pods or any(each is None or each < PATIENCE_S for each in waited_s):
        return ""
    return f"; kubectl describe statefulset {stateful_set} says why ({_CAUSES})"
