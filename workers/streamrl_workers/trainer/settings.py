"""What a trainer process is told: environment and job.

Owns: reading and checking both. Does not own: what follows from them (`main.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.errors import EXIT_RANK_LOST, EXIT_RETRY, UserError
from streamrl.keys import (
    ENV_CODE_DIR,
    ENV_LOCAL_RANK,
    ENV_MASTER_ADDR,
    ENV_MASTER_PORT,
    ENV_MODEL_PATH,
    ENV_POD_IP,
    ENV_PROCESS,
    ENV_RANK,
    ENV_RUN_DIR,
    ENV_SCHEDULER_ADDRESS,
    ENV_SIGNALS_PORT,
    ENV_THREADS,
    ENV_WEIGHTS_ADDRESS,
    ENV_WEIGHTS_PORT,
    ENV_WORLD_SIZE,
)
from streamrl.metrics import worker_labels
from streamrl.spec import RLJobSpec, read_job
from streamrl.spec.rljob import Metadata
from streamrl_workers.process.environment_variables import (
    WorkerVariables,
    integer,
    job_file,
    port,
    required,
    store_dir,
    worker_variables,
)
from streamrl_workers.stream.object_store import ObjectFolder
from streamrl_workers.trainer.engines.engine import RankEnvironment
from streamrl_workers.trainer.engines.process_group import Rendezvous
from streamrl_workers.weights.store import PULLED_KEPT
from streamrl_workers.weights.transports import TRANSPORTS, ServerSetup

_TOKEN_BYTES = 8
"""Of one completion token in a group: id and log-prob."""
_LEAST_WINDOW_BYTES = 32 * 2**20
"""Groups that wait while a micro-step runs: enough for thousands of short samples."""
_WINDOW_GROUPS = 4
"""At least so many of the longest groups fit into the window, if it may be so large."""
_MOST_WINDOW_BYTES = 96 * 2**20
"""The scheduler cuts off a peer for which 128 MiB wait; the rest is for what is no group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Everything that `main.py` wires from."""

    run_dir: Path
    store: Path  # what holds checkpoints and the model
    process: str
    spec: RLJobSpec
    metadata: Metadata  # of the job
    scheduler_address: str  # host:port; "" on ranks above 0, which do not speak with it
    weights_port: int  # 0 = any
    signals_port: int  # 0 = any
    token: str  # of the run, or of the ranks alone where certificates do its work
    model_path: str | None
    base_dir: Path  # where relative paths of the job begin
    threads: int | None
    env: RankEnvironment = field(default_factory=RankEnvironment)
    weights_address: str | None = None  # host:port that generators are told; None: where the server is bound
    pod_ip: str = ""  # "": generators and rank 0 reach this rank's weights where the server is bound
    variables: WorkerVariables = field(default_factory=WorkerVariables)

    @property
    def metric_labels(self) -> dict[str, str]:
        """On every series."""
        return worker_labels(self.metadata, role="trainer", process=self.process)

    @property
    def plugin_dir(self) -> Path | None:
        """Where plug-ins lie beside what is installed; None, with certificates: nowhere."""
        return self.base_dir if self.variables.tls is None else None

    @property
    def rendezvous(self) -> Rendezvous:
        """Where and how the ranks of this job meet."""
        return Rendezvous(env=self.env, token=self.token, timeout_s=self.spec.trainer.rank_timeout_seconds)

    @property
    def copies(self) -> ObjectFolder | None:
        """Where copies of checkpoints and model go, by the name of the folder that holds them here."""
        url, field = self.spec.storage.checkpoints.url, "spec.storage.checkpoints.url"
        return None if url is None else ObjectFolder.at(url, field=field).child(self.store.resolve().name)

    @property
    def lost_code(self) -> int:
        """Exit code of a rank that cannot go on because another one is not there."""
        return EXIT_RANK_LOST if self.spec.trainer.nodes > 1 else EXIT_RETRY

    @property
    def versions_kept(self) -> int:
        """Maximum number of weight versions to serve: while an evaluation holds back its successors, the trainer gets S + 1 ahead of it."""
        return self.spec.pipeline.staleness + 2

    @property
    def memory_versions(self) -> int:
        """Maximum number of them in memory: with a folder the older ones are there."""
        return 1 if TRANSPORTS[self.spec.weights.key].relay is None else self.versions_kept

    @property
    def memory_parts(self) -> int:
        """Maximum number of parts in memory of a rank above 0: of versions that rank 0 keeps while they are pulled, whether that reaches this rank or not."""
        return self.memory_versions + (PULLED_KEPT if self.memory_versions > 1 else 0)

    def is_needed(self, step: int, *, newest: int) -> bool:
        """Return whether generators may still be sent to version `step` once `newest` is announced: it is that, or an evaluation of it may hold it back."""
        return step == newest or (self._is_evaluated(step) and newest - step <= self.spec.pipeline.staleness)

    def is_offered(self, step: int) -> bool:
        """Return whether generators are told of version `step`. Those of a supervised job are told of what they evaluate."""
        spec = self.spec
        return bool(spec.generators) and (spec.algorithm.supervised is None or self._is_evaluated(step))

    def _is_evaluated(self, step: int) -> bool:
        return step % self.spec.task.evaluation.interval_steps == 0 or step >= self.spec.pipeline.steps

    @property
    def server_setup(self) -> ServerSetup:
        """What a server of weights is made from."""
        return ServerSetup(
            spec=self.spec.weights.value,
            store=self.store,
            copies=self.copies,
            newest_kept=self.versions_kept,
            token=self.token,
            tls=self.variables.tls,
            host=self.variables.bind_host,
            port=self.weights_port,
        )

    @property
    def window_bytes(self) -> int:
        """Bytes of groups that may wait in this process."""
        task = self.spec.task
        wanted_bytes = _WINDOW_GROUPS * task.group_size * task.sampling.max_tokens * _TOKEN_BYTES
        return min(_MOST_WINDOW_BYTES, max(_LEAST_WINDOW_BYTES, wanted_bytes))


def read_settings(environ: Mapping[str, str]) -> TrainerSettings:
    """TrainerSettings from the environment and the job in the run folder.

    Raises:
        UserError, UserErrors: something is missing or wrong.
    """
    run_dir = Path(required(environ, ENV_RUN_DIR))
    env = read_rank_environment(environ)
    variables = worker_variables(environ)
    job = read_job(job_file(environ, run_dir=run_dir))
    return TrainerSettings(
        run_dir=run_dir,
        store=store_dir(environ, run_dir=run_dir),
        process=environ.get(ENV_PROCESS) or f"trainer-{env.rank}",
        spec=job.spec,
        metadata=job.metadata,
        scheduler_address=required(environ, ENV_SCHEDULER_ADDRESS) if env.rank == 0 else "",
        weights_port=port(environ, ENV_WEIGHTS_PORT),
        signals_port=port(environ, ENV_SIGNALS_PORT),
        token=variables.token,
        model_path=environ.get(ENV_MODEL_PATH) or None,
        base_dir=Path(environ.get(ENV_CODE_DIR) or run_dir),
        threads=integer(environ, ENV_THREADS),
        env=env,
        weights_address=environ.get(ENV_WEIGHTS_ADDRESS) or None,
        pod_ip=environ.get(ENV_POD_IP, ""),
        variables=variables,
    )


def read_rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """This rank among the others, as torchrun's variables say it; without them it is alone."""
    rank, size = integer(environ, ENV_RANK) or 0, integer(environ, ENV_WORLD_SIZE)
    size = 1 if size is None else size
    if rank >= size:
        raise UserError(field=ENV_RANK, rule=f"must be below {ENV_WORLD_SIZE} ({size})", got=rank)
    if size == 1:
        return RankEnvironment()
    host, master_port = required(environ, ENV_MASTER_ADDR), port(environ, ENV_MASTER_PORT)
    if not master_port:
        raise UserError(field=ENV_MASTER_PORT, rule=f"must be a port from 1 to 65535 with {ENV_WORLD_SIZE} above 1")
    return RankEnvironment(
        rank=rank,
        local_rank=integer(environ, ENV_LOCAL_RANK) or 0,
        size=size,
        host=host,
        port=master_port,
    )
