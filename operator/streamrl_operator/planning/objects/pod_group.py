"""The PodGroup of a gang, and how its pods name it. Its size is that of the fewest pods with which the job is of use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl_operator.planning import gang
from streamrl_operator.planning.objects.shared import Built, JobPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheduler:
    api_version: str
    name: str
    """Of pods that name no scheduler."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def pod_groups(plan: JobPlan) -> list[Built]:
    """The job's PodGroup, where it asks for one."""
    scheduler, wanted = _scheduler(plan), plan.job.spec.gang
    if scheduler is None or wanted is None:
        return []
    spec: Built = {"minMember": sum(gang.sizes(plan.job).values())}
    if wanted.queue is not None:
        spec["queue"] = wanted.queue
    return [plan.object(scheduler.api_version, "PodGroup", plan.name, spec=spec)]


def of_pods(plan: JobPlan) -> tuple[Mapping[str, str], Mapping[str, str], str | None]:
    """Return labels and annotations of the job's pods, and the name of the scheduler of those that name none."""
    scheduler = _scheduler(plan)
    return ({}, {}, None) if scheduler is None else (scheduler.labels, scheduler.annotations, scheduler.name)


def _scheduler(plan: JobPlan) -> _Scheduler | None:
    wanted = plan.job.spec.gang
    schedulers = {
        "SchedulerPlugins": _Scheduler(
            api_version="scheduling.x-k8s.io/v1alpha1",
            name="scheduler-plugins-scheduler",
            labels={"scheduling.x-k8s.io/pod-group": plan.name},
        ),
        "Volcano": _Scheduler(
            api_version="scheduling.volcano.sh/v1beta1",
            name="volcano",
            annotations={"scheduling.k8s.io/group-name": plan.name},
        ),
    }
    return None if wanted is None or wanted.pod_group is None else schedulers[wanted.pod_group]
