"""Runs that lie beside a job's own directory on its volume: which one the job names, and their files by another name.

Does not own what a job takes of a run: a checkpoint (`scheduler/journal/adoption.py`), or its trained model (`take_model`).
"""

import contextlib
import os
import shutil
from pathlib import Path

from streamrl.errors import UserError
from streamrl.files import sync
from streamrl.keys import DIR_CHECKPOINTS, DIR_EXPORT
from streamrl.spec.storage import EarlierRun
from streamrl_workers.stream.object_store import make_directory

_CHECKPOINTS = "spec.storage.checkpoints"


def _holds_checkpoints(directory: Path) -> bool:
    """False also of what may not be looked into, such as `lost+found`."""
    with contextlib.suppress(PermissionError):
        return (directory / DIR_CHECKPOINTS).is_dir()
    return False


def find_run(given: EarlierRun, *, store: Path, field: str) -> Path:
    """Find the run that a job names, beside the job's own directory `store`. Raises `UserError`: it is not clear which."""
    others = [path for path in sorted(store.parent.iterdir()) if path != store and _holds_checkpoints(path)]
    found = [path for path in others if given.run in (None, path.name)]
    if len(found) != 1:
        known = ", ".join(path.name for path in others) or "none"
        rule = "must name a run on the volume" if len(others) != 1 or given.run else "must name a run"
        got = given.run or f"{len(found)} runs"
        raise UserError(
            field=f"{_CHECKPOINTS}.{field}.run", rule=rule, got=got, fix=f"runs with checkpoints there: {known}"
        )
    return found[0]


def trained_model(run: Path, *, field: str) -> Path:
    """Return the directory of the model that a run exported. Raises `UserError`: there is none."""
    directory = run / DIR_EXPORT
    if not directory.is_dir():
        raise UserError(
            field=field,
            rule="must name a run that has ended: its trained model is written then",
            got=str(run),
            fix="resume it until it ends, or go on from its newest checkpoint (--from, resumeFrom)",
        )
    return directory


def initial_model(store: Path) -> Path:
    """Return where a job keeps the model that `weightsFrom` names; its other containers see no more of the volume."""
    return store / "models" / "initial-model"


def take_model(given: EarlierRun, *, store: Path) -> Path:
    """Take the trained model of the run that a job names, once; return its directory.

    Raises:
        UserError: there is no such run, or it has no trained model, or the disk does not take it.
    """
    target, field = initial_model(store), "weightsFrom"
    if target.is_dir():
        return target
    source = trained_model(find_run(given, store=store, field=field), field=f"{_CHECKPOINTS}.{field}")
    try:
        make_directory(target, lambda beside: link_files(source, beside))
    except (OSError, shutil.Error) as error:
        raise not_taken(source, error) from error
    return target


def not_taken(source: Path, error: OSError | shutil.Error) -> UserError:
    """Return the error of files that cannot be taken from a run."""
    rule = f"cannot be taken over: {getattr(error, 'strerror', None) or error}"
    return UserError(field=str(source), rule=rule, fix="see that this user may read it, and that there is room")


def link_files(source: Path, target: Path) -> None:
    """Give the files of a directory a second name below `target`, where the file system has that; copy them elsewhere."""
    shutil.copytree(source, target, symlinks=True, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another volume, or one without links
        shutil.copy2(source, target, follow_symlinks=False)
        sync(Path(target))
    return target
