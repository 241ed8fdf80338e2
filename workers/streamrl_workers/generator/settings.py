"""What a generator process is told: environment and job.

Owns: reading and checking both. Does not own: what follows from them (`main.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import (
    ENV_CLUSTER,
    ENV_CODE_DIR,
    ENV_MODEL_PATH,
    ENV_POD_IP,
    ENV_POD_NAME,
    ENV_POOL,
    ENV_PROCESS,
    ENV_RUN_DIR,
    ENV_SCHEDULER_ADDRESS,
    ENV_SIGNALS_PORT,
    ENV_THREADS,
    ENV_WEIGHTS_ADDRESS,
    ENV_WEIGHTS_PORT,
    ENV_WEIGHTS_TLS_NAME,
)
from streamrl.metrics import worker_labels
from streamrl.spec import RLJobSpec, read_job
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.rljob import Metadata
from streamrl_workers.process.environment_variables import (
    WorkerVariables,
    certificates,
    integer,
    job_file,
    port,
    required,
    worker_variables,
)
from streamrl_workers.stream.scheduler_link import SchedulerAddress
from streamrl_workers.stream.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """Everything that `main.py` wires from."""

    run_dir: Path
    process: str
    pool: GeneratorPool
    spec: RLJobSpec
    metadata: Metadata  # of the job
    scheduler_address: str  # host:port
    signals_port: int  # 0 = any
    model_path: str | None
    base_dir: Path = Path()  # where relative paths of the job begin
    threads: int | None
    weights_address: str | None = None  # host:port; None: as the scheduler announces it
    weights_tls: Tls | None = None  # of the pull: in another cluster its server has a name of its own
    cluster: str = ""  # "": the trainer's
    weights_port: int | None = None  # 0 = any; None: it serves nobody
    pod_ip: str = ""  # "": others reach it where it is bound
    variables: WorkerVariables = field(default_factory=WorkerVariables)

    @property
    def scheduler(self) -> SchedulerAddress:
        """Where it is, and who we are to it."""
        variables = self.variables
        return SchedulerAddress(scheduler=self.scheduler_address, token=variables.token, tls=variables.tls)

    @property
    def is_frozen(self) -> bool:
        """Whether it says log-probs of finished samples, by a model that never changes."""
        return self.spec.frozen_pool == self.pool

    @property
    def metric_labels(self) -> dict[str, str]:
        """On every series."""
        return worker_labels(self.metadata, role="generator", process=self.process, pool=self.pool.name)


def read_settings(environ: Mapping[str, str]) -> GeneratorSettings:
    """GeneratorSettings from the environment and the job in the run folder.

    Raises:
        UserError, UserErrors: something is missing or wrong.
    """
    run_dir = Path(required(environ, ENV_RUN_DIR))
    job = read_job(job_file(environ, run_dir=run_dir))
    pool = required(environ, ENV_POOL)
    return GeneratorSettings(
        run_dir=run_dir,
        process=environ.get(ENV_PROCESS) or _name_in_pod(environ, pool=pool),
        pool=_find_pool(job.spec, name=pool),
        spec=job.spec,
        metadata=job.metadata,
        scheduler_address=required(environ, ENV_SCHEDULER_ADDRESS),
        signals_port=port(environ, ENV_SIGNALS_PORT),
        cluster=environ.get(ENV_CLUSTER, ""),
        weights_port=port(environ, ENV_WEIGHTS_PORT) if environ.get(ENV_WEIGHTS_PORT) else None,
        pod_ip=environ.get(ENV_POD_IP, ""),
        variables=worker_variables(environ),
        model_path=environ.get(ENV_MODEL_PATH) or None,
        base_dir=Path(environ.get(ENV_CODE_DIR) or run_dir),
        threads=integer(environ, ENV_THREADS),
        weights_address=environ.get(ENV_WEIGHTS_ADDRESS) or None,
        weights_tls=certificates(environ, name_key=ENV_WEIGHTS_TLS_NAME),
    )


def _name_in_pod(environ: Mapping[str, str], *, pool: str) -> str:
    """`generator-<pool>-<ordinal>` of the pod `<job>-<pool>-<ordinal>`; without a pod the name must be given."""
    pod = environ.get(ENV_POD_NAME)
    if not pod:
        return required(environ, ENV_PROCESS)
    owner, _, ordinal = pod.rpartition("-")
    if not owner.endswith(f"-{pool}") or not (ordinal.isascii() and ordinal.isdigit()):
        raise UserError(field=ENV_POD_NAME, rule=f"must end with -{pool}-<ordinal>, as {ENV_POOL} says", got=pod)
    return f"generator-{pool}-{int(ordinal)}"


def _find_pool(spec: RLJobSpec, *, name: str) -> GeneratorPool:
    for pool in spec.generators:
        if pool.name == name:
            return pool
    known = ", ".join(pool.name for pool in spec.generators)
    raise UserError(field=ENV_POOL, rule=f"must name a pool of the job ({known})", got=name)
