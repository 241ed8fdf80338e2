"""What each record does to the journal's tables. Runs inside the writer's transaction.

Owns the meaning of records on disk. Nothing here commits: the caller does, once for many records.
Samples that nobody needs any more are not deleted here but named in the answer, so that the writer
can delete them in small portions between commits.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.journal_history import effective_attempts
from streamrl_workers.scheduler.journal_store import SAMPLE_BITS, newest_checkpoint
from streamrl_workers.scheduler.lengths import MAX_PROMPTS, WEIGHT
from streamrl_workers.stream.packing import count_32, pack_int64, unpack_int64

_LENGTH_WINDOW_GROUPS = 2 * MAX_PROMPTS
"""Lengths of prompts not seen in so many groups are forgotten: an endless data set would fill the file."""

Garbage = list[int]
"""Groups whose trajectories are to be deleted."""


def apply_record(connection: sqlite3.Connection, record: fx.Record) -> Garbage:
    """Write `record`; the groups whose trajectories can go."""
    return _APPLY[type(record)](connection, record)


def delete_trajectories(connection: sqlite3.Connection, group_ids: Iterable[int]) -> None:
    """Delete all samples of these groups."""
    ranges = [(group_id << SAMPLE_BITS, (group_id + 1) << SAMPLE_BITS) for group_id in group_ids]
    connection.executemany("DELETE FROM trajectories WHERE key >= ? AND key < ?", ranges)


def delete_settled_trajectories(connection: sqlite3.Connection) -> None:
    """Delete what an earlier scheduler did not get to."""
    connection.execute(
        f"DELETE FROM trajectories WHERE (key >> {SAMPLE_BITS}) IN (SELECT group_id FROM groups WHERE settled = 1)"  # noqa: S608 - a constant
    )


def _planned(connection: sqlite3.Connection, record: fx.Planned) -> Garbage:
    connection.execute(
        "INSERT INTO groups (group_id, prompt_index, prompt_key) VALUES (?, ?, ?)",
        (record.group_id, record.prompt_index, record.prompt_key),
    )
    return []


def _scored(connection: sqlite3.Connection, record: fx.Scored) -> Garbage:
    connection.execute(
        "UPDATE groups SET begun_step = ?, size_bytes = ? WHERE group_id = ?",
        (record.begun_step, record.size_bytes, record.group_id),
    )
    first = record.group_id << SAMPLE_BITS
    connection.executemany(
        "INSERT OR REPLACE INTO trajectories VALUES (?, ?)",
        [(first + index, data) for index, data in enumerate(record.trajectories)],
    )
    tokens = [count_32(pb.Trajectory.FromString(data).tokens) for data in record.trajectories]
    if tokens:
        _learn_length(connection, record.group_id, mean_tokens=sum(tokens) / len(tokens))
    return []


def _learn_length(connection: sqlite3.Connection, group_id: int, *, mean_tokens: float) -> None:
    connection.execute(
        "INSERT INTO lengths SELECT prompt_key, ?, group_id FROM groups WHERE group_id = ? AND prompt_key <> 0 "
        "ON CONFLICT (prompt_key) DO UPDATE SET group_id = excluded.group_id, "
        "mean_tokens = mean_tokens + ? * (excluded.mean_tokens - mean_tokens)",
        (mean_tokens, group_id, WEIGHT),
    )


def _dropped(connection: sqlite3.Connection, record: fx.Dropped) -> Garbage:
    connection.execute(
        "UPDATE groups SET drop_reason = ?, settled = 1 WHERE group_id = ?", (record.reason, record.group_id)
    )
    if record.mean_tokens is not None:
        _learn_length(connection, record.group_id, mean_tokens=record.mean_tokens)
    return [record.group_id]


def _attempt_started(connection: sqlite3.Connection, record: fx.AttemptStarted) -> Garbage:
    """Nothing else changes: which steps count follows from the attempts (`journal_history.py`)."""
    connection.execute(
        "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?)", (record.attempt, record.instance, record.step)
    )
    return []


def _step_taken(connection: sqlite3.Connection, record: fx.StepTaken) -> Garbage:
    connection.execute(
        "INSERT INTO steps VALUES (?, ?, ?, ?)",
        (record.step, record.attempt, pack_int64(record.group_ids), json.dumps(dict(record.metrics))),
    )
    return []


def _checkpointed(connection: sqlite3.Connection, record: fx.Checkpointed) -> Garbage:
    """Steps before the checkpoint are final: their groups are settled, steps that were taken back are forgotten."""
    first = newest_checkpoint(connection)
    final = [row for row in _effective_steps(connection, first=first) if row[0] < record.step]
    settled = [group_id for _, _, group_ids in final for group_id in group_ids]
    connection.executemany("UPDATE groups SET settled = 1 WHERE group_id = ?", [(group_id,) for group_id in settled])
    connection.executemany("DELETE FROM steps WHERE step = ? AND attempt <> ?", [row[:2] for row in final])
    connection.execute("DELETE FROM checkpoints WHERE step < ?", (record.step,))
    connection.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (record.step, record.path))
    _forget_lengths(connection)
    return settled


def _forget_lengths(connection: sqlite3.Connection) -> None:
    (newest,) = connection.execute("SELECT max(group_id) FROM groups").fetchone()
    connection.execute("DELETE FROM lengths WHERE group_id < ?", ((newest or 0) - _LENGTH_WINDOW_GROUPS,))


def _evaluated(connection: sqlite3.Connection, record: fx.Evaluated) -> Garbage:
    connection.execute(
        "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?)",
        (record.step, record.mean_reward, record.prompts, record.failed, record.mean_tokens),
    )
    return []


def _run_ended(connection: sqlite3.Connection, record: fx.RunEnded) -> Garbage:
    """Groups in a step of the effective history stay as they are; all other live ones end here."""
    steps = _effective_steps(connection, first=newest_checkpoint(connection))  # those before it are settled
    consumed = {group_id for _, _, ids in steps for group_id in ids}
    live = [group_id for (group_id,) in connection.execute("SELECT group_id FROM groups WHERE settled = 0")]
    dropped = [group_id for group_id in live if group_id not in consumed]
    connection.executemany(
        "UPDATE groups SET drop_reason = 'run_ended', settled = 1 WHERE group_id = ?",
        [(group_id,) for group_id in dropped],
    )
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('ended_step', ?)", (str(record.step),))
    return dropped


def _effective_steps(connection: sqlite3.Connection, *, first: int) -> Sequence[tuple[int, int, Sequence[int]]]:
    """(step, attempt, groups) of the steps >= `first` that count."""
    attempts = connection.execute("SELECT attempt, step FROM attempts").fetchall()
    rows = connection.execute(
        "SELECT step, attempt, group_ids FROM steps WHERE step >= ? ORDER BY step", (first,)
    ).fetchall()
    owners = effective_attempts(attempts, taken=[(attempt, step) for step, attempt, _ in rows])
    return [(step, attempt, unpack_int64(ids)) for step, attempt, ids in rows if owners.get(step) == attempt]


_APPLY: dict[type, Callable[[sqlite3.Connection, Any], Garbage]] = {
    fx.Planned: _planned,
    fx.Scored: _scored,
    fx.Dropped: _dropped,
    fx.AttemptStarted: _attempt_started,
    fx.StepTaken: _step_taken,
    fx.Checkpointed: _checkpointed,
    fx.Evaluated: _evaluated,
    fx.RunEnded: _run_ended,
}
