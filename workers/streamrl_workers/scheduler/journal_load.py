"""From the journal's tables back to `Recovered`: what the core needs to go on.

Owns the reading side of recovery. Reads only live groups and what lies behind the newest
checkpoint, so that its cost does not grow with the length of the run.
"""

import sqlite3
from collections import defaultdict

from streamrl_workers.scheduler.effects import Recovered, RecoveredGroup
from streamrl_workers.scheduler.journal_apply import newest_checkpoint
from streamrl_workers.scheduler.journal_history import effective_attempts, taken_back
from streamrl_workers.scheduler.journal_store import SAMPLE_BITS
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
        groups=_groups(connection),
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
    return 0 if newest is None else newest + 1


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


def _groups(connection: sqlite3.Connection) -> tuple[RecoveredGroup, ...]:
    live = connection.execute(
        "SELECT group_id, prompt_index, begun_step, size_bytes FROM groups WHERE settled = 0 ORDER BY group_id"
    ).fetchall()
    samples: dict[int, list[bytes]] = defaultdict(list)
    for key, data in connection.execute("SELECT key, data FROM trajectories ORDER BY key"):
        samples[key >> SAMPLE_BITS].append(data)
    return tuple(
        RecoveredGroup(
            group_id=group_id,
            prompt_index=prompt_index,
            begun_step=begun_step,
            trajectories=tuple(samples.get(group_id, ())),
            size_bytes=size_bytes or 0,
        )
        for group_id, prompt_index, begun_step, size_bytes in live
    )
