"""Kueue: whether a job may have its pods, how many, and where. Its Workloads, and what is written into their status.

    label kueue.x-k8s.io/queue-name ──▶ Workload rljob-<job>             the gang: all nodes of the trainer, the fewest generators of each pool
                                        Workload rljob-<job>.<pool>.<n>  one generator more; each is admitted by itself
    no Workload, or waiting in the queue ─▶ no pods      admitted ─▶ the job runs, with no more pods than are admitted
    evicted ─▶ no pods; when the last is gone, the quota is given back and the Workload waits again
    the job has ended ─▶ Finished, when the last pod is gone      suspended by its owner ─▶ no Workload, when the last pod is gone

Kueue decides by Workloads alone, whoever made them. It evicts by a condition; the quota is its own again when we take the admission away.
A Workload cannot change while it holds quota. So it is planned from the job while it holds none, and kept as it is while it does.
Where the job's pods are to have other resources than it was admitted with, they end as in a suspension, and the job queues anew.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from streamrl import names
from streamrl_operator.planning import compare, job_status, pods
from streamrl_operator.planning.gang import pool_sizes
from streamrl_operator.planning.objects import pod_templates
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.replicas import MOST_REPLICAS
from streamrl_operator.planning.values import (
    DesiredRun,
    JobDecision,
    Object,
    Observed,
    PlanningSettings,
    PodPlacement,
    WantedWorkload,
    stamp,
)

QUEUED, EVICTED, KUEUE_MISSING = "Queued", "Evicted", "KueueMissing"
"""Why a job with a queue has no pods."""
_PREEMPTED = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which Kueue looks at the Workload again at once."""
_TRAINER, _TRAINER_WORKERS = "trainer", "trainer-workers"
"""Pod sets beside the pools, which have their names. A StatefulSet is called after the job and the pod set."""
_PLACEMENT = TypeAdapter(PodPlacement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Why the job has no pods although it should run."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class _Workload:
    """One Workload as Kueue sees it."""

    raw: Object

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def status(self) -> Mapping[str, Any]:
        return self.raw.get("status") or {}

    @property
    def conditions(self) -> Sequence[Mapping[str, Any]]:
        return self.status.get("conditions") or ()

    def condition(self, kind: str) -> Mapping[str, Any]:
        return next((one for one in self.conditions if one.get("type") == kind), {})

    def holds(self, kind: str) -> bool:
        return self.condition(kind).get("status") == "True"

    @property
    def is_reserved(self) -> bool:
        """Whether it holds quota: then it cannot change."""
        return self.holds("QuotaReserved")

    @property
    def reserved_at(self) -> str:
        """Tells its admissions apart."""
        return str(self.condition("QuotaReserved").get("lastTransitionTime") or "")

    @property
    def is_admitted(self) -> bool:
        """Whether its pods may be there."""
        return self.holds("Admitted") and not (
            self.holds("Evicted") or self.holds("Finished") or pods.is_leaving(self.raw)
        )

    @property
    def assignments(self) -> Mapping[str, Mapping[str, Any]]:
        """By pod set."""
        admission = self.status.get("admission") or {}
        return {str(one["name"]): one for one in admission.get("podSetAssignments") or ()}


def _base(observed: Observed) -> _Workload | None:
    found = observed.workloads.get(names.workload(observed.name))
    return None if found is None else _Workload(found)


def _more(observed: Observed, pool: str) -> dict[int, _Workload]:
    """Workloads of replicas beyond the gang, by number; those that are admitted first."""
    found = {
        number: _Workload(observed.workloads[name])
        for name in observed.workloads
        if (number := _number(name)) is not None and name == names.workload(observed.name, pool=pool, number=number)
    }
    return dict(sorted(found.items(), key=lambda item: (not item[1].is_admitted, item[0])))


def _number(name: str) -> int | None:
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else None


def queue(observed: Observed) -> str:
    """Name of the LocalQueue; empty = none. Of a job that holds quota it is the one that gave it."""
    base = _base(observed)
    if base is not None and base.is_reserved:
        return str(base.raw["spec"].get("queueName") or "")
    return str((observed.metadata.get("labels") or {}).get(names.LABEL_QUEUE) or "")


def held(observed: Observed, *, settings: PlanningSettings) -> Held | None:
    """Why a job that should run must have no pods; None: it may."""
    name, base = queue(observed), _base(observed)
    if not name:
        return None
    if not observed.kueue:
        fix = "install Kueue and set kueue.enabled of the chart, or take the label away"
        message = f"the label {names.LABEL_QUEUE} names the queue {name}, and this operator knows no Kueue: {fix}"
        return Held(reason=KUEUE_MISSING, message=message)
    lacking = [f"{kind} {one}" for kind, one in lookups(observed) if (kind, one) not in observed.looked_up]
    if lacking:
        return Held(reason=QUEUED, message=f"queue {name}: {lacking[0]} is not there")
    if base is not None and _is_outdated(observed, base, settings=settings):
        return Held(reason=QUEUED, message=f"queues anew in {name}: its pools or their resources have changed")
    if base is None or base.is_admitted:
        return Held(reason=QUEUED, message=f"waits in queue {name}") if base is None else None
    evicted = base.condition("Evicted")
    why = base.condition("QuotaReserved").get("message") or "Kueue has not looked at it yet"
    if evicted.get("status") == "True":
        was = f"{evicted.get('reason')}, {evicted.get('message')}"
        return Held(reason=EVICTED, message=f"queue {name} took the quota back ({was})")
    return Held(reason=QUEUED, message=f"waits in queue {name}: {why}")


def admitted(observed: Observed) -> Mapping[str, int] | None:
    """Pool -> generators that are admitted; None: the job is in no queue."""
    base = _base(observed)
    if not queue(observed):
        return None
    if base is None or not base.is_admitted:
        return dict.fromkeys(observed.pools, 0)
    pools = base.assignments.keys() - {_TRAINER, _TRAINER_WORKERS}
    return {
        pool: _gang_count(base, pool) + sum(one.is_admitted for one in _more(observed, pool).values()) for pool in pools
    }


def _gang_count(base: _Workload, pod_set: str) -> int:
    assigned = base.assignments.get(pod_set)
    return 0 if assigned is None else int(assigned.get("count") or 0)


def lookups(observed: Observed) -> list[tuple[str, str]]:
    """(kind, name) of what has no namespace and must be known now: flavours of a new admission, else the priority of a Workload to come."""
    if not queue(observed) or not observed.kueue:
        return []
    base = _base(observed)
    if base is not None and base.is_admitted:
        kept = _kept_placements(observed, base)
        new = (assigned for name, assigned in base.assignments.items() if name not in kept)
        flavors = {str(one) for each in new for one in (each.get("flavors") or {}).values()}
        return [("ResourceFlavor", one) for one in sorted(flavors)]
    if base is not None and base.is_reserved:
        return []
    named = _priority_class(observed)
    return [] if named is None else [named]


def _priority_class(observed: Observed) -> tuple[str, str] | None:
    """As Kueue takes it: the label's class, else that of the first pods."""
    label = (observed.metadata.get("labels") or {}).get(names.LABEL_QUEUE_PRIORITY)
    if label:
        return "WorkloadPriorityClass", str(label)
    given = None if observed.job is None else observed.job.spec.trainer.pod.priority_class_name
    return None if given is None else ("PriorityClass", given)


def with_queue(observed: Observed, decision: JobDecision, *, settings: PlanningSettings) -> JobDecision:
    """The decision with the Workloads that it needs, where their pods go, and what Kueue is to be told."""
    if not observed.kueue or not queue(observed) or pods.is_leaving(observed.raw):
        return decision
    base = _base(observed)
    decision = replace(decision, workload_statuses=_statuses(observed, base, decision=decision))
    if observed.job is None:
        return decision
    placements = {} if base is None or not base.is_admitted else _placements(observed, base)
    workloads = _wanted(observed, base, decision=decision, settings=settings)
    return replace(decision, wanted=replace(decision.wanted, workloads=workloads, placements=placements))


def _wanted(
    observed: Observed, base: _Workload | None, *, decision: JobDecision, settings: PlanningSettings
) -> dict[str, WantedWorkload]:
    wanted: dict[str, WantedWorkload] = {}
    is_free = not decision.has_ended and _is_gone(observed)
    if base is not None and is_free and _is_outdated(observed, base, settings=settings):
        return wanted
    waits = bool(decision.wanted.trainers) or decision.is_queued
    is_kept = base is not None and not is_free
    if is_kept or (waits and not (base is None and set(lookups(observed)) - observed.looked_up.keys())):
        wanted[names.workload(observed.name)] = _workload(observed, base, counts=_gang(observed))
    for pool in observed.pools:
        found, gang = _more(observed, pool), 0 if base is None else _gang_count(base, pool)
        asked = decision.wanted.asked.get(pool, 0) - gang if decision.wanted.trainers else 0
        kept = list(found)[: max(asked, _pods(observed, pool) - gang, 0)]
        free = (number for number in range(len(found) + max(asked, 0)) if number not in found)
        for number in [*kept, *(next(free) for _ in range(asked - len(kept)))]:
            name = names.workload(observed.name, pool=pool, number=number)
            wanted[name] = _workload(observed, found.get(number), counts={pool: 1}, pool=pool)
    return wanted


def _gang(observed: Observed) -> dict[str, int]:
    """Pod set -> pods, without which the job is of no use."""
    assert observed.job is not None, "asked only of a valid job"
    spec = observed.job.spec
    counts = {_TRAINER: 1, _TRAINER_WORKERS: spec.trainer.nodes - 1, **pool_sizes(observed.job)}
    return {name: count for name, count in counts.items() if count}


def _is_outdated(observed: Observed, base: _Workload, *, settings: PlanningSettings) -> bool:
    """Whether it holds quota for other pods than the job is to have: its owner changed the pools, or what their containers ask for, meanwhile."""
    if observed.job is None or not base.is_reserved or base.holds("Evicted"):  # what is evicted can change soon
        return False
    images = job_status.images_of_job(observed, settings=settings, begins=True)
    wanted = DesiredRun(trainers=1, generators={}, images=images)
    namespace, uid = observed.key[0], observed.metadata["uid"]
    plan = JobPlan(job=observed.job, namespace=namespace, uid=uid, wanted=wanted, settings=settings)
    planned = {name: _asks(template) for name, template in pod_templates(plan).items()}
    there = {one["name"]: _asks(one["template"]) for one in base.raw["spec"]["podSets"]}
    return compare.differs(planned, there) or compare.differs(there, planned)


def _asks(template: Object) -> Object:
    """What Kueue counts, or finds devices by."""
    spec = template["spec"]
    asked: dict[str, Any] = {key: spec[key] for key in ("runtimeClassName", "resourceClaims") if key in spec}
    for kind in ("initContainers", "containers"):
        asked[kind] = [
            {key: each[key] for key in ("name", "restartPolicy", "resources") if each.get(key)}
            for each in spec.get(kind) or ()
        ]
    return asked


def _workload(
    observed: Observed, found: _Workload | None, *, counts: Mapping[str, int], pool: str | None = None
) -> WantedWorkload:
    if found is not None and found.is_reserved:
        spec = found.raw["spec"]
        about = {key: spec[key] for key in ("queueName", "priorityClassRef", "priority") if key in spec}
        return WantedWorkload(pool=pool, about=about, pod_sets=spec["podSets"])
    return WantedWorkload(pool=pool, about={"queueName": queue(observed), **_priority(observed)}, counts=counts)


def _priority(observed: Observed) -> dict[str, Any]:
    base, named = _base(observed), _priority_class(observed)
    if base is not None and base.is_reserved:  # a replica more is worth as much as the gang
        return {key: base.raw["spec"][key] for key in ("priorityClassRef", "priority") if key in base.raw["spec"]}
    found = observed.looked_up.get(named) if named else None
    if named is None or found is None:
        return {}
    kind, name = named
    group = "kueue.x-k8s.io" if kind == "WorkloadPriorityClass" else "scheduling.k8s.io"
    return {"priorityClassRef": {"group": group, "kind": kind, "name": name}, "priority": found.get("value") or 0}


def _placements(observed: Observed, base: _Workload) -> dict[str, PodPlacement]:
    """Pod set -> what its admission adds to the pods: from flavours, and from admission checks."""
    updates = [one for check in base.status.get("admissionChecks") or () for one in check.get("podSetUpdates") or ()]
    placements = _kept_placements(observed, base)
    for name, assigned in base.assignments.items():
        flavors = [("ResourceFlavor", one) for one in sorted(set((assigned.get("flavors") or {}).values()))]
        if name not in placements and observed.looked_up.keys() >= set(flavors):
            of_flavors = (_flavor_update(observed.looked_up[one]) for one in flavors)
            of_checks = (one for one in updates if one.get("name") == name)
            placements[name] = _placement([*of_flavors, *of_checks], reserved_at=base.reserved_at)
    return placements


def _kept_placements(observed: Observed, base: _Workload) -> dict[str, PodPlacement]:
    """Pod set -> its placement since this admission, where its StatefulSet has it."""
    kept: dict[str, PodPlacement] = {}
    for name in base.assignments:
        found = observed.sets.get(f"{observed.name}-{name}") or {"metadata": {}}
        text = (found["metadata"].get("annotations") or {}).get(names.ANNOTATION_PLACEMENT, "")
        with contextlib.suppress(ValidationError):  # none, or somebody's own
            placement = _PLACEMENT.validate_json(text)
            kept |= {name: placement} if placement.reserved_at == base.reserved_at else {}
    return kept


def _flavor_update(flavor: Object) -> Object:
    spec = flavor.get("spec") or {}
    return {"nodeSelector": spec.get("nodeLabels") or {}, "tolerations": spec.get("tolerations") or ()}


def _placement(updates: Iterable[Object], *, reserved_at: str) -> PodPlacement:
    merged: dict[str, dict[str, str]] = {"nodeSelector": {}, "labels": {}, "annotations": {}}
    tolerations: list[Object] = []
    for one in updates:
        for key, there in merged.items():
            there.update(one.get(key) or {})
        tolerations += [each for each in one.get("tolerations") or () if each not in tolerations]
    return PodPlacement(
        reserved_at=reserved_at,
        node_selector=merged["nodeSelector"],
        labels=merged["labels"],
        annotations=merged["annotations"],
        tolerations=tuple(tolerations),
    )


def _pods(observed: Observed, pool: str) -> int:
    """Pods of a pool that are there or will be, whatever was decided since."""
    there = sum(pods.is_of_pool(pod, pool) for pod in observed.pods)
    return max(there, pods.asked(observed.sets.get(names.pool(observed.name, pool))))


def _is_gone(observed: Observed) -> bool:
    """Whether there are no pods, and none will come."""
    return not observed.pods and not any(pods.asked(each) for each in observed.sets.values())


def _statuses(observed: Observed, base: _Workload | None, *, decision: JobDecision) -> dict[str, Object]:
    """Workload -> change of its status."""
    changes: dict[str, Object | None] = {}
    if base is not None:
        asked = decision.wanted.generators  # fewer than admitted where somebody wants fewer
        ready = all(
            _ready_pods(observed, name) >= min(_gang_count(base, name), asked.get(name, MOST_REPLICAS))
            for name in base.assignments
        )
        changes[base.name] = _change(observed, base, is_gone=_is_gone(observed), is_ready=ready, decision=decision)
    most_of = admitted(observed) or {}
    for pool in observed.pools:
        most = most_of.get(pool, 0)
        ready, is_gone = _ready_pods(observed, pool) >= most, _pods(observed, pool) <= most
        for one in _more(observed, pool).values():
            changes[one.name] = _change(observed, one, is_gone=is_gone, is_ready=ready)
    return {name: change for name, change in changes.items() if change is not None}


def _ready_pods(observed: Observed, pod_set: str) -> int:
    name = f"{observed.name}-{pod_set}"
    return sum(pods.is_ready(pod) and pods.place(pod)[0] == name for pod in observed.pods)


def _change(
    observed: Observed, one: _Workload, *, is_gone: bool, is_ready: bool, decision: JobDecision | None = None
) -> Object | None:
    """What Kueue waits for, in the words of its own controllers; None: it knows all."""
    evicted, was_ready = one.condition("Evicted"), one.condition("PodsReady")
    if decision is not None and decision.has_ended:
        if not is_gone or one.holds("Finished"):
            return None
        reason = "Succeeded" if decision.has_succeeded else "Failed"
        return _with_conditions(observed, one, ("Finished", True, reason, f"the job has {reason.lower()}"))
    if evicted.get("status") == "True" and one.is_reserved:
        if not is_gone:
            return None
        why, message = str(evicted.get("reason")), str(evicted.get("message"))
        given_back = _with_conditions(
            observed,
            one,
            ("QuotaReserved", False, "Pending", message),
            ("Admitted", False, "NoReservation", "The workload has no reservation"),
            ("Requeued", why in _PREEMPTED, why, message),
            *([("PodsReady", False, "WaitForStart", "Not all pods are ready or succeeded")] if was_ready else []),
        )
        return {**given_back, "admission": None}
    if not one.is_admitted or is_ready == one.holds("PodsReady"):
        return None
    again = was_ready.get("reason") in ("WaitForRecovery", "Recovered")
    reason = ("Recovered" if again else "Started") if is_ready else "WaitForRecovery"
    message = "All pods are ready" if is_ready else "A pod is not ready any more"
    return _with_conditions(observed, one, ("PodsReady", is_ready, reason, message))


def _with_conditions(observed: Observed, one: _Workload, *given: tuple[str, bool, str, str]) -> Object:
    """The list as a whole: a merge patch knows no items."""
    made = []
    for kind, is_true, reason, message in given:
        was, status = one.condition(kind), "True" if is_true else "False"
        moved = was.get("lastTransitionTime") if was.get("status") == status else None
        made.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": moved or stamp(observed.now),
                "observedGeneration": one.raw["metadata"].get("generation") or 0,
            }
        )
    said = {kind for kind, *_ in given}
    return {"conditions": [*(each for each in one.conditions if each.get("type") not in said), *made]}
