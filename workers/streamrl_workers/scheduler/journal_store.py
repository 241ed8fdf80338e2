"""The journal's file: tables, settings, who may write, and what can be wrong with it.

Owns the schema, the lock that keeps a second scheduler out, and the translation of SQLite's errors
into one clear line. Does not own what the records mean (`journal_apply.py`) nor when they are
written (`journal.py`).

    groups        every planned group; `settled`: nobody will need its samples again
                  (dropped, or consumed by a step that a checkpoint covers)
    trajectories  samples of groups that are scored and not settled; key = group_id * 1024 + sample
    attempts      trainer instances and the step that each began at
    steps         what each step of each attempt consumed (group ids as packed int64)
    checkpoints   the oldest one kept
    meta          schema version, end of the run, summary of old steps (`journal_folded.py`)
    lengths       mean completion tokens by prompt (hash of its text), a sliding window of prompts
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.errors import UserError

SCHEMA_VERSION = 2
_READABLE = ("1", "2")
"""Schema 1 had no summary of old steps and no pages to give back; it is read as it is, and written on as 2."""
SAMPLE_BITS = 10
"""Samples of one group fit in so many bits (groupSize is at most 1024)."""

_PAGE_BYTES = 4096
_WAL_PAGES = 2048
"""The write-ahead log is folded into the file when it holds so many pages (8 MiB)."""

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, prompt_key INTEGER NOT NULL, begun_step INTEGER, size_bytes INTEGER,
    drop_reason TEXT, settled INTEGER NOT NULL DEFAULT 0);
CREATE INDEX live_groups ON groups (group_id) WHERE settled = 0;
CREATE TABLE trajectories (key INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE attempts (attempt INTEGER PRIMARY KEY, instance TEXT NOT NULL, step INTEGER NOT NULL);
CREATE TABLE steps (step INTEGER, attempt INTEGER, group_ids BLOB NOT NULL, metrics TEXT NOT NULL, PRIMARY KEY (step, attempt)) WITHOUT ROWID;
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL);
CREATE TABLE evaluations (step INTEGER PRIMARY KEY, mean_reward REAL, prompts INTEGER, failed INTEGER, mean_tokens REAL);
CREATE TABLE lengths (prompt_key INTEGER PRIMARY KEY, mean_tokens REAL NOT NULL, group_id INTEGER NOT NULL);
CREATE INDEX lengths_by_group ON lengths (group_id);
"""


class JournalFaultError(RuntimeError):
    """The journal cannot be written while the run goes on (full disk, broken disk). What was acknowledged is safe."""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's errors on opening or reading `path` into a `UserError`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise UserError(field=str(path), rule=f"cannot be used as a journal: {error}", fix=_advice(error)) from None
    except sqlite3.DatabaseError as error:
        raise UserError(
            field=str(path), rule=f"is not a journal or is damaged: {error}", fix="restore it or start a new run"
        ) from None


def _advice(error: sqlite3.OperationalError) -> str:
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_FULL":
        return "make room on its disk"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "end the process that holds it"
    return "check that its directory exists and can be written"


class WriterLock:
    """Held by the one scheduler that writes a journal; the system frees it when that process ends, however it ends."""

    def __init__(self, journal_path: Path) -> None:
        self._path = journal_path.with_name(journal_path.name + ".lock")
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise a UserError."""
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(
                field=str(self._path), rule=f"cannot be written: {error.strerror}", fix="check the run folder"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise UserError(
                field=str(self._path.with_suffix("")), rule="is in use by another scheduler", fix="end that run first"
            ) from None
        self._handle = handle

    def release(self) -> None:
        """Give the lock back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The journal at `path`, made if it is new. The caller holds the `WriterLock`."""
    with translated(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            _configure(connection, path)
            _prepare_schema(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only view of the journal, also while a scheduler writes it.

    Raises:
        UserError: there is no such file, or it is not a journal that we can read.
    """
    if not path.is_file():
        raise UserError(field=str(path), rule="does not exist", fix="name the folder of a run")
    with translated(path):
        connection = sqlite3.connect(f"file:{_quoted(path)}?mode=ro", uri=True, isolation_level=None)
        try:
            check_version(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def newest_checkpoint(connection: sqlite3.Connection) -> int:
    """Step of the oldest checkpoint that is kept: no attempt begins before it. 0 if there is none."""
    step: int = connection.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()[0]
    return step


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what a newer StreamRL wrote."""
    (text,) = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    if text not in _READABLE:
        raise UserError(
            field=str(path),
            rule=f"has journal schema {text}, this StreamRL knows {SCHEMA_VERSION}",
            fix="use the StreamRL that wrote it",
        )


def _configure(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts for a new file only
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise UserError(
            field=str(path),
            rule="lies on a file system without shared memory locks",
            got=mode,
            fix="put the run folder on a local disk",
        )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * _PAGE_BYTES}")


def _prepare_schema(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        check_version(connection, path)
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))
        return
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES.split(";"):
        connection.execute(statement)
    connection.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    connection.execute("COMMIT")


def _quoted(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
