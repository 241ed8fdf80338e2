"""What each record does to the journal's tables, and what the tables say of a run: which steps count, what a restart finds.

Owns the meaning of records on disk. Nothing here commits: the writer does, once for many records. A restart reads only
live groups and what lies behind the newest checkpoint, so that its cost does not grow with the length of the run.
Samples that nobody needs any more are not deleted here but named in the answer, so that the writer
can delete them in small portions between commits.

Owns compaction as well: old steps and their groups become one summary, free pages go back to the disk. Compacted are,
from the oldest on, the steps that the oldest kept checkpoint covers (no attempt can take them back) and whose groups
are all older than the newest `keep_groups`. A step that does not prove itself (a group missing, dropped, never
scored, twice) never is, nor any step behind it: `journal check` must find it. A kill leaves a portion whole or not there.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from streamrl.files import parse_json
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.fingerprint import read_fingerprint
from streamrl_workers.scheduler.journal.integrity import DamagedSamplesError, samples_digest
from streamrl_workers.scheduler.journal.store import SAMPLE_BITS, newest_checkpoint
from streamrl_workers.scheduler.lengths import MAX_PROMPTS, WEIGHT
from streamrl_workers.scheduler.model import stats_of_stored
from streamrl_workers.scheduler.records import Recovered, RecoveredGroup
from streamrl_workers.stream.digests import EMPTY_CHAIN, composition_digest, extend_chain
from streamrl_workers.stream.packing import pack_int64, unpack_int64
from streamrl_workers.stream.segments import completion_tokens

_LENGTH_WINDOW_GROUPS = 2 * MAX_PROMPTS
"""Lengths of prompts not seen in so many groups are forgotten: an endless data set would fill the file."""

Garbage = list[int]
"""Groups whose trajectories are to be deleted."""


def apply_record(connection: sqlite3.Connection, record: rec.Record) -> Garbage:
    """Write `record`; the groups whose trajectories can go."""
    insert = _ROWS.get(type(record))
    if insert is None:
        return _APPLY[type(record)](connection, record)
    connection.execute(insert, asdict(record))
    return []


def delete_samples(connection: sqlite3.Connection, group_ids: Iterable[int]) -> None:
    """Delete all samples of these groups."""
    ranges = [(group_id << SAMPLE_BITS, (group_id + 1) << SAMPLE_BITS) for group_id in group_ids]
    connection.executemany("DELETE FROM trajectories WHERE key >= ? AND key < ?", ranges)
    connection.executemany("DELETE FROM texts WHERE group_id = ?", [(first >> SAMPLE_BITS,) for first, _ in ranges])


def settled_with_samples(connection: sqlite3.Connection) -> Garbage:
    """What an earlier scheduler did not get to."""
    found = connection.execute(
        f"SELECT DISTINCT key >> {SAMPLE_BITS} FROM trajectories "  # noqa: S608 - a constant
        f"WHERE (key >> {SAMPLE_BITS}) IN (SELECT group_id FROM groups WHERE settled = 1)"
    )
    return [group_id for (group_id,) in found]


def sizes_of(connection: sqlite3.Connection, group_ids: Iterable[int]) -> list[tuple[int, int]]:
    """Groups, each with the bytes of its samples."""
    read = "SELECT coalesce(size_bytes, 0) FROM groups WHERE group_id = ?"
    return [(group_id, *connection.execute(read, (group_id,)).fetchone()) for group_id in group_ids]


def _scored(connection: sqlite3.Connection, record: rec.Scored) -> Garbage:
    connection.execute(
        "UPDATE groups SET begun_step = ?, size_bytes = ?, samples_digest = ? WHERE group_id = ?",
        (record.start_version, record.size_bytes, samples_digest(record.trajectories), record.group_id),
    )
    _store_samples(connection, record)
    tokens = [completion_tokens(pb.Sample.FromString(data)) for data in record.trajectories]
    if tokens:
        _learn_length(connection, record.group_id, mean_tokens=sum(tokens) / len(tokens))
    return []


def _store_samples(connection: sqlite3.Connection, record: rec.Scored | rec.Dropped) -> None:
    first = record.group_id << SAMPLE_BITS
    connection.executemany(
        "INSERT OR REPLACE INTO trajectories VALUES (?, ?)",
        [(first + index, data) for index, data in enumerate(record.trajectories)],
    )
    if record.texts:
        connection.execute("INSERT OR REPLACE INTO texts VALUES (?, ?)", (record.group_id, record.texts))


def _learn_length(connection: sqlite3.Connection, group_id: int, *, mean_tokens: float) -> None:
    connection.execute(
        "INSERT INTO lengths SELECT prompt_key, ?, group_id FROM groups WHERE group_id = ? AND prompt_key <> 0 "
        "ON CONFLICT (prompt_key) DO UPDATE SET group_id = excluded.group_id, "
        "mean_tokens = mean_tokens + ? * (excluded.mean_tokens - mean_tokens)",
        (mean_tokens, group_id, WEIGHT),
    )


def _dropped(connection: sqlite3.Connection, record: rec.Dropped) -> Garbage:
    connection.execute(
        "UPDATE groups SET drop_reason = ?, settled = 1 WHERE group_id = ?", (record.reason, record.group_id)
    )
    if record.mean_tokens is not None:
        _learn_length(connection, record.group_id, mean_tokens=record.mean_tokens)
    if record.trajectories:
        connection.execute(
            "UPDATE groups SET size_bytes = ?, samples_digest = ? WHERE group_id = ?",
            (sum(map(len, record.trajectories)), samples_digest(record.trajectories), record.group_id),
        )
        _store_samples(connection, record)
    return [record.group_id]


def _step_taken(connection: sqlite3.Connection, record: rec.StepTaken) -> Garbage:
    connection.execute(
        "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.step,
            record.attempt,
            pack_int64(record.group_ids),
            json.dumps(dict(record.metrics)),
            record.advantages or None,
            record.version_hash,
            pack_int64(record.micro_steps),
            record.cuts,
        ),
    )
    return []


def _checkpointed(connection: sqlite3.Connection, record: rec.Checkpointed) -> Garbage:
    """Steps before the checkpoint are final: their groups are settled, steps that were taken back are forgotten."""
    first = newest_checkpoint(connection)
    final = [row for row in read_steps(connection, first=first) if row[0] < record.step]
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


def _run_ended(connection: sqlite3.Connection, record: rec.RunEnded) -> Garbage:
    """Groups in a step of the effective history stay as they are; all other live ones end here."""
    steps = read_steps(connection, first=newest_checkpoint(connection))  # those before it are settled
    consumed = {group_id for _, _, ids in steps for group_id in ids}
    live = [group_id for (group_id,) in connection.execute("SELECT group_id FROM groups WHERE settled = 0")]
    dropped = [group_id for group_id in live if group_id not in consumed]
    connection.executemany(
        "UPDATE groups SET drop_reason = 'run_ended', settled = 1 WHERE group_id = ?",
        [(group_id,) for group_id in dropped],
    )
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('ended_step', ?)", (str(record.step),))
    if record.version_hash:
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('ended_hash', ?)", (record.version_hash.hex(),))
    return dropped


_ROWS: dict[type, str] = {
    rec.Planned: "INSERT INTO groups (group_id, prompt_index, prompt_key) VALUES (:group_id, :prompt_index, :prompt_key)",
    rec.AttemptStarted: "INSERT OR REPLACE INTO attempts VALUES (:attempt, :instance, :step)",
    rec.Evaluated: "INSERT OR REPLACE INTO evaluations VALUES (:step, :mean_reward, :sampled_reward, :prompts, :failed, :mean_tokens)",
}
"""Records that are a row each. Which steps count follows from the attempts (`effective_attempts`)."""
_APPLY: dict[type, Callable[[sqlite3.Connection, Any], Garbage]] = {
    rec.Scored: _scored,
    rec.Dropped: _dropped,
    rec.StepTaken: _step_taken,
    rec.Checkpointed: _checkpointed,
    rec.RunEnded: _run_ended,
}


KEEP_GROUPS = 65_536
"""The newest groups stay in full, for `journal show`: about 4 MiB."""
_KEEP_FREE_PAGES = 4096
"""Pages that stay in the file for the next samples (16 MiB): a file that breathes is slower than one that is level."""
_VACUUM_PAGES = 2048
"""Pages given back at a time (8 MiB): a pause of ten to thirty milliseconds between two commits, once a checkpoint."""
_META_KEY = "folded"
"""As journals of this schema have it."""


_FIRST_GROUP_KEY = "first_group"
"""Of a run that goes on from another one: where its prompts begin."""


Interval = tuple[int, int]
"""First and last, both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactedSteps:
    """Steps 0 .. `steps` - 1 and the groups that ended with them."""

    steps: int = 0
    chain: str = EMPTY_CHAIN
    """Of the compositions of those steps (`stream/digests.py`)."""
    consumed: int = 0
    """Groups in those steps."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> groups."""
    settled: tuple[Interval, ...] = ()
    """Ids of all these groups, rising, with gaps between."""
    step_groups: Interval | None = None
    """Fewest and most groups of one step."""
    staleness: Interval | None = None
    """Smallest and largest staleness of a consumed group, in steps."""

    def __contains__(self, group_id: int) -> bool:
        """Whether the group has been compacted."""
        return any(first <= group_id <= last for first, last in self.settled)

    @property
    def groups(self) -> int:
        """How many there are."""
        return sum(last - first + 1 for first, last in self.settled)

    @property
    def next_group_id(self) -> int:
        """First id above all of them."""
        return self.settled[-1][1] + 1 if self.settled else 0

    def with_step(self, group_ids: Sequence[int], *, start_versions: Iterable[int]) -> "CompactedSteps":
        """One more step, and the version that each of its groups was begun under."""
        staleness = [self.steps - version for version in start_versions]
        return replace(
            self,
            steps=self.steps + 1,
            chain=extend_chain(self.chain, digests=[composition_digest(group_ids)]),
            consumed=self.consumed + len(group_ids),
            settled=_merged([*self.settled, *((group_id, group_id) for group_id in group_ids)]),
            step_groups=_wider(self.step_groups, [len(group_ids)]),
            staleness=_wider(self.staleness, staleness),
        )

    def with_dropped(self, reasons: Mapping[int, str]) -> "CompactedSteps":
        """More dropped groups: id -> reason."""
        dropped = Counter(self.dropped)
        dropped.update(reasons.values())
        settled = _merged([*self.settled, *((group_id, group_id) for group_id in reasons)])
        return replace(self, dropped=dict(dropped), settled=settled)

    def to_text(self) -> str:
        """As the journal stores it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> "CompactedSteps":
        """From `to_text`."""
        document = parse_json(text)
        pairs = {name: _pair(document[name]) for name in ("step_groups", "staleness")}
        return cls(**(document | pairs | {"settled": tuple(map(tuple, document["settled"]))}))


def _pair(values: Sequence[int] | None) -> Interval | None:
    return None if values is None else (values[0], values[1])


def _merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    ordered = sorted(intervals)
    assert all(before[1] < after[0] for before, after in pairwise(ordered)), "a group is compacted twice"
    merged: list[Interval] = []
    for first, last in ordered:
        if merged and merged[-1][1] + 1 == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _wider(span: Interval | None, values: Sequence[int]) -> Interval | None:
    known = [*(span or ()), *values]
    return (min(known), max(known)) if known else None


def read_compacted(connection: sqlite3.Connection) -> CompactedSteps:
    """The summary; empty in a journal that has compacted nothing."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_META_KEY,)).fetchone()
    return CompactedSteps() if row is None else CompactedSteps.from_text(row[0])


def compact_steps(
    connection: sqlite3.Connection, *, keep_groups: int, limit_steps: int, below: int | None = None
) -> bool:
    """Fold up to `limit_steps` steps, of groups under `below` (None: any) only; whether there was one."""
    (newest,) = connection.execute("SELECT max(group_id) FROM groups").fetchone()
    if newest is None:
        return False
    before = compacted = read_compacted(connection)
    rows = connection.execute(
        "SELECT step, group_ids FROM steps WHERE step >= ? AND step < ? ORDER BY step LIMIT ?",
        (compacted.steps, newest_checkpoint(connection), limit_steps),
    ).fetchall()
    for step, packed in rows:
        group_ids = unpack_int64(packed)
        youngest = max(group_ids, default=0)
        if youngest > newest - keep_groups or (below is not None and youngest >= below):
            break
        start_versions = _start_versions(connection, group_ids)
        if step != compacted.steps or start_versions is None or any(group_id in compacted for group_id in group_ids):
            break
        compacted = compacted.with_step(group_ids, start_versions=start_versions)
        connection.executemany("DELETE FROM groups WHERE group_id = ?", [(group_id,) for group_id in group_ids])
    if compacted.steps == before.steps:
        return False
    compacted = _compact_dropped(connection, compacted)
    connection.execute("DELETE FROM steps WHERE step < ?", (compacted.steps,))
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_META_KEY, compacted.to_text()))
    return True


def begin_behind(connection: sqlite3.Connection, *, step: int, chain: str, path: str, first_group: int) -> None:
    """A new journal whose run begins behind `step` steps of another one, with this digest of them; one that has begun is left alone."""
    if read_attempts(connection) or read_compacted(connection).steps or _next_group_id(connection):
        return
    compacted = CompactedSteps(steps=step, chain=chain)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO meta VALUES (?, ?)", (_META_KEY, compacted.to_text()))
    connection.execute("INSERT INTO meta VALUES (?, ?)", (_FIRST_GROUP_KEY, str(first_group)))
    connection.execute("INSERT INTO checkpoints VALUES (?, ?)", (step, path))
    connection.execute("COMMIT")


def release_pages(connection: sqlite3.Connection) -> None:
    """Give free pages back to the disk. Outside of a transaction; nothing happens in a journal of before schema 2."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    surplus = min(free - _KEEP_FREE_PAGES, _VACUUM_PAGES)
    if surplus > 0:
        # `execute` would take one page: it steps once.
        connection.executescript(f"PRAGMA incremental_vacuum({surplus})")


def _start_versions(connection: sqlite3.Connection, group_ids: Sequence[int]) -> list[int] | None:
    """Of each group the version that it was begun under; None if one is not what a consumed group must be."""
    if len(set(group_ids)) != len(group_ids):
        return None
    versions = []
    for group_id in group_ids:
        row = connection.execute(
            "SELECT begun_step FROM groups WHERE group_id = ? AND drop_reason IS NULL AND settled = 1", (group_id,)
        ).fetchone()
        if row is None or row[0] is None:
            return None
        versions.append(row[0])
    return versions


def _compact_dropped(connection: sqlite3.Connection, compacted: CompactedSteps) -> CompactedSteps:
    """The dropped groups between those that were consumed."""
    bound = (compacted.next_group_id,)
    rows = connection.execute(
        "SELECT group_id, drop_reason FROM groups WHERE group_id < ? AND drop_reason IS NOT NULL", bound
    ).fetchall()
    reasons = {group_id: reason for group_id, reason in rows if group_id not in compacted}
    connection.executemany("DELETE FROM groups WHERE group_id = ?", [(group_id,) for group_id in reasons])
    return compacted.with_dropped(reasons)


def has_ended(connection: sqlite3.Connection) -> bool:
    """Whether the run is over."""
    return connection.execute("SELECT 1 FROM meta WHERE key = 'ended_step'").fetchone() is not None


def read_last_hash(connection: sqlite3.Connection) -> bytes:
    """Of the version that the run has ended with; empty: it has not ended, or its last version was not known."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'ended_hash'").fetchone()
    return bytes.fromhex(row[0]) if row is not None else b""


def read_attempts(connection: sqlite3.Connection) -> list[tuple[int, int]]:
    """(attempt, step that it began at)."""
    return connection.execute("SELECT attempt, step FROM attempts").fetchall()


def read_steps(connection: sqlite3.Connection, *, first: int = 0) -> list[tuple[int, int, tuple[int, ...]]]:
    """(step, attempt, groups) of the steps >= `first` that count and are not compacted."""
    rows = connection.execute(
        "SELECT step, attempt, group_ids FROM steps WHERE step >= ? ORDER BY step", (first,)
    ).fetchall()
    owners = effective_attempts(read_attempts(connection), taken=[(attempt, step) for step, attempt, _ in rows])
    return [(step, attempt, tuple(unpack_int64(ids))) for step, attempt, ids in rows if owners.get(step) == attempt]


def effective_attempts(attempts: Iterable[tuple[int, int]], *, taken: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Step -> the attempt whose step counts.

    Args:
        attempts: (attempt, step that it started at).
        taken: (attempt, step) of every recorded step.
    """
    steps_by_attempt: dict[int, list[int]] = {}
    for attempt, step in taken:
        steps_by_attempt.setdefault(attempt, []).append(step)
    effective: dict[int, int] = {}
    for attempt, start in sorted(attempts):
        effective = {step: owner for step, owner in effective.items() if step < start}
        effective.update(dict.fromkeys(steps_by_attempt.get(attempt, ()), attempt))
    return dict(sorted(effective.items()))


def load(connection: sqlite3.Connection) -> Recovered:
    """Everything that the journal says about the run."""
    attempt, instance = connection.execute(
        "SELECT attempt, instance FROM attempts ORDER BY attempt DESC LIMIT 1"
    ).fetchone() or (0, "")
    step, compositions, cuts = _steps(connection)
    return Recovered(
        next_group_id=_next_group_id(connection),
        attempt=attempt,
        instance=instance,
        checkpoint_step=newest_checkpoint(connection),
        step=step,
        groups=_groups(connection, recorded={group_id for ids in compositions.values() for group_id in ids}),
        compositions=compositions,
        cuts=cuts,
        evaluated_steps=frozenset(row[0] for row in connection.execute("SELECT step FROM evaluations")),
        prompt_lengths=_lengths(connection),
        ended=has_ended(connection),
        fingerprint=read_fingerprint(connection),
    )


def _lengths(connection: sqlite3.Connection) -> dict[int, float]:
    """The newest `MAX_PROMPTS`, least recently seen first."""
    rows = connection.execute(
        "SELECT prompt_key, mean_tokens FROM lengths ORDER BY group_id DESC LIMIT ?", (MAX_PROMPTS,)
    ).fetchall()
    return dict(reversed(rows))


def _next_group_id(connection: sqlite3.Connection) -> int:
    (newest,) = connection.execute("SELECT max(group_id) FROM groups").fetchone()
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_FIRST_GROUP_KEY,)).fetchone()
    first = 0 if row is None else int(row[0])
    return max(read_compacted(connection).next_group_id, first, 0 if newest is None else newest + 1)


def _steps(connection: sqlite3.Connection) -> tuple[int, dict[int, tuple[int, ...]], dict[int, bytes]]:
    """Steps taken; groups and cuts recorded for each step after the checkpoint; of one that was taken back, by the newest attempt."""
    first = newest_checkpoint(connection)
    counting = {step: attempt for step, attempt, _ in read_steps(connection, first=first)}
    taken = max(counting, default=first - 1) + 1
    rows = connection.execute(
        "SELECT step, attempt, group_ids, cuts FROM steps WHERE step >= ? ORDER BY step, attempt", (first,)
    )
    records = {
        step: (group_ids, cuts) for step, attempt, group_ids, cuts in rows if counting.get(step, attempt) == attempt
    }
    compositions = {step: tuple(unpack_int64(group_ids)) for step, (group_ids, _) in records.items()}
    return taken, compositions, {step: cuts for step, (_, cuts) in records.items() if cuts}


def read_samples(connection: sqlite3.Connection, group_id: int) -> tuple[bytes, ...]:
    """A group's serialized samples, by index; none if they are not stored (any more).

    Raises:
        DamagedSamplesError: they are not what was written.
    """
    first, end = group_id << SAMPLE_BITS, (group_id + 1) << SAMPLE_BITS
    rows = connection.execute(
        "SELECT key, data FROM trajectories WHERE key >= ? AND key < ? ORDER BY key", (first, end)
    ).fetchall()
    samples = tuple(data for _, data in rows)
    digest, settled = connection.execute(
        "SELECT samples_digest, settled FROM groups WHERE group_id = ?", (group_id,)
    ).fetchone() or (None, True)
    gone = not samples and (digest is None or settled)
    by_index = [key - first for key, _ in rows] == list(range(len(rows)))
    if not gone and not (by_index and samples_digest(samples) == digest):
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
