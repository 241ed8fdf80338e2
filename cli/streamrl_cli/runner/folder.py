"""The run folder: everything that a run leaves behind, in one directory.

job.json  run.json  journal.sqlite  metrics/  logs/  endpoints/  checkpoints/  model/  result.json  report.html
"""

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.errors import UserError
from streamrl.spec import RLJob, parse_job
from streamrl_workers.stream.files import write_json_atomically

FILE_RUN = "run.json"
"""{"base_dir", "created_s"}: where relative paths of the job start. Written once by the runner."""
FILE_LOCK = "lock"
"""Held (flock) by the runner that works on the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A run folder and the job in it."""

    path: Path
    job: RLJob
    base_dir: Path
    """Directory of the job file: relative paths and the user's modules start there."""

    @property
    def name(self) -> str:
        """Name of the run: the folder's."""
        return self.path.name

    @property
    def has_succeeded(self) -> bool:
        """Whether the scheduler has said that the run ended well; a run that failed can be resumed."""
        result = self.file(keys.FILE_RESULT)
        return result.exists() and read_json(result)["status"] == "succeeded"

    def file(self, *parts: str) -> Path:
        """Path of something in the folder."""
        return self.path.joinpath(*parts)


def create_folder(job: RLJob, *, base_dir: Path, parent: Path, path: Path | None = None) -> RunFolder:
    """Make a new run folder under `parent` (or exactly `path`) and store the job in it.

    Raises:
        UserError: the folder exists and is not empty, or cannot be written.
    """
    folder = path or parent / f"{job.metadata.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(
                field="--run-dir",
                rule="must be a new or empty folder",
                got=str(folder),
                fix="use --resume to go on with it",
            )
        for sub in (keys.DIR_ENDPOINTS, keys.DIR_METRICS, keys.DIR_LOGS, keys.DIR_CHECKPOINTS):
            (folder / sub).mkdir()
        write_json_atomically(folder / keys.FILE_JOB, job.model_dump(mode="json", by_alias=True, exclude_none=True))
        write_json_atomically(folder / FILE_RUN, {"base_dir": str(base_dir.resolve()), "created_s": time.time()})
    except OSError as error:
        raise UserError(field="--run-dir", rule=f"cannot be written ({error.strerror})", got=str(folder)) from None
    return RunFolder(path=folder.resolve(), job=job, base_dir=base_dir.resolve())


def open_folder(path: Path) -> RunFolder:
    """Open an existing run folder.

    Raises:
        UserError: it is not a run folder, or its files do not parse.
    """
    job_file, run_file = path / keys.FILE_JOB, path / FILE_RUN
    for file in (job_file, run_file):
        if not file.is_file():
            raise UserError(
                field=str(path),
                rule=f"is not a run folder ({file.name} is missing)",
                fix="name a folder that `streamrl run` made",
            )
    job = parse_job(read_json(job_file))
    return RunFolder(path=path.resolve(), job=job, base_dir=Path(read_json(run_file)["base_dir"]))


def newest_folder(parent: Path) -> Path:
    """The run folder under `parent` that was made last.

    Raises:
        UserError: there is none.
    """
    runs = [child for child in parent.glob("*") if (child / FILE_RUN).is_file()]
    if not runs:
        raise UserError(field="--resume", rule=f"found no run in {parent}", fix="name the run folder")
    return max(runs, key=lambda run: (run / FILE_RUN).stat().st_mtime)


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON is what it is
    """Parse a JSON file; a broken one is the user's to repair."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(field=str(path), rule=f"cannot be read as JSON ({error})") from None
