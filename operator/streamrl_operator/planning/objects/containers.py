"""The parts that all containers have: command, environment, ports, probes, security, mounts.

What Pod Security "restricted" asks for stands here and in `template`; a job cannot change it. Of the environment, what begins with STREAMRL_ is
ours; the rest are defaults that a job may change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl import keys, names
from streamrl.liveness import LIVENESS_S, word_s
from streamrl.spec import RLJob, SpecModel
from streamrl.spec.containers import OWN_PREFIX, EnvVar, ExtraContainer, Resources
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.pod import Pod
from streamrl.spec.volumes import VolumeMount
from streamrl_operator.planning.objects.shared import Built
from streamrl_operator.planning.values import ExposedAddresses

Variables = dict[str, str | dict[str, Any]]
"""Name -> value, or where it comes from."""

PROCESS_SCHEDULER, PROCESS_TRAINER = "scheduler", "trainer-0"

_ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - NetworkPolicies say who may come in
_HOME = "/tmp"  # noqa: S108 - the one writable directory that every container has; the pod's own
_LABEL_ORDINAL = "apps.kubernetes.io/pod-index"
"""On every pod of a StatefulSet."""
_HEARTBEATS = f"{names.DIR_SHARED}/{keys.DIR_HEARTBEATS}"
"""In the trainer's pods: scratch space of the pod's own, which no other pod sees and no job replaces."""
_JOB_FILE = f"{names.DIR_JOB}/{keys.FILE_JOB}"


def prepare_variables(job: RLJob, *, uid: str) -> Variables:
    """Of the container that makes the model ready."""
    # Some data sets of reasoning-gym iterate over sets of strings: their items follow the hash seed.
    return {**_trainer_pod(job, uid=uid), "PYTHONHASHSEED": "0"}


def scheduler_variables(job: RLJob, *, uid: str) -> Variables:
    """Of the scheduler."""
    return _trainer_pod(job, uid=uid) | {
        keys.ENV_PROCESS: PROCESS_SCHEDULER,
        keys.ENV_HEARTBEAT_FILE: f"{_HEARTBEATS}/{names.CONTAINER_SCHEDULER}",
        keys.ENV_RUN_DIR: names.DIR_RUN,
        keys.ENV_GRPC_PORT: str(names.PORT_GRPC),
        keys.ENV_SIGNALS_PORT: str(names.PORT_SIGNALS),
        **_SERVING,
    }


def tasks_socket() -> Variables:
    """Of the scheduler and of the container with the task pool's processes: where they meet."""
    return {keys.ENV_TASKS_SOCKET: f"{names.DIR_TASKS}/socket"}


def tasks_variables(job: RLJob, *, uid: str) -> Variables:
    """Of that container; the task itself is told by the scheduler."""
    return {
        **_DEFAULTS,
        "HF_HOME": huggingface_dir(job, uid=uid) if job.spec.has_model else f"{_HOME}/huggingface",
        keys.ENV_HEARTBEAT_FILE: f"{names.DIR_TASKS}/{keys.DIR_HEARTBEATS}/{names.CONTAINER_TASKS}",
        **tasks_socket(),
    }


def agents_variables() -> Variables:
    """Of the container with the user's programs."""
    heartbeat = f"{names.DIR_TASKS}/{keys.DIR_HEARTBEATS}/{names.CONTAINER_AGENTS}"
    return {**_DEFAULTS, keys.ENV_HEARTBEAT_FILE: heartbeat, **tasks_socket()}


def agent_link_variables(job: RLJob) -> Variables:
    """Of the link beside it, whose name is that of its pod."""
    return {
        **_COMMON,
        keys.ENV_POD_NAME: {"fieldRef": {"fieldPath": "metadata.name"}},
        keys.ENV_RUN_DIR: names.DIR_RUN,
        keys.ENV_CODE_DIR: _HOME if job.spec.task.code is None else names.DIR_CODE,
        keys.ENV_HEARTBEAT_FILE: f"{names.DIR_RUN}/{keys.DIR_HEARTBEATS}/{names.CONTAINER_AGENT_LINK}",
        keys.ENV_SCHEDULER_ADDRESS: f"{names.scheduler(job.metadata.name)}:{names.PORT_GRPC}",
        keys.ENV_SIGNALS_PORT: str(names.PORT_SIGNALS),
        **tasks_socket(),
        **_SERVING,
    }


def huggingface_dir(job: RLJob, *, uid: str) -> str:
    """On the volume: loaded once, seen by all of the pod, there after a restart."""
    return f"{names.store_dir(job.metadata.name, uid=uid)}/huggingface"


def trainer_variables(job: RLJob, *, uid: str) -> Variables:
    """Of the trainer, whose ranks get the rest from what starts them."""
    return _trainer_pod(job, uid=uid) | {
        keys.ENV_PROCESS: PROCESS_TRAINER,
        keys.ENV_HEARTBEAT_FILE: f"{_HEARTBEATS}/{names.CONTAINER_TRAINER}",
        keys.ENV_RUN_DIR: names.DIR_RUN,
        keys.ENV_SCHEDULER_ADDRESS: f"localhost:{names.PORT_GRPC}",
        keys.ENV_WEIGHTS_PORT: str(names.PORT_WEIGHTS),
        **_signals(job),
        **_rank_weights(job),
        **_weights_address(job, f"{names.scheduler(job.metadata.name)}:{names.PORT_WEIGHTS}"),
        **_SERVING,
        **({} if job.spec.trainer.nodes == 1 else _meeting({"fieldRef": {"fieldPath": "status.podIP"}})),
    }


def trainer_worker_variables(job: RLJob, *, uid: str) -> Variables:
    """Of the ranks of a further node."""
    trainer = names.trainer(job.metadata.name)
    return _trainer_pod(job, uid=uid) | {
        keys.ENV_HEARTBEAT_FILE: f"{_HEARTBEATS}/{names.CONTAINER_TRAINER}",
        keys.ENV_RUN_DIR: names.DIR_RUN,
        **_signals(job),
        keys.ENV_WEIGHTS_PORT: str(names.PORT_WEIGHTS),
        **_rank_weights(job),
        keys.ENV_NODE_ORDINAL: {"fieldRef": {"fieldPath": f"metadata.labels['{_LABEL_ORDINAL}']"}},
        **_SERVING,
        **_meeting(f"{trainer}-0.{trainer}"),
    }


def _signals(job: RLJob) -> Variables:
    """Ports of a node's ranks; of several each has its own."""
    ranks = {keys.ENV_RANK_SIGNALS_PORT: str(names.PORT_RANK_SIGNALS)}
    several = job.spec.trainer.processes_per_node > 1
    return {keys.ENV_SIGNALS_PORT: str(names.PORT_TRAINER_SIGNALS), **(ranks if several else {})}


def _rank_weights(job: RLJob) -> Variables:
    """Where ranks above 0 serve their weights: each at a port of its own, under the address of its pod. One rank alone needs none of it."""
    if job.spec.trainer.ranks == 1:
        return {}
    second = {keys.ENV_RANK_WEIGHTS_PORT: str(names.PORT_RANK_WEIGHTS)}
    several = job.spec.trainer.processes_per_node > 1
    return {keys.ENV_POD_IP: {"fieldRef": {"fieldPath": "status.podIP"}}, **(second if several else {})}


def rank_weights_ports(job: RLJob) -> dict[str, int]:
    """Name -> port of weights of the ranks of a node, its first one left out."""
    return {f"rank-weights-{n}": names.PORT_RANK_WEIGHTS + n - 1 for n in range(1, job.spec.trainer.processes_per_node)}


def rank_ports(job: RLJob) -> dict[str, int]:
    """Name -> signals port of the ranks of a node, its first one left out."""
    return {f"rank-signals-{n}": names.PORT_RANK_SIGNALS + n - 1 for n in range(1, job.spec.trainer.processes_per_node)}


def _meeting(host: str | dict[str, Any]) -> Variables:
    """Where the trainer's ranks meet; rank 0's own pod knows its address before there is a name for it."""
    return {keys.ENV_MASTER_ADDR: host, keys.ENV_MASTER_PORT: str(names.PORT_RANKS)}


def generator_variables(
    job: RLJob, *, pool: GeneratorPool, uid: str, dials: ExposedAddresses | None = None
) -> Variables:
    """Of a generator; its ordinal is in the name of its pod. `dials`: the scheduler is in another cluster."""
    return {
        **_COMMON,
        "HF_HOME": f"{_HOME}/huggingface",
        "HF_HUB_OFFLINE": "1",  # its NetworkPolicy lets it reach no hub: asking would only take time
        keys.ENV_POOL: pool.name,
        keys.ENV_POD_NAME: {"fieldRef": {"fieldPath": "metadata.name"}},
        keys.ENV_RUN_DIR: names.DIR_RUN,
        keys.ENV_HEARTBEAT_FILE: f"{names.DIR_RUN}/{keys.DIR_HEARTBEATS}/{names.CONTAINER_GENERATOR}",
        keys.ENV_SCHEDULER_ADDRESS: f"{names.scheduler(job.metadata.name)}:{names.PORT_GRPC}",
        keys.ENV_SIGNALS_PORT: str(names.PORT_SIGNALS),
        keys.ENV_WEIGHTS_PORT: str(names.PORT_WEIGHTS),
        keys.ENV_POD_IP: {"fieldRef": {"fieldPath": "status.podIP"}},
        **_SERVING,
        **({} if dials is None else _from_afar(dials, job=job, cluster=pool.cluster_name or names.HOME, uid=uid)),
    }


def by_grpc(variables: Variables, *, port: str | None) -> Variables:
    """As the release before `weights.http` had them. `port`: what it called the port of weights; None: it had none here."""
    named = {port if name == keys.ENV_WEIGHTS_PORT else name: value for name, value in variables.items()}
    return {name: value for name, value in named.items() if name not in (None, keys.ENV_POD_IP)}


def _weights_address(job: RLJob, address: str) -> Variables:
    """At which generators reach the trainer's weights; through a folder they are had without."""
    return {} if job.spec.weights.folder is not None else {keys.ENV_WEIGHTS_ADDRESS: address}


def _from_afar(dials: ExposedAddresses, *, job: RLJob, cluster: str, uid: str) -> Variables:
    """How a generator in `cluster` reaches a scheduler in another one."""
    return {
        keys.ENV_CLUSTER: cluster,
        keys.ENV_SCHEDULER_ADDRESS: dials.scheduler,
        keys.ENV_SCHEDULER_TLS_NAME: names.tls_name("scheduler", uid=uid),
        **_weights_address(job, dials.weights),
        keys.ENV_WEIGHTS_TLS_NAME: names.tls_name("weights", uid=uid),
    }


def merged_environment(ours: Variables, given: Sequence[EnvVar]) -> list[Built]:
    """The environment as a list: the job's variables over our defaults, ours with the prefix over everything."""
    theirs: Variables = {variable.name: _source(variable) for variable in given}
    protected = {name: value for name, value in ours.items() if name.startswith(OWN_PREFIX)}
    return [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
        for name, value in (ours | theirs | protected).items()
    ]


def _source(variable: EnvVar) -> str | dict[str, Any]:
    return variable.value or "" if variable.value_from is None else as_given(variable.value_from)


def _unset(container: "Container", *, pod: Pod) -> Variables:
    """Nothing for each variable of ours that the container has no use for: keys of `envFrom` cannot be seen from here, and `env` goes over them."""
    return {} if not pod.env_from else {name: "" for name in _OURS if name not in container.variables}


_OURS = sorted(
    {value for name, value in vars(keys).items() if name.startswith("ENV_") and value.startswith(OWN_PREFIX)}
)


def _trainer_pod(job: RLJob, *, uid: str) -> Variables:
    store = names.store_dir(job.metadata.name, uid=uid)
    return {
        **_COMMON,
        "HF_HOME": huggingface_dir(job, uid=uid),
        keys.ENV_STORE_DIR: store,
        **({keys.ENV_SHARED_DIR: names.DIR_SHARED} if job.spec.has_model else {}),  # none is prepared, or waited for
        keys.ENV_CODE_DIR: names.DIR_RUN if job.spec.task.code is None else names.DIR_CODE,
    }


_DEFAULTS: Variables = {
    "HOME": _HOME,
    "USER": "streamrl",  # libraries ask who runs them, and an image need not know our user's number
    "XDG_CACHE_HOME": f"{_HOME}/cache",
    "PYTHONUNBUFFERED": "1",
}
_COMMON: Variables = {**_DEFAULTS, keys.ENV_JOB_FILE: _JOB_FILE}
_SERVING: Variables = {keys.ENV_BIND_HOST: _ANY_ADDRESS, keys.ENV_TLS_DIR: names.DIR_TLS, keys.ENV_STAY: "1"}

_READY = "/healthz"
"""Page of the signals port. It says no while a process loads or waits for another, and nobody is helped by killing one that waits."""


_START_PERIOD_S = 2
_READY_PERIOD_S = 5
_ALIVE_FAILURES = 6
"""In a row. With a file as old as a person is told of at the first, and the bound's rest in between, the last is at the bound."""
_ALIVE_GRACE_S = 5
"""Between SIGTERM and SIGKILL: a process without a heartbeat hears nothing, and has no use for its pod's grace."""
_TIMEOUT_S = 5
_ALIVE = """
import os, sys, time
try:
    silent_s = time.time() - os.stat(sys.argv[1]).st_mtime
except FileNotFoundError:
    sys.exit(0)
if silent_s > float(sys.argv[2]):
    sys.exit(f"no sign of life for {silent_s:.0f} s")
""".strip()
"""By Python, since every image has it; without its site packages it takes 10 ms. An image of an earlier release writes no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One of our containers before the job's changes."""

    name: str
    module: str
    """Run by `python -m`."""
    arguments: Sequence[str] = ()
    variables: Variables
    mounts: Mapping[str, str]
    """Directory -> volume."""
    sub_paths: Mapping[str, str] = field(default_factory=dict)
    """Directory -> what of its volume is seen there; a directory that is not named: all."""
    read_only: Sequence[str] = ()
    """Volumes, or directories, that it only reads."""
    ports: Mapping[str, int] = field(default_factory=dict)
    signals_port: int | None = None
    """Given: it is ready by this port. With a heartbeat file it is alive by that, which nobody outside of the container can keep from being
    touched or touch himself."""
    start_deadline_s: int | None = None
    """Given: it has started only when it is ready, and what comes after it in the pod waits for that, so long at most."""
    resources: Resources | None = None
    """None: those that the job gives its main container."""
    image: str | None = None
    """None: the pod's."""
    sidecar: bool = False
    is_ours_alone: bool = False
    """The job's environment and mounts are not for it."""


def _security(*, locks_memory: bool = False, **chosen: object) -> Built:
    """Of every container, the job's own too; `chosen`: what it may choose."""
    return {
        **chosen,
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if locks_memory else {})},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def extra(container: ExtraContainer) -> Built:
    """A container that the job adds, as it is but for what Pod Security "restricted" asks for."""
    built = as_given(container)
    return {**built, "securityContext": _security(**built.get("securityContext", {}))}


def build(container: Container, *, image: str, pod: Pod) -> Built:
    """The container with the job's changes merged in."""
    if container.is_ours_alone:
        pod = pod.model_copy(update={"env": (), "env_from": (), "volume_mounts": ()})
    built: Built = {
        "name": container.name,
        "image": container.image or image,
        "imagePullPolicy": pod.image_pull_policy,
        "command": ["python", "-m", container.module, *container.arguments],
        "env": merged_environment({**container.variables, **_unset(container, pod=pod)}, pod.env),
        "resources": as_given(container.resources or pod.resources),
        "volumeMounts": _mounts(container, given=pod.volume_mounts),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _security(
            readOnlyRootFilesystem=True, locks_memory=pod.locks_memory and container.resources is None
        ),
    }
    if pod.lifecycle is not None and container.resources is None:
        built["lifecycle"] = as_given(pod.lifecycle)
    if pod.env_from:
        built["envFrom"] = [as_given(source) for source in pod.env_from]
    if container.sidecar:
        built["restartPolicy"] = "Always"
    if container.ports:
        built["ports"] = [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in container.ports.items()
        ]
    return built | _probes(container)


def _mounts(container: Container, *, given: Sequence[VolumeMount]) -> list[Built]:
    """Ours and the job's; the job may put a volume of its own in the place of scratch space, and of nothing else (`VolumeMount`)."""
    mounts: dict[str, Built] = {}
    for path, volume in container.mounts.items():
        read_only = {"readOnly": True} if {volume, path} & set(container.read_only) else {}
        mounts[path] = {"name": volume, "mountPath": path, **read_only}
    mounts |= {mount.mount_path: as_given(mount) for mount in given}
    for path, part in container.sub_paths.items():
        mounts[path]["subPath"] = "/".join(filter(None, (mounts[path].get("subPath"), part)))
    return list(mounts.values())


def as_given(part: SpecModel, *, only: type[SpecModel] = SpecModel) -> Built:
    """Return a piece of a Pod's specification as the job has it; `only`: the base class whose fields count, absent = all."""
    fields = set(only.model_fields) or None
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=fields)


def _probes(container: Container) -> Built:
    built: Built = {}
    if keys.ENV_HEARTBEAT_FILE in container.variables:
        built["livenessProbe"] = _alive(str(container.variables[keys.ENV_HEARTBEAT_FILE]))
    port = container.signals_port
    if port is not None:
        built["readinessProbe"] = _ready(port, period_s=_READY_PERIOD_S)
    if port is not None and container.start_deadline_s is not None:
        tries = container.start_deadline_s // _START_PERIOD_S
        built["startupProbe"] = _ready(port, period_s=_START_PERIOD_S) | {"failureThreshold": tries}
    return built


def _ready(port: int, *, period_s: int) -> Built:
    return {"httpGet": {"path": _READY, "port": port}, "timeoutSeconds": _TIMEOUT_S, "periodSeconds": period_s}


def _alive(heartbeat_file: str) -> Built:
    told_s = word_s(LIVENESS_S)
    return {
        "exec": {"command": ["python", "-I", "-S", "-c", _ALIVE, heartbeat_file, f"{told_s:g}"]},
        "timeoutSeconds": _TIMEOUT_S,
        "periodSeconds": int((LIVENESS_S - told_s) / _ALIVE_FAILURES),
        "failureThreshold": _ALIVE_FAILURES,
        "terminationGracePeriodSeconds": _ALIVE_GRACE_S,
    }
