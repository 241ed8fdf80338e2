"""What a trainer process is told: environment and job.

Owns: reading and checking both. Does not own: what follows from them (`main.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.keys import (
    ENV_GRPC_PORT,
    ENV_MODEL_PATH,
    ENV_PROCESS,
    ENV_RUN_DIR,
    ENV_SCHEDULER_ADDRESS,
    ENV_SIGNALS_PORT,
    ENV_THREADS,
    ENV_TOKEN,
    FILE_JOB,
)
from streamrl.spec import RLJobSpec, read_job
from streamrl_workers.stream.environ import integer, port, required

_TOKEN_BYTES = 8
"""Of one completion token in a group: id and log-prob."""
_LEAST_WINDOW_BYTES = 32 * 2**20
"""Groups that wait while a micro-step runs: enough for thousands of short samples."""
_WINDOW_GROUPS = 4
"""At least so many of the longest groups fit into the window, if it may be so large."""
_MOST_WINDOW_BYTES = 96 * 2**20
"""The scheduler cuts off a peer for which 128 MiB wait; the rest is for what is no group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that `main.py` wires from."""

    run_dir: Path
    process: str
    spec: RLJobSpec
    scheduler_address: str  # host:port
    grpc_port: int  # 0 = any
    signals_port: int  # 0 = any
    token: str
    model_path: str | None
    threads: int | None

    @property
    def versions_kept(self) -> int:
        """Weight versions to serve: while an evaluation holds back its successors, the trainer gets S + 1 ahead of it."""
        return self.spec.pipeline.staleness + 2

    @property
    def window_bytes(self) -> int:
        """Bytes of groups that may wait in this process."""
        task = self.spec.task
        wanted_bytes = _WINDOW_GROUPS * task.group_size * task.sampling.max_tokens * _TOKEN_BYTES
        return min(_MOST_WINDOW_BYTES, max(_LEAST_WINDOW_BYTES, wanted_bytes))


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from the environment and the job in the run folder.

    Raises:
        UserError, UserErrors: something is missing or wrong.
    """
    run_dir = Path(required(environ, ENV_RUN_DIR))
    return Settings(
        run_dir=run_dir,
        process=required(environ, ENV_PROCESS),
        spec=read_job(run_dir / FILE_JOB).spec,
        scheduler_address=required(environ, ENV_SCHEDULER_ADDRESS),
        grpc_port=port(environ, ENV_GRPC_PORT),
        signals_port=port(environ, ENV_SIGNALS_PORT),
        token=required(environ, ENV_TOKEN),
        model_path=environ.get(ENV_MODEL_PATH) or None,
        threads=integer(environ, ENV_THREADS),
    )
