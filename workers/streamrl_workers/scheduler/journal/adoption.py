"""A run that begins with another one's newest checkpoint: its weights, optimiser, random state and steps.

    <other run>/checkpoints/step-k/  ── hard links ──▶  checkpoints/step-k/   the trainer goes on from there
                                     ── digest of its k steps ──▶  journal    the k oldest steps are those, and nobody takes them back

The other run's journal stays with it: its groups are none of this run's. The new journal knows their steps by one digest, as it knows its own
compacted ones, so `streamrl journal check` proves that the weights have these steps behind them and no others. Does not own whether
the checkpoint fits the job's model: the trainer finds that when it loads it.

`adopted.json` beside the checkpoints is written last. A start that was interrupted before is made again.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from streamrl.errors import UserError
from streamrl.files import MissingFileError, replace_file, sync
from streamrl.keys import DIR_CHECKPOINTS, DIR_EXPORT, FILE_ADOPTED
from streamrl.spec.storage import ResumeFrom
from streamrl_workers.scheduler.journal.check import CheckpointFact, read_checkpoints
from streamrl_workers.stream.digests import read_count, read_sealed, seal
from streamrl_workers.stream.earlier_runs import find_run, link_files, not_taken

_PARTIAL = ".partial-adopted"


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


def adopt_from_volume(given: ResumeFrom, *, store: Path, steps: int) -> None:
    """Take over the run that the job of `steps` steps names, which lies beside its own directory on the volume. Nothing is done twice.

    Raises:
        UserError: there is no such run, or it has no checkpoint, or no step is left to train.
    """
    if read_adopted(store) is not None:
        return
    source = find_run(given, store=store, field="resumeFrom")
    checkpoint = newest_of(source)
    check_steps_left(
        checkpoint, steps=steps, source=source, weights_alone="storage.checkpoints.weightsFrom in place of resumeFrom"
    )
    adopt(checkpoint, source=source, store=store)


def check_steps_left(checkpoint: CheckpointFact, *, steps: int, source: Path, weights_alone: str) -> None:
    """Refuse a checkpoint that has all `steps` of the new run: it would end without training. Raises `UserError`."""
    if checkpoint.step >= steps:
        when = "" if (source / DIR_EXPORT).is_dir() else ", once that run has ended"
        raise UserError(
            field="spec.pipeline.steps",
            rule=f"must be above the {checkpoint.step} steps of the run that it goes on from, which count",
            got=steps,
            fix=f"give more steps; or take its weights alone and count from 0{when}: {weights_alone}",
        )


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
        raise not_taken(source / path, error) from error


def _link_tree(source: Path, target: Path) -> None:
    """The same files by another name, where the file system has that; else copies. Whole or not there."""
    if target.exists():
        return
    partial = target.with_name(_PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    link_files(source, partial)
    partial.rename(target)
    sync(target.parent)
