"""The run folder: everything that a run leaves behind, in one directory, used by one runner at a time.

job.json  run.json  lock  journal.sqlite  archive/  metrics/  logs/  endpoints/  checkpoints/  model/  result.json  report.html

All of it is its owner's alone (`private_files`): prompts, answers and weights may be confidential, and logs may hold a secret of the user's.
The lock is advisory and dies with its holder.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.errors import UserError
from streamrl.files import MissingFileError, open_regular, read_json
from streamrl.spec import RLJob, read_job
from streamrl_cli import console
from streamrl_workers.process.silences import Silence, read_silences
from streamrl_workers.stream.run_folder import write_json_atomically

DEFAULT_PARENT = Path("runs")
"""Folder of run folders whose path is not given."""
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
        result = self.result()
        return result is not None and result["status"] == "succeeded"

    def result(self) -> dict[str, Any] | None:
        """What `result.json` says, with a `status`; None: the run has not ended. Raises `UserError`: it is no result."""
        path = self.file(keys.FILE_RESULT)
        try:
            result = read_json(path, beneath=self.path)
        except MissingFileError:
            return None
        return _mapping(result, path=path, key="status")

    def silences(self) -> dict[str, Silence]:
        """Return the newest notice of each process that showed no sign of life."""
        return read_silences([self.file(keys.DIR_HEARTBEATS)])

    def file(self, *parts: str) -> Path:
        """Path of something in the folder."""
        return self.path.joinpath(*parts)


@contextmanager
def private_files() -> Iterator[int]:
    """Files that are made in the block, and by processes that are started in it, are their owner's alone. Gives the umask before."""
    before = os.umask(0o077)
    try:
        yield before
    finally:
        os.umask(before)


def create_folder(job: RLJob, *, base_dir: Path, parent: Path, path: Path | None = None) -> RunFolder:
    """Make a new run folder under `parent` (or exactly `path`) and store the job in it. That of a run that ended without a step is emptied first.

    Raises `UserError`: the folder has something else, is in use, or cannot be written.
    """
    folder = path or parent / f"{job.metadata.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            _empty(folder)
        for sub in (keys.DIR_ENDPOINTS, keys.DIR_METRICS, keys.DIR_LOGS, keys.DIR_CHECKPOINTS):
            (folder / sub).mkdir()
        write_json_atomically(folder / keys.FILE_JOB, job.model_dump(mode="json", by_alias=True, exclude_none=True))
        write_json_atomically(folder / FILE_RUN, {"base_dir": str(base_dir.resolve()), "created_s": time.time()})
    except OSError as error:
        raise UserError(field="--run-dir", rule=f"cannot be written ({error.strerror})", got=str(folder)) from None
    return RunFolder(path=folder.resolve(), job=job, base_dir=base_dir.resolve())


_OF_A_RUN = frozenset(
    (FILE_RUN, FILE_LOCK, *(value for name, value in vars(keys).items() if name.startswith(("FILE_", "DIR_"))))
)
"""Names of what lies in a run folder."""


def _empty(folder: Path) -> None:
    """Remove what a run has left that ended before its first step. Raises `UserError`: there is something else, or a step."""
    names = {path.name for path in folder.iterdir()}
    foreign = {name for name in names if name not in _OF_A_RUN and not name.startswith(keys.FILE_JOURNAL)}
    if foreign or FILE_RUN not in names:
        raise _not_empty(folder)
    if FILE_LOCK not in names:  # the run that made the folder may still copy a checkpoint into it
        rule, fix = "has a run that has not begun", "wait until it has, use --resume, or remove the folder"
        raise UserError(field="--run-dir", rule=rule, got=str(folder), fix=fix)
    with hold(folder / FILE_LOCK, run=str(folder)):
        if _has_step(folder):
            raise _not_empty(folder)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _has_step(folder: Path) -> bool:
    """Return whether the run has taken a step of its own; a checkpoint that it took over is none."""
    from streamrl_workers.scheduler.journal.store import (
        open_for_reading,
        translated,
    )  # half a second, and needed here alone
    from streamrl_workers.scheduler.journal.tables import read_steps

    lines, journal = folder / keys.DIR_METRICS / "steps.jsonl", folder / keys.FILE_JOURNAL
    if lines.exists() and lines.stat().st_size:
        return True
    # A line comes after its record, and may be lost. A journal that cannot be read is one that a start has left half made.
    with suppress(UserError), translated(journal), closing(open_for_reading(journal)) as connection:
        if read_steps(connection):
            return True
    adopted = (folder / keys.FILE_ADOPTED).exists()
    return len(list((folder / keys.DIR_CHECKPOINTS).glob("step-*[0-9]"))) > adopted


def _not_empty(folder: Path) -> UserError:
    return UserError(
        field="--run-dir",
        rule="must be a new or empty folder, or a run's without a step",
        got=str(folder),
        fix="use --resume to go on with it",
    )


def open_folder(path: Path) -> RunFolder:
    """Open an existing run folder. What is in it may be foreign: nothing of it is run, and no link in it is followed.

    Raises `UserError`: it is not a run folder, or its files do not parse. Raises `UserErrors`: its job is not valid.
    """
    try:
        run = read_json(path / FILE_RUN, beneath=path)
        job = read_job(path / keys.FILE_JOB, beneath=path)
    except MissingFileError as error:
        raise UserError(
            field=str(path),
            rule=f"is not a run folder ({Path(error.field).name} is missing)",
            fix="name a folder that `streamrl run` made",
        ) from None
    base_dir = Path(_mapping(run, path=path / FILE_RUN, key="base_dir")["base_dir"])
    return RunFolder(path=path.resolve(), job=job, base_dir=base_dir)


def open_code(path: Path) -> RunFolder:
    """Open a run folder whose code is run, and print the directory of that code. Every command that runs it opens it here.

    Raises `UserError`: as of `open_folder`, or it cannot be the code of this user's own run.
    """
    folder = open_folder(path)
    _check_code_dir(folder)
    console.out(f"code: {folder.base_dir}")
    return folder


def _check_code_dir(folder: RunFolder) -> None:
    """Raise `UserError`: the folder is another user's, or the directory is none, or lies in the folder itself."""
    file = folder.file(FILE_RUN)
    with open_regular(file, beneath=folder.path) as opened:
        owner = os.fstat(opened.fileno()).st_uid
    if owner not in (0, owner_of_new_files(folder.path)):
        raise UserError(
            field=str(file),
            rule=f"belongs to another user (uid {owner}), and this command runs the code that it names",
            fix="copy the folder once you trust it",
        )
    directory = folder.base_dir
    if not directory.is_absolute() or not directory.is_dir():
        rule, fix = (
            "base_dir must be a directory that exists, by its absolute path",
            "write where the job file lies now",
        )
    elif directory.resolve().is_relative_to(folder.path):
        rule, fix = "base_dir must not lie in the run folder, which holds no code", "write where the job file lies"
    else:
        return
    raise UserError(field=str(file), rule=rule, got=str(directory), fix=fix)


def owner_of_new_files(directory: Path) -> int:
    """Who owns a file that this process makes there: not always this user, on a network's file system. Raises `UserError`."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError as error:
        raise UserError(
            field=str(directory), rule=f"cannot be written: {error.strerror}", fix="check the run folder"
        ) from None


def newest_folder(parent: Path) -> Path:
    """The run folder under `parent` that was made last. Raises `UserError`: there is none."""
    runs = [child for child in parent.glob("*") if (child / FILE_RUN).is_file()]
    if not runs:
        raise UserError(field="--resume", rule=f"found no run in {parent}", fix="name the run folder")
    return max(runs, key=lambda run: (run / FILE_RUN).stat().st_mtime)


def _mapping(document: object, *, path: Path, key: str) -> dict[str, Any]:
    """`document` if it is an object whose `key` is a text."""
    if not isinstance(document, dict) or not isinstance(document.get(key), str):
        raise UserError(field=str(path), rule=f"must be an object with a text {key}", got=document)
    return document


@contextmanager
def hold(path: Path, *, run: str) -> Iterator[None]:
    """Hold the lock file `path`. Raises `UserError`: another process holds it."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise UserError(
            field=str(path), rule=f"cannot be written: {error.strerror}", fix="check the run folder"
        ) from None
    with os.fdopen(handle, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                field=run, rule="is in use by another `streamrl run`", fix="wait for it to end, or stop it with Ctrl-C"
            ) from None
        yield
