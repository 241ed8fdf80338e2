"""What a trainer process is told: environment and job.

Owns: reading and checking both. Does not own: what follows from them (`main.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import UserError
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
from streamrl.spec import RLJobSpec, parse_job

_TOKEN_BYTES = 8
"""Of one completion token in a group: id and log-prob."""
_LEAST_WINDOW_BYTES = 32 * 2**20
"""Groups that wait while a micro-step runs: enough for thousands of short samples."""
_WINDOW_GROUPS = 4
"""At least so many of the longest groups fit into the window."""


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
        return max(_LEAST_WINDOW_BYTES, _WINDOW_GROUPS * task.group_size * task.sampling.max_tokens * _TOKEN_BYTES)


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from the environment and the job in the run folder.

    Raises:
        UserError, UserErrors: something is missing or wrong.
    """
    run_dir = Path(_required(environ, ENV_RUN_DIR))
    return Settings(
        run_dir=run_dir,
        process=_required(environ, ENV_PROCESS),
        spec=_read_spec(run_dir / FILE_JOB),
        scheduler_address=_required(environ, ENV_SCHEDULER_ADDRESS),
        grpc_port=_integer(environ, ENV_GRPC_PORT) or 0,
        signals_port=_integer(environ, ENV_SIGNALS_PORT) or 0,
        token=_required(environ, ENV_TOKEN),
        model_path=environ.get(ENV_MODEL_PATH) or None,
        threads=_integer(environ, ENV_THREADS),
    )


def _required(environ: Mapping[str, str], key: str) -> str:
    value = environ.get(key, "")
    if not value:
        raise UserError(field=key, rule="must be set in a trainer's environment")
    return value


def _integer(environ: Mapping[str, str], key: str) -> int | None:
    text = environ.get(key, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise UserError(field=key, rule="must be a whole number of at least 0", got=text)
    return int(text)


def _read_spec(path: Path) -> RLJobSpec:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(field=str(path), rule=f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(field=str(path), rule=f"is no JSON: {error}") from error
    return parse_job(document).spec
