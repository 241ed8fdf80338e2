"""One group's life, read from the journal. Owns the reading and the words; judges nothing."""

import sqlite3
from collections.abc import Iterator

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.journal.integrity import DamagedJournalError
from streamrl_workers.scheduler.journal.store import newest_checkpoint
from streamrl_workers.scheduler.journal.tables import has_ended, read_compacted, read_samples, read_steps
from streamrl_workers.stream.packing import unpack_int64
from streamrl_workers.stream.segments import completion_tokens

_ID_BITS = 64
"""SQLite's numbers have so many."""


def describe(connection: sqlite3.Connection, group_id: int) -> list[str]:
    """Lines that tell the group's life.

    Raises:
        UserError: the journal does not know the group.
    """
    row = None
    if group_id.bit_length() < _ID_BITS:
        row = connection.execute(
            "SELECT prompt_index, begun_step, size_bytes, drop_reason FROM groups WHERE group_id = ?", (group_id,)
        ).fetchone()
    compacted = read_compacted(connection)
    if row is None and group_id in compacted:
        return [
            f"group {group_id}: consumed by a step before {compacted.steps}, or dropped before it",
            "compacted into the summary of old steps: its prompt and its step are no longer known",
        ]
    if row is None:
        raise UserError(field=f"group {group_id}", rule="is not in this journal", fix=_known(connection))
    prompt_index, start_version, size_bytes, drop_reason = row
    step = _step_of(connection, group_id)
    lines = [f"group {group_id}: train prompt {prompt_index}"]
    if start_version is not None:
        lines.append(f"started at version {start_version}; {size_bytes} bytes of samples")
    elif drop_reason is None:
        lines.append("not scored yet")
    lines.append(_fate(connection, step=step, start_version=start_version, drop_reason=drop_reason))
    lines.extend(_undone(connection, group_id, step=step))
    lines.extend(_samples(connection, group_id, covered=step is not None and step < newest_checkpoint(connection)))
    return lines


def _known(connection: sqlite3.Connection) -> str:
    first, last = connection.execute("SELECT min(group_id), max(group_id) FROM groups").fetchone()
    settled = read_compacted(connection).settled
    known = [number for number in (first, last, *(end for span in settled for end in span)) if number is not None]
    return f"it has groups {min(known)} to {max(known)}" if known else "it has no groups yet"


def _step_of(connection: sqlite3.Connection, group_id: int) -> int | None:
    return next((step for step, _, ids in read_steps(connection) if group_id in ids), None)


def _fate(
    connection: sqlite3.Connection, *, step: int | None, start_version: int | None, drop_reason: str | None
) -> str:
    if drop_reason is not None:
        return f"dropped: {drop_reason}"
    if step is not None:
        age = "" if start_version is None else f", staleness {step - start_version}"
        return f"consumed by step {step}{age}"
    if has_ended(connection):
        return "live, though the run has ended"
    return "live"


def _undone(connection: sqlite3.Connection, group_id: int, *, step: int | None) -> Iterator[str]:
    """Steps of earlier attempts that were taken back."""
    rows = connection.execute("SELECT step, attempt, group_ids FROM steps ORDER BY attempt, step").fetchall()
    holders = [(taken, attempt) for taken, attempt, ids in rows if group_id in unpack_int64(ids)]
    for taken, attempt in holders:
        counts = taken == step and attempt == holders[-1][1]
        yield f"attempt {attempt} step {taken}: {'counts' if counts else 'taken back by a restart'}"


def _samples(connection: sqlite3.Connection, group_id: int, *, covered: bool) -> Iterator[str]:
    try:
        samples = read_samples(connection, group_id)
    except DamagedJournalError:
        yield "samples: not what was written, and so never trained"
        return
    if not samples:
        removed = (
            "samples: removed, a checkpoint covers them; `streamrl samples RUN --group N` shows those in the archive"
        )
        yield removed if covered else "samples: none stored"
    for data in samples:
        yield _sample(pb.Sample.FromString(data))


def _sample(trajectory: pb.Sample) -> str:
    reward = (
        f"reward {trajectory.reward:g}{f' ({trajectory.reward_error})' if trajectory.reward_error else ''}"
        if trajectory.HasField("reward")
        else f"no reward ({'a turn drawn anew' if trajectory.resampled else trajectory.reward_error})"
    )
    spans = " ".join(f"{span.tokens}@{span.attempt}.{span.step}" for span in trajectory.spans)
    return (
        f"sample {trajectory.sample_index}: {completion_tokens(trajectory)} tokens{_turns(trajectory)}, {reward}, {trajectory.finish_reason}, "
        f"tokens@attempt.version {spans}, by {trajectory.generator_id} in {trajectory.generate_s:.3f} s"
    )


def _turns(trajectory: pb.Sample) -> str:
    """Of a sample with an environment: its turns, its contexts if there are several, and what each turn earned."""
    turns = [segment for segment in trajectory.segments if not segment.observation]
    if not turns:
        return ""
    contexts = 1 + sum(segment.context for segment in trajectory.segments)
    of_contexts = f" of {contexts} contexts" if contexts > 1 else ""
    earned = " ".join(f"{turn.reward:g}" if turn.HasField("reward") else "failed" for turn in turns)
    return f" in {len(turns)} turn{'s' * (len(turns) > 1)}{of_contexts} (rewards {earned})"
