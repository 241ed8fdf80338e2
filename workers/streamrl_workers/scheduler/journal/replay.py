"""From the journal's tables back to `Recovered`: what the core needs to go on.

Owns the reading side of recovery. Reads only live groups and what lies behind the newest
checkpoint, so that its cost does not grow with the length of the run.
"""

import sqlite3
from collections.abc import Collection

from streamrl_workers.scheduler.journal.integrity import DamagedSamplesError, samples_digest
from streamrl_workers.scheduler.journal.store import SAMPLE_BITS, newest_checkpoint
from streamrl_workers.scheduler.journal.tables import (
    effective_attempts,
    has_ended,
    read_attempts,
    read_compacted,
    taken_back,
)
from streamrl_workers.scheduler.lengths import MAX_PROMPTS
from streamrl_workers.scheduler.records import Recovered, RecoveredGroup, stats_of_stored
from streamrl_workers.stream.packing import unpack_int64


def load(connection: sqlite3.Connection) -> Recovered:
    """Everything that the journal says about the run."""
    attempt, instance = connection.execute(
        "SELECT attempt, instance FROM attempts ORDER BY attempt DESC LIMIT 1"
    ).fetchone() or (0, "")
    step, compositions = _steps(connection)
    return Recovered(
        next_group_id=_next_group_id(connection),
        attempt=attempt,
        instance=instance,
        checkpoint_step=newest_checkpoint(connection),
        step=step,
        groups=_groups(connection, recorded={group_id for ids in compositions.values() for group_id in ids}),
        compositions=compositions,
        evaluated_steps=frozenset(row[0] for row in connection.execute("SELECT step FROM evaluations")),
        prompt_lengths=_lengths(connection),
        ended=has_ended(connection),
    )


def _lengths(connection: sqlite3.Connection) -> dict[int, float]:
    """The newest `MAX_PROMPTS`, least recently seen first."""
    rows = connection.execute(
        "SELECT prompt_key, mean_tokens FROM lengths ORDER BY group_id DESC LIMIT ?", (MAX_PROMPTS,)
    ).fetchall()
    return dict(reversed(rows))


def _next_group_id(connection: sqlite3.Connection) -> int:
    (newest,) = connection.execute("SELECT max(group_id) FROM groups").fetchone()
    return max(read_compacted(connection).next_group_id, 0 if newest is None else newest + 1)


def _steps(connection: sqlite3.Connection) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Steps taken, and what was recorded for each step behind the checkpoint (also where it was taken back)."""
    attempts = read_attempts(connection)
    first = newest_checkpoint(connection)
    rows = connection.execute(
        "SELECT step, attempt, group_ids FROM steps WHERE step >= ? ORDER BY step", (first,)
    ).fetchall()
    taken = [(attempt, step) for step, attempt, _ in rows]
    owners = effective_attempts(attempts, taken=taken)
    wanted = {**owners, **taken_back(owners, taken=taken)}
    found = {step: tuple(unpack_int64(ids)) for step, attempt, ids in rows if wanted.get(step) == attempt}
    return max(owners, default=first - 1) + 1, found


def read_samples(connection: sqlite3.Connection, group_id: int) -> tuple[bytes, ...]:
    """A group's serialized samples, by index; none if they are not stored (any more).

    Raises:
        DamagedSamplesError: they are not what was written.
    """
    bounds = (group_id << SAMPLE_BITS, (group_id + 1) << SAMPLE_BITS)
    rows = connection.execute("SELECT data FROM trajectories WHERE key >= ? AND key < ? ORDER BY key", bounds)
    samples = tuple(data for (data,) in rows)
    digest, settled = connection.execute(
        "SELECT samples_digest, settled FROM groups WHERE group_id = ?", (group_id,)
    ).fetchone() or (None, True)
    gone = not samples and (digest is None or settled)
    if not gone and samples_digest(samples) != digest:
        raise DamagedSamplesError(f"the samples of group {group_id} are not what was written")
    return samples


def _groups(connection: sqlite3.Connection, *, recorded: Collection[int]) -> tuple[RecoveredGroup, ...]:
    """Of recorded groups only what their samples add up to: the samples themselves may not fit into the memory."""
    rows = connection.execute(
        "SELECT group_id, prompt_index, begun_step, size_bytes FROM groups WHERE settled = 0 ORDER BY group_id"
    ).fetchall()
    groups = []
    for group_id, prompt_index, start_version, size_bytes in rows:
        samples = read_samples(connection, group_id)
        groups.append(
            RecoveredGroup(
                group_id=group_id,
                prompt_index=prompt_index,
                start_version=start_version,
                trajectories=() if group_id in recorded else samples,
                size_bytes=size_bytes or 0,
                stats=None if start_version is None else stats_of_stored(samples),
            )
        )
    return tuple(groups)
