"""All objects of a job, in the order in which they are applied: what others need comes first, pods last."""

from streamrl_operator.planning.objects import generators, network, storage, trainer
from streamrl_operator.planning.objects.meta import Built, Plan, stamp


def plan_objects(plan: Plan) -> list[Built]:
    """Every object of the job but the Secrets with its certificates, each with the hash of what is applied."""
    pools = plan.job.spec.generators
    several = plan.job.spec.trainer.nodes > 1
    built = [
        storage.service_account(plan),
        storage.resolved_job(plan),
        *storage.claims(plan),
        network.trainer_policy(plan),
        *([network.trainer_workers_policy(plan)] if several else []),
        *(network.generators_policy(plan, pool=pool) for pool in pools),
        trainer.scheduler_service(plan),
        trainer.headless_service(plan),
        *([trainer.workers_service(plan)] if several else []),
        *(generators.headless_service(plan, pool=pool) for pool in pools),
        *trainer.disruption_budgets(plan),
        *(generators.disruption_budget(plan, pool=pool) for pool in pools),
        *(generators.generator_pool(plan, pool=pool) for pool in pools),
        trainer.stateful_set(plan),
        *([trainer.workers_set(plan)] if several else []),
        *(generators.stateful_set(plan, pool=pool) for pool in pools),
    ]
    return [stamp(each) for each in built]
