"""What a plan is worth by the model: the makespan of a batch under it."""

from collections.abc import Sequence

from streamrl_workers.scheduler.dispatch.makespan import Instance, list_seconds, servers_of, unit_samples
from streamrl_workers.scheduler.dispatch.policy import Candidate, Plan, Work


def plan_seconds(plan: Plan, work: Work) -> float:
    """Modelled makespan of the batch, beside what runs already.

    Args:
        plan: with sides or without; each side needs one of the instances, or nothing to do.
        work: the batch and the generators. Lengths are taken at their predicted values.
    """
    groups = sorted(work.groups, key=plan.key)
    if not plan.tail_generators:
        return _side_seconds(groups, work.instances, work=work)
    tail = [instance for instance in work.instances if instance.generator_id in plan.tail_generators]
    rest = [instance for instance in work.instances if instance.generator_id not in plan.tail_generators]
    return max(
        _side_seconds([group for group in groups if plan.is_tail(group)], tail, work=work),
        _side_seconds([group for group in groups if not plan.is_tail(group)], rest, work=work),
    )


def _side_seconds(groups: Sequence[Candidate], instances: Sequence[Instance], *, work: Work) -> float:
    if not instances:
        return float("inf") if groups else 0.0
    unit = unit_samples(work.instances, samples=work.samples)
    units = [group.predicted_tokens for group in groups for _ in range(work.samples // unit)]
    return list_seconds(units, servers_of(instances, unit=unit))
