"""A pool: GeneratorPool, StatefulSet, headless Service, PodDisruptionBudget; and the pods of generators. Those of agents: `agents.py`."""

from streamrl import API_VERSION, names
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.task import AgentPool
from streamrl_operator.planning.objects import agents, containers, template
from streamrl_operator.planning.objects.containers import Container
from streamrl_operator.planning.objects.shared import Built, JobPlan, disruption_budget, service
from streamrl_operator.planning.pods import ROLE_AGENTS, ROLE_GENERATOR
from streamrl_operator.planning.replicas import bounds
from streamrl_operator.planning.values import Object

_GRACE_S = 90
"""To finish what it generates after SIGTERM; what is not finished is issued again."""
_SHARE_AWAY = "10%"
"""Of a pool may be drained away at once; rounded up, so one of a small pool."""


def generator_pool(plan: JobPlan, *, pool: GeneratorPool | AgentPool) -> Built:
    """The GeneratorPool without `replicas`, which has another field manager (`pool_replicas`)."""
    least, most = bounds(pool.scaling)
    spec = {
        "jobName": plan.name,
        "poolName": pool.name,
        "role": _role(pool),
        "scaling": pool.scaling.key,
        "minReplicas": least,
        "maxReplicas": most,
    }
    return plan.object(API_VERSION, "GeneratorPool", names.pool(plan.name, pool.name), pool=pool.name, spec=spec)


def pool_replicas(pool: Object, *, replicas: int) -> Built:
    """The least object that sets a pool's `replicas`: for `names.REPLICAS_MANAGER`, after the GeneratorPool exists."""
    metadata = {key: pool["metadata"][key] for key in ("name", "namespace")}
    return {key: pool[key] for key in ("apiVersion", "kind")} | {"metadata": metadata, "spec": {"replicas": replicas}}


def stateful_set(plan: JobPlan, *, pool: GeneratorPool | AgentPool) -> Built:
    """The pool's StatefulSet."""
    replicas = plan.wanted.generators.get(pool.name, 0)
    name = names.pool(plan.name, pool.name)
    on_delete = pool.pod.max_unavailable is not None
    return template.stateful_set(
        plan, name, replicas=replicas, template=_template(plan, pool=pool), on_delete=on_delete
    )


def headless_service(plan: JobPlan, *, pool: GeneratorPool | AgentPool) -> Built:
    """Names of the pool's pods, for those who read their signals."""
    name, ports = names.pool(plan.name, pool.name), {names.PORT_NAME_SIGNALS: names.PORT_SIGNALS}
    return service(plan, name, role=_role(pool), pool=pool.name, ports=ports, clusterIP="None")


def budget(plan: JobPlan, *, pool: GeneratorPool | AgentPool) -> Built:
    """Drains take a share of the pool at a time; a pod that does not work yet keeps no drain waiting."""
    return disruption_budget(
        plan,
        names.pool(plan.name, pool.name),
        role=_role(pool),
        pool=pool.name,
        maxUnavailable=_SHARE_AWAY,
        unhealthyPodEvictionPolicy="AlwaysAllow",
    )


def _role(pool: GeneratorPool | AgentPool) -> str:
    return ROLE_AGENTS if isinstance(pool, AgentPool) else ROLE_GENERATOR


def _template(plan: JobPlan, *, pool: GeneratorPool | AgentPool) -> template.Template:
    return agents.pod_template(plan, pool=pool) if isinstance(pool, AgentPool) else _of_generators(plan, pool=pool)


def _of_generators(plan: JobPlan, *, pool: GeneratorPool) -> template.Template:
    return template.Template(
        role=ROLE_GENERATOR,
        pool=pool.name,
        grace_s=_GRACE_S,
        # Containers of ours have certificates of their own: the trainer's pod has two, and what a job adds has no use for ours.
        shares_processes=not (pool.pod.init_containers or pool.pod.containers),
        main=_container(plan, pool=pool),
        volumes={
            template.VOLUME_JOB: template.config_map(names.resolved(plan.name)),
            template.VOLUME_TLS: template.secret(names.tls_secret(plan.name, "generator")),
            template.VOLUME_RUN: template.scratch(),
            template.VOLUME_TMP: template.scratch(),
            **({template.VOLUME_SHM: template.shared_memory()} if pool.engine.common.own_processes else {}),
            **{volume: template.scratch() for volume in _own_cache(pool).values()},
        },
        image=plan.images.generator,
        pod=pool.pod,
    )


def _own_cache(pool: GeneratorPool) -> dict[str, str]:
    """Directory -> volume of a weight cache that the job has mounted nothing for: the rest of the container is read-only."""
    if pool.weight_cache is None:
        return {}
    path = pool.weight_cache.path
    mounted = (template.DIR_TMP, template.DIR_SHM, *(mount.mount_path for mount in pool.pod.volume_mounts))
    return {} if any(f"{path}/".startswith(f"{one}/") for one in mounted) else {path: template.VOLUME_CACHE}


def _container(plan: JobPlan, *, pool: GeneratorPool) -> Container:
    variables = containers.generator_variables(plan.job, pool=pool, uid=plan.uid, dials=plan.dials)
    weights = {} if plan.moves_by_grpc else {names.PORT_NAME_WEIGHTS: names.PORT_WEIGHTS}
    return Container(
        name=names.CONTAINER_GENERATOR,
        module="streamrl_workers.generator",
        variables=containers.by_grpc(variables, port=None) if plan.moves_by_grpc else variables,
        mounts={
            names.DIR_JOB: template.VOLUME_JOB,
            names.DIR_TLS: template.VOLUME_TLS,
            names.DIR_RUN: template.VOLUME_RUN,
            template.DIR_TMP: template.VOLUME_TMP,
            **({template.DIR_SHM: template.VOLUME_SHM} if pool.engine.common.own_processes else {}),
            **_own_cache(pool),
        },
        read_only=(template.VOLUME_JOB, template.VOLUME_TLS),
        ports={**weights, names.PORT_NAME_SIGNALS: names.PORT_SIGNALS},
        signals_port=names.PORT_SIGNALS,
    )
