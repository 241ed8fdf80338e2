"""From the journal's tables back to `Recovered`: what the core needs to go on.

Owns the reading side of recovery. Reads only live groups and what lies behind the newest
checkpoint, so that its cost does not grow with the length of the run.
"""

import sqlite3
from collections.abc import Collection

from streamrl_workers.scheduler.effects import Recovered, RecoveredGroup
from streamrl_workers.scheduler.group_stats import stats_of_stored
from streamrl_workers.scheduler.journal_compact import read_folded
from streamrl_workers.scheduler.journal_history import effective_attempts, taken_back
from streamrl_workers.scheduler.journal_store import SAMPLE_BITS, newest_checkpoint
from streamrl_workers.scheduler.lengths import MAX_PROMPTS
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
        ended=connection.execute("SELECT 1 FROM meta WHERE key = 'ended_step'").fetchone() is not None,
    )


def _lengths(connection: sqlite3.Connection) -> dict[int, float]:
    """The newest `MAX_PROMPTS`, least recently seen first."""
    rows = connection.execute(
        "SELECT prompt_key, mean_tokens FROM lengths ORDER BY group_id DESC LIMIT ?", (MAX_PROMPTS,)
    ).fetchall()
    return dict(reversed(rows))


def _next_group_id(connection: sqlite3.Connection) -> int:
    (newest,) = connection.execute("SELECT max(group_id) FROM groups").fetchone()
    return max(read_folded(connection).next_group_id, 0 if newest is None else newest + 1)


def _steps(connection: sqlite3.Connection) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Steps taken, and what was recorded for each step behind the checkpoint (also where it was taken back)."""
    attempts = connection.execute("SELECT attempt, step FROM attempts").fetchall()
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
    """A group's serialized samples, by index; none if they are not stored (any more)."""
    bounds = (group_id << SAMPLE_BITS, (group_id + 1) << SAMPLE_BITS)
    rows = connection.execute("SELECT data FROM trajectories WHERE key >= ? AND key < ? ORDER BY key", bounds)
    return tuple(data for (data,) in rows)


def _groups(connection: sqlite3.Connection, *, recorded: Collection[int]) -> tuple[RecoveredGroup, ...]:
    """Of recorded groups only what their samples add up to: the samples themselves may not fit into the memory."""
    rows = connection.execute(
        "SELECT group_id, prompt_index, begun_step, size_bytes FROM groups WHERE settled = 0 ORDER BY group_id"
    ).fetchall()
    groups = []
    for group_id, prompt_index, begun_step, size_bytes in rows:
        samples = read_samples(connection, group_id)
        count_only = group_id in recorded and begun_step is not None
        groups.append(
            RecoveredGroup(
                group_id=group_id,
                prompt_index=prompt_index,
                begun_step=begun_step,
                trajectories=() if group_id in recorded else samples,
                size_bytes=size_bytes or 0,
                stats=stats_of_stored(samples, begun=begun_step) if count_only else None,
            )
        )
    return tuple(groups)
