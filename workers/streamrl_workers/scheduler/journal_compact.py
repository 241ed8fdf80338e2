"""Compaction: old steps and their groups are folded into one summary, free pages go back to the disk.

Owns which steps are folded: from the oldest on, those that the oldest kept checkpoint covers (no attempt can
take them back) and whose groups are all older than the newest `keep_groups`. A step that does not prove
itself (a group missing, dropped, never scored, twice) is never folded, nor any step behind it: `journal
check` must find it. Runs inside the writer's transaction: a kill leaves the fold whole or not there at all.
"""

import sqlite3
from collections.abc import Sequence

from streamrl_workers.scheduler.journal_folded import Folded
from streamrl_workers.scheduler.journal_store import newest_checkpoint
from streamrl_workers.stream.packing import unpack_int64

KEEP_GROUPS = 65_536
"""The newest groups stay in full, for `journal show`: about 4 MiB."""
_KEEP_FREE_PAGES = 4096
"""Pages that stay in the file for the next samples (16 MiB): a file that breathes is slower than one that is level."""
_VACUUM_PAGES = 2048
"""Pages given back at a time (8 MiB): a pause of ten to thirty milliseconds between two commits, once a checkpoint."""
_META_KEY = "folded"


def read_folded(connection: sqlite3.Connection) -> Folded:
    """The summary; empty in a journal that has folded nothing."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_META_KEY,)).fetchone()
    return Folded() if row is None else Folded.from_text(row[0])


def fold(connection: sqlite3.Connection, *, keep_groups: int, limit_steps: int) -> bool:
    """Fold up to `limit_steps` steps; whether there was one."""
    (newest,) = connection.execute("SELECT max(group_id) FROM groups").fetchone()
    if newest is None:
        return False
    before = folded = read_folded(connection)
    rows = connection.execute(
        "SELECT step, group_ids FROM steps WHERE step >= ? AND step < ? ORDER BY step LIMIT ?",
        (folded.steps, newest_checkpoint(connection), limit_steps),
    ).fetchall()
    for step, packed in rows:
        group_ids = unpack_int64(packed)
        if max(group_ids, default=0) > newest - keep_groups:
            break
        begun_steps = _begun_steps(connection, group_ids)
        if step != folded.steps or begun_steps is None or any(group_id in folded for group_id in group_ids):
            break
        folded = folded.with_step(group_ids, begun_steps=begun_steps)
        connection.executemany("DELETE FROM groups WHERE group_id = ?", [(group_id,) for group_id in group_ids])
    if folded.steps == before.steps:
        return False
    folded = _fold_dropped(connection, folded)
    connection.execute("DELETE FROM steps WHERE step < ?", (folded.steps,))
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_META_KEY, folded.to_text()))
    return True


def release_pages(connection: sqlite3.Connection) -> None:
    """Give free pages back to the disk. Outside of a transaction; nothing happens in a journal of before schema 2."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    surplus = min(free - _KEEP_FREE_PAGES, _VACUUM_PAGES)
    if surplus > 0:
        connection.executescript(
            f"PRAGMA incremental_vacuum({surplus})"
        )  # `execute` would take one page: it steps once


def _begun_steps(connection: sqlite3.Connection, group_ids: Sequence[int]) -> list[int] | None:
    """Of each group the version that it was begun under; None if one is not what a consumed group must be."""
    if len(set(group_ids)) != len(group_ids):
        return None
    begun = []
    for group_id in group_ids:
        row = connection.execute(
            "SELECT begun_step FROM groups WHERE group_id = ? AND drop_reason IS NULL AND settled = 1", (group_id,)
        ).fetchone()
        if row is None or row[0] is None:
            return None
        begun.append(row[0])
    return begun


def _fold_dropped(connection: sqlite3.Connection, folded: Folded) -> Folded:
    """The dropped groups between those that were consumed."""
    bound = (folded.next_group_id,)
    rows = connection.execute(
        "SELECT group_id, drop_reason FROM groups WHERE group_id < ? AND drop_reason IS NOT NULL", bound
    ).fetchall()
    reasons = {group_id: reason for group_id, reason in rows if group_id not in folded}
    connection.executemany("DELETE FROM groups WHERE group_id = ?", [(group_id,) for group_id in reasons])
    return folded.with_dropped(reasons)
