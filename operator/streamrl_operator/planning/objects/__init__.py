"""Builds every Kubernetes object of a job but the Secrets with its certificates. Pure: the same input gives the same bytes."""

from streamrl_operator.planning.objects import agents, generators, members, shared, trainer
from streamrl_operator.planning.objects.generators import pool_replicas
from streamrl_operator.planning.objects.shared import Built, JobPlan, with_spec_hash
from streamrl_operator.planning.objects.workloads import workloads


def plan_objects(plan: JobPlan) -> list[Built]:
    """Every object of the job at home but the Secrets with its certificates, each with the hash of what is applied."""
    pools, sets = plan.job.spec.pools, _stateful_sets(plan)
    built = [
        shared.service_account(plan),
        shared.resolved_job(plan),
        *shared.claims(plan),
        *shared.policies(plan),
        *agents.policies(plan),
        trainer.scheduler_service(plan),
        *members.exposed_services(plan),
        *members.routes(plan),
        *trainer.headless_services(plan),
        *(generators.headless_service(plan, pool=pool) for pool in plan.pools()),
        *trainer.disruption_budgets(plan),
        *(generators.budget(plan, pool=pool) for pool in plan.pools()),
        *(generators.generator_pool(plan, pool=pool) for pool in pools),
        *workloads(plan, templates=_templates(plan, sets)),
        *sets,
    ]
    return [with_spec_hash(each) for each in built]


def pod_templates(plan: JobPlan) -> dict[str, Built]:
    """Pod set (`trainer`, `trainer-workers`, or the pool's name) -> template of its pods."""
    return _templates(plan, _stateful_sets(plan))


def _stateful_sets(plan: JobPlan) -> list[Built]:
    return [*trainer.stateful_sets(plan), *(generators.stateful_set(plan, pool=pool) for pool in plan.pools())]


def _templates(plan: JobPlan, sets: list[Built]) -> dict[str, Built]:
    return {each["metadata"]["name"].removeprefix(f"{plan.name}-"): each["spec"]["template"] for each in sets}


__all__ = ["plan_objects", "pod_templates", "pool_replicas"]
