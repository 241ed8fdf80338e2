"""What a generator process is told: environment and job.

Owns: reading and checking both. Does not own: what follows from them (`main.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import (
    ENV_MODEL_PATH,
    ENV_POOL,
    ENV_PROCESS,
    ENV_RUN_DIR,
    ENV_SCHEDULER_ADDRESS,
    ENV_SIGNALS_PORT,
    ENV_THREADS,
    ENV_TOKEN,
    FILE_JOB,
)
from streamrl.spec import RLJobSpec, read_job
from streamrl.spec.generators import GeneratorPool
from streamrl_workers.stream.environ import integer, port, required


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that `main.py` wires from."""

    run_dir: Path
    process: str
    pool: GeneratorPool
    spec: RLJobSpec
    scheduler_address: str  # host:port
    signals_port: int  # 0 = any
    token: str
    model_path: str | None
    threads: int | None


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from the environment and the job in the run folder.

    Raises:
        UserError, UserErrors: something is missing or wrong.
    """
    run_dir = Path(required(environ, ENV_RUN_DIR))
    spec = read_job(run_dir / FILE_JOB).spec
    return Settings(
        run_dir=run_dir,
        process=required(environ, ENV_PROCESS),
        pool=_find_pool(spec, name=required(environ, ENV_POOL)),
        spec=spec,
        scheduler_address=required(environ, ENV_SCHEDULER_ADDRESS),
        signals_port=port(environ, ENV_SIGNALS_PORT),
        token=required(environ, ENV_TOKEN),
        model_path=environ.get(ENV_MODEL_PATH) or None,
        threads=integer(environ, ENV_THREADS),
    )


def _find_pool(spec: RLJobSpec, *, name: str) -> GeneratorPool:
    for pool in spec.generators:
        if pool.name == name:
            return pool
    known = ", ".join(pool.name for pool in spec.generators)
    raise UserError(field=ENV_POOL, rule=f"must name a pool of the job ({known})", got=name)
