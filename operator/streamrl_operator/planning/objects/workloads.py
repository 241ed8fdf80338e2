"""Kueue's Workloads: what a job asks of its queue, in the very pod templates that its StatefulSets have."""

from collections.abc import Mapping

from streamrl_operator.planning.objects.shared import Built, JobPlan
from streamrl_operator.planning.values import WantedWorkload

API_VERSION = "kueue.x-k8s.io/v1beta2"


def workloads(plan: JobPlan, *, templates: Mapping[str, Built]) -> list[Built]:
    """Those that are wanted. `templates`: of the job's pods, by pod set."""
    return [_workload(plan, name, wanted, templates=templates) for name, wanted in plan.wanted.workloads.items()]


def _workload(plan: JobPlan, name: str, wanted: WantedWorkload, *, templates: Mapping[str, Built]) -> Built:
    planned = [
        {"name": pod_set, "count": count, "template": templates[pod_set]} for pod_set, count in wanted.counts.items()
    ]
    spec = {**wanted.about, "podSets": list(wanted.pod_sets) or planned}
    return plan.object(API_VERSION, "Workload", name, pool=wanted.pool, spec=spec)
