"""Builds every Kubernetes object of a job but the Secrets with its certificates. Pure: the same input gives the same bytes."""

from streamrl_operator.planning.objects import generators, shared, trainer
from streamrl_operator.planning.objects.generators import pool_replicas
from streamrl_operator.planning.objects.shared import Built, JobPlan, with_spec_hash
from streamrl_operator.planning.objects.workloads import workloads


def plan_objects(plan: JobPlan) -> list[Built]:
    """Every object of the job but the Secrets with its certificates, each with the hash of what is applied."""
    pools = plan.job.spec.generators
    sets = [*trainer.stateful_sets(plan), *(generators.stateful_set(plan, pool=pool) for pool in pools)]
    built = [
        shared.service_account(plan),
        shared.resolved_job(plan),
        *shared.claims(plan),
        *shared.policies(plan),
        trainer.scheduler_service(plan),
        *trainer.headless_services(plan),
        *(generators.headless_service(plan, pool=pool) for pool in pools),
        *trainer.disruption_budgets(plan),
        *(generators.budget(plan, pool=pool) for pool in pools),
        *(generators.generator_pool(plan, pool=pool) for pool in pools),
        *workloads(plan, sets=sets),
        *sets,
    ]
    return [with_spec_hash(each) for each in built]


__all__ = ["plan_objects", "pool_replicas"]
