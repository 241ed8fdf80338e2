"""All objects of a job, in the order in which they are applied: what others need comes first, pods last."""

from streamrl.spec import RLJob
from streamrl_operator.planning.objects import generators, network, storage, trainer
from streamrl_operator.planning.objects.meta import Built, Plan, stamp
from streamrl_operator.planning.values import Settings, Wanted


def plan_objects(job: RLJob, *, namespace: str, uid: str, wanted: Wanted, settings: Settings) -> list[Built]:
    """Every object of the job but the Secrets with its certificates, each with the hash of what is applied."""
    plan = Plan(job=job, namespace=namespace, uid=uid, wanted=wanted, settings=settings)
    pools = job.spec.generators
    budget = trainer.disruption_budget(plan)
    built = [
        storage.service_account(plan),
        storage.resolved_job(plan),
        *storage.claims(plan),
        network.trainer_policy(plan),
        *(network.generators_policy(plan, pool=pool) for pool in pools),
        trainer.scheduler_service(plan),
        trainer.headless_service(plan),
        *(generators.headless_service(plan, pool=pool) for pool in pools),
        *([] if budget is None else [budget]),
        *(generators.disruption_budget(plan, pool=pool) for pool in pools),
        *(generators.generator_pool(plan, pool=pool) for pool in pools),
        trainer.stateful_set(plan),
        *(generators.stateful_set(plan, pool=pool) for pool in pools),
    ]
    return [stamp(each) for each in built]
