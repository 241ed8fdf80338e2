"""The trainer's pods and what stands around them: StatefulSets, headless Services, PodDisruptionBudgets.

prepare ──▶ tasks (sidecar: the user's code) ──▶ scheduler (sidecar: starts before the trainer and ends after it) ──▶ trainer (rank 0 and the others of its node)
   │            └────────── a socket ────────────────┤                                                                   │
   └── store volume ─────────────────────────────────┴── run volume (journal), shared scratch ──────────────────────────┘
prepare ──▶ trainer (the ranks of a further node), for each `trainer.nodes` above 1: store volume, scratch
"""

from collections.abc import Mapping

from streamrl import keys, names
from streamrl.spec.base import is_url
from streamrl.spec.containers import Resources
from streamrl_operator.planning.objects import containers, template
from streamrl_operator.planning.objects.containers import Container
from streamrl_operator.planning.objects.shared import Built, JobPlan, disruption_budget, service
from streamrl_operator.planning.pods import ROLE_TRAINER, ROLE_TRAINER_WORKER

_VOLUME_STORE, _VOLUME_SHARED, _VOLUME_CODE = "streamrl-store", "streamrl-shared", "streamrl-code"
_VOLUME_TASKS = "streamrl-tasks"
_VOLUME_TLS_SCHEDULER, _VOLUME_TLS_TRAINER = "streamrl-tls-scheduler", "streamrl-tls-trainer"

_READ_ONLY = (template.VOLUME_JOB, _VOLUME_CODE, _VOLUME_TLS_SCHEDULER, _VOLUME_TLS_TRAINER)

_GRACE_S = 120
"""For a last checkpoint after the end of the step."""
_WITH_RANKER = Resources(requests={**template.SMALL.requests, "memory": "2Gi"})
"""About 1 GiB for torch and transformers, and 16 bytes for each parameter of a model that is tuned: 60 million of them."""


def stateful_sets(plan: JobPlan) -> list[Built]:
    """Of the first pod, and of the further nodes."""
    trainers, more = plan.wanted.trainers, plan.job.spec.trainer.nodes - 1
    first = template.stateful_set(plan, names.trainer(plan.name), replicas=trainers, template=_template(plan))
    if not more:
        return [first]
    workers, built = names.trainer_workers(plan.name), _worker_template(plan)
    return [first, template.stateful_set(plan, workers, replicas=trainers * more, template=built)]


def headless_services(plan: JobPlan) -> list[Built]:
    """Names of the trainer's pods, from before they are ready: they wait for each other."""
    first = _headless_service(plan, names.trainer(plan.name), role=ROLE_TRAINER)
    if plan.job.spec.trainer.nodes == 1:
        return [first]
    return [first, _headless_service(plan, names.trainer_workers(plan.name), role=ROLE_TRAINER_WORKER)]


def _headless_service(plan: JobPlan, name: str, *, role: str) -> Built:
    ports = {names.PORT_NAME_TRAINER_SIGNALS: names.PORT_TRAINER_SIGNALS}
    return service(plan, name, role=role, ports=ports, clusterIP="None", publishNotReadyAddresses=True)


def scheduler_service(plan: JobPlan) -> Built:
    """The address that generators dial; without a ready pod too, else generators and trainer wait for each other."""
    ports = {
        names.PORT_NAME_GRPC: names.PORT_GRPC,
        names.PORT_NAME_WEIGHTS: names.PORT_WEIGHTS,
        names.PORT_NAME_SIGNALS: names.PORT_SIGNALS,
    }
    name = names.scheduler(plan.name)
    return service(plan, name, role=ROLE_TRAINER, ports=ports, type="ClusterIP", publishNotReadyAddresses=True)


def disruption_budgets(plan: JobPlan) -> list[Built]:
    """Keep drains away from the trainer where the job asks for it."""
    trainer = plan.job.spec.trainer
    if trainer.disruption == "Allow":
        return []
    first = disruption_budget(plan, names.trainer(plan.name), role=ROLE_TRAINER, minAvailable=1)
    if trainer.nodes == 1:
        return [first]
    workers = names.trainer_workers(plan.name)
    return [first, disruption_budget(plan, workers, role=ROLE_TRAINER_WORKER, minAvailable=trainer.nodes - 1)]


def _template(plan: JobPlan) -> template.Template:
    variables = containers.trainer_variables(plan.job, uid=plan.uid)
    main = _trainer(
        plan,
        variables=containers.by_grpc(variables, port=keys.ENV_GRPC_PORT) if plan.moves_by_grpc else variables,
        ports={names.PORT_NAME_WEIGHTS: names.PORT_WEIGHTS},
    )
    hosted = [_tasks(plan)] if _is_hosted(plan) else []
    before = ([_prepare(plan)] if plan.job.spec.has_model else []) + hosted + [_scheduler(plan)]
    volumes = _shared_volumes(plan) | {
        _VOLUME_TLS_SCHEDULER: template.secret(names.tls_secret(plan.name, "scheduler")),
        template.VOLUME_RUN: template.claim(names.journal_claim(plan.name)),
        **({_VOLUME_TASKS: template.scratch()} if _is_hosted(plan) else {}),
    }
    annotations = _skipped_by_webhooks(plan) if hosted else {}
    return _pod_template(
        plan, role=ROLE_TRAINER, init_containers=before, main=main, volumes=volumes, annotations=annotations
    )


def _skipped_by_webhooks(plan: JobPlan) -> dict[str, str]:
    """The container with the user's code, beside those that the job names; nothing where it reads the data set from an object store itself."""
    files = [task.dataset.jsonl for task in plan.job.spec.task.tasks]
    if any(jsonl is not None and is_url(jsonl.path) for jsonl in files):
        return {}
    return template.skipped_by_webhooks(names.CONTAINER_TASKS, given=plan.job.spec.trainer.pod.annotations)


def _is_hosted(plan: JobPlan) -> bool:
    """Whether the user's functions have a container of their own; in a job that an earlier release began the scheduler's runs them."""
    return plan.images.tasks is not None


def _worker_template(plan: JobPlan) -> template.Template:
    variables = containers.trainer_worker_variables(plan.job, uid=plan.uid)
    main = _trainer(plan, variables=variables, ports={names.PORT_NAME_WEIGHTS: names.PORT_WEIGHTS})
    volumes = _shared_volumes(plan) | {template.VOLUME_RUN: template.scratch()}
    before = [_prepare(plan)]
    return _pod_template(
        plan, role=ROLE_TRAINER_WORKER, init_containers=before, main=main, volumes=volumes, annotations={}
    )


def _pod_template(
    plan: JobPlan,
    *,
    role: str,
    init_containers: list[Container],
    main: Container,
    volumes: dict[str, Built],
    annotations: Mapping[str, str],
) -> template.Template:
    stamp = plan.wanted.restarted_at
    return template.Template(
        role=role,
        annotations={**annotations, **({names.ANNOTATION_ATTEMPT: stamp} if stamp else {})},
        grace_s=_GRACE_S,
        init_containers=init_containers,
        main=main,
        volumes=volumes,
        image=plan.images.trainer,
        pod=plan.job.spec.trainer.pod,
    )


def _shared_volumes(plan: JobPlan) -> dict[str, Built]:
    """Of all pods with ranks."""
    code, checkpoints = plan.job.spec.task.code, plan.job.spec.storage.checkpoints
    volumes = {
        template.VOLUME_JOB: template.config_map(names.resolved(plan.name)),
        _VOLUME_TLS_TRAINER: template.secret(names.tls_secret(plan.name, "trainer")),
        _VOLUME_STORE: template.claim(checkpoints.given_claim or names.checkpoints_claim(plan.name)),
        _VOLUME_SHARED: template.scratch(),
        template.VOLUME_TMP: template.scratch(),
    }
    if code is not None:
        # In a member it is the job's own copy: two jobs may name one at home.
        volumes[_VOLUME_CODE] = template.config_map(names.code(plan.name) if plan.place else code.config_map_name)
    if _has_ranks(plan):
        volumes[template.VOLUME_SHM] = template.shared_memory()
    return volumes


def _has_ranks(plan: JobPlan) -> bool:
    """Several processes, which speak through shared memory."""
    return plan.job.spec.trainer.processes_per_node > 1


def _mounts(plan: JobPlan) -> dict[str, str]:
    """What prepare, scheduler and trainer see."""
    mounts = {
        names.DIR_JOB: template.VOLUME_JOB,
        names.DIR_STORE_VOLUME: _VOLUME_STORE,
        names.DIR_SHARED: _VOLUME_SHARED,
        template.DIR_TMP: template.VOLUME_TMP,
    }
    return mounts | _code(plan)


def _code(plan: JobPlan) -> dict[str, str]:
    return {} if plan.job.spec.task.code is None else {names.DIR_CODE: _VOLUME_CODE}


def _own_tmp(plan: JobPlan) -> dict[str, str]:
    """Of containers with the user's functions: Python runs what lies at home or where it starts, and a job may give one volume for all of `/tmp`."""
    return {template.DIR_TMP: "streamrl-tasks"} if _is_hosted(plan) else {}


def _prepare(plan: JobPlan) -> Container:
    return Container(
        name=names.CONTAINER_PREPARE,
        module="streamrl_workers.models.prepare",
        arguments=(
            *("--job", f"{names.DIR_JOB}/{keys.FILE_JOB}"),
            *("--cache", f"{names.store_dir(plan.name, uid=plan.uid)}/models"),
            *("--result", f"{names.DIR_SHARED}/{keys.FILE_MODEL}"),
        ),
        variables=containers.prepare_variables(plan.job, uid=plan.uid),
        mounts=_mounts(plan),
        sub_paths=_own_tmp(plan),
        read_only=_READ_ONLY,
        resources=plan.job.spec.trainer.pod.prepare_resources or template.SMALL,
    )


def _tasks(plan: JobPlan) -> Container:
    """Without keys, journal and checkpoints: of the volume it has what prepare has fetched."""
    pod, store = plan.job.spec.trainer.pod, names.store_name(plan.name, uid=plan.uid)
    fetched = ("huggingface", "models") if plan.job.spec.has_model else ()
    parts = {f"{names.DIR_STORE_VOLUME}/{store}/{part}": f"{store}/{part}" for part in fetched}
    return Container(
        name=names.CONTAINER_TASKS,
        module="streamrl_workers.tasks.host",
        variables=containers.tasks_variables(plan.job, uid=plan.uid),
        mounts={
            names.DIR_TASKS: _VOLUME_TASKS,
            template.DIR_TMP: template.VOLUME_TMP,
            **dict.fromkeys(parts, _VOLUME_STORE),
            **_code(plan),
        },
        sub_paths=parts | _own_tmp(plan),
        read_only=(*_READ_ONLY, f"{names.DIR_STORE_VOLUME}/{store}/models"),
        resources=pod.tasks_resources or template.SMALL,
        image=pod.tasks_image,
        sidecar=True,
    )


def _scheduler(plan: JobPlan) -> Container:
    hosted = _is_hosted(plan)
    return Container(
        name=names.CONTAINER_SCHEDULER,
        module="streamrl_workers.scheduler",
        variables=containers.scheduler_variables(plan.job, uid=plan.uid)
        | (containers.tasks_socket() if hosted else {}),
        mounts=_mounts(plan)
        | {names.DIR_RUN: template.VOLUME_RUN, names.DIR_TLS: _VOLUME_TLS_SCHEDULER}
        | ({names.DIR_TASKS: _VOLUME_TASKS} if hosted else {}),
        read_only=_READ_ONLY,
        ports={names.PORT_NAME_GRPC: names.PORT_GRPC, names.PORT_NAME_SIGNALS: names.PORT_SIGNALS},
        signals_port=names.PORT_SIGNALS,
        start_deadline_s=plan.job.spec.trainer.pod.scheduler_start_seconds,
        resources=plan.job.spec.trainer.pod.scheduler_resources or _scheduler_resources(plan),
        sidecar=True,
    )


def _scheduler_resources(plan: JobPlan) -> Resources:
    """A ranker that needs torch runs in a process beside the scheduler, in its container."""
    ranker = plan.job.spec.scheduling.ranker
    if ranker is None or ranker.language_model is None:
        return template.SMALL
    return _WITH_RANKER


def _trainer(plan: JobPlan, *, variables: containers.Variables, ports: Mapping[str, int]) -> Container:
    shm = {template.DIR_SHM: template.VOLUME_SHM} if _has_ranks(plan) else {}
    return Container(
        name=names.CONTAINER_TRAINER,
        module="streamrl_workers.trainer.launch",
        variables=variables,
        mounts=_mounts(plan) | {names.DIR_RUN: template.VOLUME_RUN, names.DIR_TLS: _VOLUME_TLS_TRAINER} | shm,
        read_only=_READ_ONLY,
        ports={
            **ports,
            names.PORT_NAME_TRAINER_SIGNALS: names.PORT_TRAINER_SIGNALS,
            **containers.rank_ports(plan.job),
            **containers.rank_weights_ports(plan.job),
        },
        signals_port=names.PORT_TRAINER_SIGNALS,
    )
