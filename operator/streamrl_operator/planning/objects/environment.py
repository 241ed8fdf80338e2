"""Environment of each container. What begins with STREAMRL_ is ours; the rest are defaults that a job may change."""

from collections.abc import Sequence
from typing import Any

from streamrl import keys, names
from streamrl.spec import RLJob
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.pod import OWN_PREFIX, EnvVar
from streamrl_operator.planning.objects.meta import Built

Variables = dict[str, str | dict[str, Any]]
"""Name -> value, or where it comes from."""

PROCESS_SCHEDULER, PROCESS_TRAINER = "scheduler", "trainer-0"

_ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - NetworkPolicies say who may come in
_HOME = "/tmp"  # noqa: S108 - the one writable directory that every container has; the pod's own
_LABEL_ORDINAL = "apps.kubernetes.io/pod-index"
"""On every pod of a StatefulSet."""
_JOB_FILE = f"{names.DIR_JOB}/{keys.FILE_JOB}"


def prepare(job: RLJob, *, uid: str) -> Variables:
    """Of the container that makes the model ready."""
    # Some data sets of reasoning-gym iterate over sets of strings: their items follow the hash seed.
    return {**_trainer_pod(job, uid=uid), "PYTHONHASHSEED": "0"}


def scheduler(job: RLJob, *, uid: str) -> Variables:
    """Of the scheduler."""
    return _trainer_pod(job, uid=uid) | {
        keys.ENV_PROCESS: PROCESS_SCHEDULER,
        keys.ENV_RUN_DIR: names.DIR_RUN,
        keys.ENV_GRPC_PORT: str(names.PORT_GRPC),
        keys.ENV_SIGNALS_PORT: str(names.PORT_SIGNALS),
        **_SERVING,
    }


def trainer(job: RLJob, *, uid: str) -> Variables:
    """Of the trainer, whose ranks get the rest from what starts them."""
    return _trainer_pod(job, uid=uid) | {
        keys.ENV_PROCESS: PROCESS_TRAINER,
        keys.ENV_RUN_DIR: names.DIR_RUN,
        keys.ENV_SCHEDULER_ADDRESS: f"localhost:{names.PORT_GRPC}",
        keys.ENV_GRPC_PORT: str(names.PORT_WEIGHTS),
        keys.ENV_SIGNALS_PORT: str(names.PORT_TRAINER_SIGNALS),
        keys.ENV_WEIGHTS_ADDRESS: f"{names.scheduler(job.metadata.name)}:{names.PORT_WEIGHTS}",
        **_SERVING,
        **({} if job.spec.trainer.nodes == 1 else _meeting({"fieldRef": {"fieldPath": "status.podIP"}})),
    }


def trainer_worker(job: RLJob, *, uid: str) -> Variables:
    """Of the ranks of a further node."""
    trainer = names.trainer(job.metadata.name)
    return _trainer_pod(job, uid=uid) | {
        keys.ENV_RUN_DIR: names.DIR_RUN,
        keys.ENV_SIGNALS_PORT: str(names.PORT_TRAINER_SIGNALS),
        keys.ENV_NODE_ORDINAL: {"fieldRef": {"fieldPath": f"metadata.labels['{_LABEL_ORDINAL}']"}},
        **_SERVING,
        **_meeting(f"{trainer}-0.{trainer}"),
    }


def _meeting(host: str | dict[str, Any]) -> Variables:
    """Where the trainer's ranks meet; rank 0's own pod knows its address before there is a name for it."""
    return {keys.ENV_MASTER_ADDR: host, keys.ENV_MASTER_PORT: str(names.PORT_RANKS)}


def generator(job: RLJob, *, pool: GeneratorPool) -> Variables:
    """Of a generator; its ordinal is in the name of its pod."""
    return {
        **_COMMON,
        "HF_HOME": f"{_HOME}/huggingface",
        "HF_HUB_OFFLINE": "1",  # its NetworkPolicy lets it reach no hub: asking would only take time
        keys.ENV_POOL: pool.name,
        keys.ENV_POD_NAME: {"fieldRef": {"fieldPath": "metadata.name"}},
        keys.ENV_RUN_DIR: names.DIR_RUN,
        keys.ENV_SCHEDULER_ADDRESS: f"{names.scheduler(job.metadata.name)}:{names.PORT_GRPC}",
        keys.ENV_SIGNALS_PORT: str(names.PORT_SIGNALS),
        **_SERVING,
    }


def merged(ours: Variables, given: Sequence[EnvVar]) -> list[Built]:
    """The environment as a list: the job's variables over our defaults, ours with the prefix over everything."""
    theirs: Variables = {variable.name: _source(variable) for variable in given}
    protected = {name: value for name, value in ours.items() if name.startswith(OWN_PREFIX)}
    return [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
        for name, value in (ours | theirs | protected).items()
    ]


def _source(variable: EnvVar) -> str | dict[str, Any]:
    if variable.secret_key is None:
        return variable.value or ""
    return {"secretKeyRef": variable.secret_key.model_dump(mode="json", by_alias=True)}


def _trainer_pod(job: RLJob, *, uid: str) -> Variables:
    store = names.store_dir(job.metadata.name, uid=uid)
    simulated = job.spec.trainer.engine.simulated is not None  # nobody prepares a model, so nobody may wait for one
    return {
        **_COMMON,
        "HF_HOME": f"{store}/huggingface",  # on the volume: loaded once, seen by all three, there after a restart
        keys.ENV_STORE_DIR: store,
        **({} if simulated else {keys.ENV_SHARED_DIR: names.DIR_SHARED}),
        keys.ENV_CODE_DIR: names.DIR_RUN if job.spec.task.code is None else names.DIR_CODE,
    }


_COMMON: Variables = {
    "HOME": _HOME,
    "USER": "streamrl",  # libraries ask who runs them, and an image need not know our user's number
    "XDG_CACHE_HOME": f"{_HOME}/cache",
    "PYTHONUNBUFFERED": "1",
    keys.ENV_JOB_FILE: _JOB_FILE,
}
_SERVING: Variables = {keys.ENV_BIND_HOST: _ANY_ADDRESS, keys.ENV_TLS_DIR: names.DIR_TLS, keys.ENV_STAY: "1"}
