"""A job in a queue, look after look: its Workloads are made as decided, and a Kueue of a few lines answers as it is told to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamrl import names
from streamrl_operator.planning.admission import lookups
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.values import JobDecision, Observed, stamp
from support.job_lives import reported
from support.observed_jobs import JOB, SETTINGS, Doc, carried_out, generator, job_document, observed, trainer

QUEUE, FLAVOR = "team", "h100"
GANG = names.workload(JOB)
FLAVORS = {"nodeLabels": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
PRIORITY = {"value": 1000}


def more(number: int) -> str:
    """Workload of a replica beyond the gang."""
    return names.workload(JOB, pool="sim", number=number)


def queued_document(*, labels: Mapping[str, str] | None = None, **changes: Any) -> Doc:
    """The job with a queue."""
    document = job_document(**changes)
    document["metadata"]["labels"] = {names.LABEL_QUEUE: QUEUE} if labels is None else dict(labels)
    return document


@dataclass
class QueuedJob:
    """The job, and what Kueue thinks of it."""

    look: Observed = field(default_factory=lambda: replace(observed(queued_document()), kueue=True))
    known: Mapping[tuple[str, str], Doc] = field(
        default_factory=lambda: {
            ("ResourceFlavor", FLAVOR): {"spec": FLAVORS},
            ("WorkloadPriorityClass", "high"): PRIORITY,
        }
    )

    def decide(self) -> JobDecision:
        """One reconcile: decided, and carried out but for the pods."""
        needed = {key: self.known[key] for key in lookups(self.look) if key in self.known}
        self.look = replace(self.look, looked_up=needed)
        decision = reported(self.look)
        planned = self.planned(decision)
        workloads = {
            name: self._after(name, decision, planned.get(("Workload", name))) for name in decision.wanted.workloads
        }
        sets = {name: each for (kind, name), each in planned.items() if kind == "StatefulSet"}
        self.look = replace(carried_out(self.look, decision, seconds=10), workloads=workloads, sets=sets)
        return decision

    def planned(self, decision: JobDecision) -> dict[tuple[str, str], Doc]:
        """Objects by (kind, name)."""
        assert self.look.job is not None
        plan = JobPlan(job=self.look.job, namespace="default", uid="u-job", wanted=decision.wanted, settings=SETTINGS)
        return {(each["kind"], each["metadata"]["name"]): each for each in plan_objects(plan)}

    def _after(self, name: str, decision: JobDecision, planned: Doc | None) -> Doc:
        assert planned is not None, f"{name} is wanted and not planned"
        status = {**self.look.workloads.get(name, {}).get("status", {}), **decision.workload_statuses.get(name, {})}
        return {**planned, "status": {key: value for key, value in status.items() if value is not None}}

    def settle(self, looks: int = 4) -> JobDecision:
        """Look, and let pods come and go, until nothing moves."""
        for _ in range(looks):
            decision = self.decide()
            wanted = decision.wanted
            pods = [trainer()] * wanted.trainers + [
                generator(number) for number in range(wanted.generators.get("sim", 0))
            ]
            self.look = replace(self.look, pods=pods)
        return self.decide()

    def say(self, name: str, **conditions: str | bool) -> None:
        """Kueue writes conditions, as of now: a reason says True."""
        found = self.look.workloads[name]
        status = found.get("status", {})
        kept = [one for one in status.get("conditions", ()) if one["type"] not in conditions]
        now = stamp(self.look.now)
        made = [
            {
                "type": kind,
                "status": str(bool(said)),
                "reason": str(said),
                "message": f"{kind} {said}",
                "lastTransitionTime": now,
            }
            for kind, said in conditions.items()
        ]
        changed = {**found, "status": {**status, "conditions": [*kept, *made]}}
        self.look = replace(self.look, workloads={**self.look.workloads, name: changed})

    def admit(self, name: str = GANG) -> None:
        """Kueue admits a Workload."""
        found = self.look.workloads[name]
        assigned = [
            {"name": one["name"], "count": one["count"], "flavors": {"cpu": FLAVOR}} for one in found["spec"]["podSets"]
        ]
        status = {**found.get("status", {}), "admission": {"clusterQueue": "cq", "podSetAssignments": assigned}}
        self.look = replace(self.look, workloads={**self.look.workloads, name: {**found, "status": status}})
        self.say(name, QuotaReserved="QuotaReserved", Admitted="Admitted", Evicted=False)
