"""A run that begins with another one's newest checkpoint: its weights, optimiser, random state and steps.

    <other run>/checkpoints/step-k/  ── hard links ──▶  checkpoints/step-k/   the trainer goes on from there
                                     ── digest of its k steps ──▶  journal    the k oldest steps are those, and nobody takes them back

The other run's journal stays with it: its groups are none of this run's. The new journal knows their steps by one digest, as it knows its own
compacted ones, so `streamrl journal check` proves that the weights have these steps behind them and no others. Does not own whether
the checkpoint fits the job's model: the trainer finds that when it loads it.

`adopted.json` beside the checkpoints is written last. A start that was interrupted before is made again.
"""

import contextlib
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from streamrl.errors import UserError
from streamrl.files import MissingFileError, replace_file, sync
from streamrl.keys import DIR_CHECKPOINTS, FILE_ADOPTED
from streamrl.spec.storage import ResumeFrom
from streamrl_workers.scheduler.journal.check import CheckpointFact, read_checkpoints
from streamrl_workers.stream.digests import read_count, read_sealed, seal

_PARTIAL = ".partial-adopted"
_FIELD = "spec.storage.checkpoints.resumeFrom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What a run has taken over."""

    run: str
    """Name of the other run's directory."""
    step: int
    """Steps of its checkpoint."""
    chain: str
    """Digest of what they consumed (`stream/digests.py`)."""
    path: str
    """The checkpoint, from the directory that holds checkpoints/."""


def read_adopted(store: Path) -> Adopted | None:
    """What the run with these checkpoints has taken over; None: nothing. Raises `UserError`: the file is not what was written."""
    file = store / FILE_ADOPTED
    try:
        document = read_sealed(file, beneath=store)
        return Adopted(**(document | {"step": read_count(document, "step")}))
    except MissingFileError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(field=str(file), rule=f"cannot be read: {error}", fix="restore it from a copy") from error


def _holds_checkpoints(directory: Path) -> bool:
    """False also of what may not be looked into, such as `lost+found`."""
    with contextlib.suppress(PermissionError):
        return (directory / DIR_CHECKPOINTS).is_dir()
    return False


def adopt_from_volume(given: ResumeFrom, *, store: Path) -> None:
    """Take over the run that the job names, which lies beside its own directory on the volume. Nothing is done twice.

    Raises:
        UserError: there is no such run, or it has no checkpoint.
    """
    if read_adopted(store) is not None:
        return
    others = [path for path in sorted(store.parent.iterdir()) if path != store and _holds_checkpoints(path)]
    found = [path for path in others if given.run in (None, path.name)]
    if len(found) != 1:
        known = ", ".join(path.name for path in others) or "none"
        rule = "must name a run on the volume" if len(others) != 1 or given.run else "must name a run"
        got = given.run or f"{len(found)} runs"
        raise UserError(field=f"{_FIELD}.run", rule=rule, got=got, fix=f"runs with checkpoints there: {known}")
    adopt(newest_of(found[0]), source=found[0], store=store)


def newest_of(run: Path) -> CheckpointFact:
    """Of the run whose checkpoints lie in this directory. Raises `UserError`: it has none that can be read."""
    good, damaged = read_checkpoints(run / DIR_CHECKPOINTS)
    if not good:
        why = f" that can be read ({damaged[0][0]}: {damaged[0][1]})" if damaged else ""
        raise UserError(field=str(run), rule=f"has no checkpoint{why}", fix="name a run that has written one")
    return good[0]


def adopt(checkpoint: CheckpointFact, *, source: Path, store: Path) -> None:
    """Make the checkpoint the first one of a new run. Raises `UserError`: the disk does not take it."""
    path = f"{DIR_CHECKPOINTS}/{checkpoint.path}"
    step, chain = checkpoint.step, checkpoint.history.chain_at(checkpoint.step)
    try:
        _link_tree(source / path, store / path)
        replace_file(
            store / FILE_ADOPTED, seal(asdict(Adopted(run=source.name, step=step, chain=chain, path=path))).encode()
        )
    except (OSError, shutil.Error) as error:
        rule = f"cannot be taken over: {getattr(error, 'strerror', None) or error}"
        raise UserError(
            field=str(source / path), rule=rule, fix="see that this user may read it, and that there is room"
        ) from error


def _link_tree(source: Path, target: Path) -> None:
    """The same files by another name, where the file system has that; else copies. Whole or not there."""
    if target.exists():
        return
    partial = target.with_name(_PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, partial, symlinks=True, copy_function=_link)
    partial.rename(target)
    sync(target.parent)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another volume, or one without links
        shutil.copy2(source, target, follow_symlinks=False)
        sync(Path(target))
    return target
