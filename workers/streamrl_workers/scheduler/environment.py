"""What the scheduler's process is told by its environment, checked and typed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import ENV_CODE_DIR, ENV_GRPC_PORT, ENV_PROCESS, ENV_RUN_DIR, ENV_SIGNALS_PORT, FILE_JOB
from streamrl_workers.stream.environ import Surroundings, job_file, port, required, store_dir, surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment as `streamrl.keys` defines it."""

    run_dir: Path
    process: str
    grpc_port: int
    signals_port: int
    code_dir: Path
    """Paths of the job are relative to it, the user's modules lie in it."""
    job_file: Path
    store_dir: Path
    """What holds the checkpoints."""
    around: Surroundings = field(default_factory=Surroundings)

    @property
    def job_is_elsewhere(self) -> bool:
        """Whether the run folder has no job of its own."""
        return self.job_file != self.run_dir / FILE_JOB

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Environment":
        """Read and check."""
        run_dir = Path(required(environ, ENV_RUN_DIR))
        if not run_dir.is_dir():
            raise UserError(field=ENV_RUN_DIR, rule="must be a directory", got=str(run_dir))
        return cls(
            run_dir=run_dir,
            process=environ.get(ENV_PROCESS, "scheduler"),
            around=surroundings(environ),
            grpc_port=port(environ, ENV_GRPC_PORT),
            signals_port=port(environ, ENV_SIGNALS_PORT),
            code_dir=Path(environ.get(ENV_CODE_DIR) or run_dir),
            job_file=job_file(environ, run_dir=run_dir),
            store_dir=store_dir(environ, run_dir=run_dir),
        )
