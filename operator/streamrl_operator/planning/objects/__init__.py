"""Builds every Kubernetes object of a job but the Secrets with its certificates. Pure: the same input gives the same bytes."""

from streamrl_operator.planning.objects import agents, generators, members, pod_group, shared, trainer
from streamrl_operator.planning.objects.generators import pool_replicas
from streamrl_operator.planning.objects.shared import Built, JobPlan, with_spec_hash
from streamrl_operator.planning.objects.workloads import workloads


def plan_objects(plan: JobPlan) -> list[Built]:
    """Every object of the job in the cluster that is planned for, each with the hash of what is applied; at home without the Secrets."""
    sets, own = _stateful_sets(plan), plan.has_trainer
    built = [
        shared.service_account(plan),
        shared.resolved_job(plan),
        *members.copies(plan),
        *(shared.claims(plan) if own else ()),
        *shared.policies(plan),
        *(agents.policies(plan) if plan.place is None else ()),
        *(_trainer_services(plan) if own else ()),
        *(generators.headless_service(plan, pool=pool) for pool in plan.pools()),
        *(trainer.disruption_budgets(plan) if own else ()),
        *(generators.budget(plan, pool=pool) for pool in plan.pools()),
        *(_home_alone(plan, sets) if plan.place is None else ()),
        *sets,
    ]
    return [with_spec_hash(each) for each in built]


def _trainer_services(plan: JobPlan) -> list[Built]:
    services = [trainer.scheduler_service(plan), *members.exposed_services(plan)]
    return [*services, *members.routes(plan), *trainer.headless_services(plan)]


def _home_alone(plan: JobPlan, sets: list[Built]) -> list[Built]:
    """A member knows none of these kinds."""
    pools = [generators.generator_pool(plan, pool=pool) for pool in plan.job.spec.pools]
    return [*pod_group.pod_groups(plan), *pools, *workloads(plan, templates=_templates(plan, sets))]


def pod_templates(plan: JobPlan) -> dict[str, Built]:
    """Pod set (`trainer`, `trainer-workers`, or the pool's name) -> template of its pods."""
    return _templates(plan, _stateful_sets(plan))


def _stateful_sets(plan: JobPlan) -> list[Built]:
    own = trainer.stateful_sets(plan) if plan.has_trainer else []
    return [*own, *(generators.stateful_set(plan, pool=pool) for pool in plan.pools())]


def _templates(plan: JobPlan, sets: list[Built]) -> dict[str, Built]:
    """Return the templates without the gate of a set that is held: a queue admits what pods ask for."""
    templates = {each["metadata"]["name"].removeprefix(f"{plan.name}-"): each["spec"]["template"] for each in sets}
    return {
        pod_set: template
        | {"spec": {key: value for key, value in template["spec"].items() if key != "schedulingGates"}}
        for pod_set, template in templates.items()
    }


__all__ = ["plan_objects", "pod_templates", "pool_replicas"]
