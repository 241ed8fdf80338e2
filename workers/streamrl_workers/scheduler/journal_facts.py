"""Reads what `journal check` and `journal show` need: one consistent view of a journal, and checkpoints.

Works on a live run too: the connection is read-only and all of its queries see one instant. Owns
reading, and the choice of the checkpoint that counts. Judges nothing.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import DIR_CHECKPOINTS, ENV_STORE_DIR, FILE_JOB, FILE_JOURNAL, FILE_STORE
from streamrl.spec import parse_job
from streamrl_workers.scheduler.journal_check import CheckpointFact, Facts, GroupFact, Rules
from streamrl_workers.scheduler.journal_compact import read_folded
from streamrl_workers.scheduler.journal_history import effective_attempts
from streamrl_workers.scheduler.journal_store import SAMPLE_BITS, newest_checkpoint, open_for_reading, translated
from streamrl_workers.stream.history import EMPTY_CHAIN, extend_chain
from streamrl_workers.stream.packing import unpack_int64

CHECKPOINT_META = "meta.json"
_CHECKPOINT_GLOB = "step-[0-9]*"


@contextmanager
def snapshot(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """A connection whose queries all see the journal at one instant.

    Raises:
        UserError: the folder, the journal or one of its pages cannot be read.
    """
    if not run_dir.is_dir():
        raise UserError(
            field=str(run_dir), rule="is not a folder of a run", fix="name the folder that `streamrl run` wrote"
        )
    path = run_dir / FILE_JOURNAL
    connection = open_for_reading(path)
    try:
        with translated(path):
            connection.execute("BEGIN")
            yield connection
    finally:
        connection.close()


def read_rules(run_dir: Path) -> Rules:
    """What the run's job demands."""
    path = run_dir / FILE_JOB
    try:
        spec = parse_job(json.loads(path.read_text(encoding="utf-8"))).spec
    except FileNotFoundError:
        raise UserError(field=str(path), rule="does not exist", fix="name the folder of a run") from None
    except json.JSONDecodeError as error:
        raise UserError(field=str(path), rule=f"is not JSON: {error}") from None
    return Rules(
        batch_groups=spec.pipeline.batch_groups, staleness=spec.pipeline.staleness, group_size=spec.task.group_size
    )


def read_facts(run_dir: Path) -> Facts:
    """Everything about the run's history. Checkpoints are read first: the journal is always ahead of them."""
    checkpoints = _checkpoints(_store(run_dir) / DIR_CHECKPOINTS)
    with snapshot(run_dir) as connection:
        attempts = connection.execute("SELECT attempt, step FROM attempts").fetchall()
        return Facts(
            groups=_groups(connection),
            steps=effective_steps(connection),
            folded=read_folded(connection),
            covered_steps=newest_checkpoint(connection),
            ended=has_ended(connection),
            checkpoint=_newest_that_counts(checkpoints.good, attempts),
            damaged=tuple(checkpoints.damaged),
        )


def has_ended(connection: sqlite3.Connection) -> bool:
    """Whether the run is over."""
    return connection.execute("SELECT 1 FROM meta WHERE key = 'ended_step'").fetchone() is not None


def effective_steps(connection: sqlite3.Connection) -> dict[int, tuple[int, ...]]:
    """Step -> groups, of the steps that count and are not folded."""
    attempts = connection.execute("SELECT attempt, step FROM attempts").fetchall()
    rows = connection.execute("SELECT step, attempt, group_ids FROM steps ORDER BY step").fetchall()
    owners = effective_attempts(attempts, taken=[(attempt, step) for step, attempt, _ in rows])
    return {step: tuple(unpack_int64(ids)) for step, attempt, ids in rows if owners.get(step) == attempt}


def _groups(connection: sqlite3.Connection) -> dict[int, GroupFact]:
    samples = dict(
        connection.execute(f"SELECT key >> {SAMPLE_BITS}, count(*) FROM trajectories GROUP BY 1")  # noqa: S608 - a constant
    )
    rows = connection.execute("SELECT group_id, prompt_index, begun_step, drop_reason, settled FROM groups")
    return {
        row[0]: GroupFact(
            group_id=row[0],
            prompt_index=row[1],
            begun_step=row[2],
            drop_reason=row[3],
            settled=bool(row[4]),
            samples=samples.get(row[0], 0),
        )
        for row in rows
    }


def _store(run_dir: Path) -> Path:
    """What holds the checkpoints: what the trainer has written down, unless the volume is mounted elsewhere here."""
    if told := os.environ.get(ENV_STORE_DIR):
        return Path(told)
    file = run_dir / FILE_STORE
    try:
        store = Path(json.loads(file.read_text(encoding="utf-8"))["path"])
    except FileNotFoundError:
        return run_dir
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(field=str(file), rule=f"cannot be read: {error}") from None
    if not store.is_dir():
        raise UserError(
            field=str(file),
            rule="names a directory of checkpoints that is not here",
            got=str(store),
            fix=f"set {ENV_STORE_DIR} to where that volume is mounted",
        )
    return store


@dataclass(slots=True, kw_only=True)
class _OnDisk:
    """Checkpoints found on disk."""

    good: list[CheckpointFact] = field(default_factory=list)
    """Newest first."""
    damaged: list[str] = field(default_factory=list)
    """Name and what is wrong."""


def _checkpoints(directory: Path) -> _OnDisk:
    found = _OnDisk()
    for path in sorted(directory.glob(_CHECKPOINT_GLOB), reverse=True):
        try:
            found.good.append(_checkpoint(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if path.exists():  # else an old one that the trainer has just removed
                found.damaged.append(f"{path.name}: {CHECKPOINT_META} cannot be read ({error!r})")
    return found


def _checkpoint(path: Path) -> CheckpointFact:
    document = json.loads((path / CHECKPOINT_META).read_text(encoding="utf-8"))
    history = tuple(str(digest) for digest in document["history"])
    extend_chain(EMPTY_CHAIN, digests=history)  # ValueError where one is no digest
    return CheckpointFact(
        path=path.name,
        step=int(document["step"]),
        attempt=int(document["attempt"]),
        history=history,
        folded_steps=int(document.get("folded_steps", 0)),
        chain=str(document.get("chain", EMPTY_CHAIN)),
    )


def _newest_that_counts(checkpoints: list[CheckpointFact], attempts: list[tuple[int, int]]) -> CheckpointFact | None:
    """The newest checkpoint that no later attempt went back behind."""
    for checkpoint in checkpoints:
        later = [start for attempt, start in attempts if attempt > checkpoint.attempt]
        if all(start >= checkpoint.step for start in later):
            return checkpoint
    return None
