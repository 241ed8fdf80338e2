"""The journal's file: tables, settings, who may write, and what can be wrong with it.

Owns the schema, the lock that keeps a second scheduler out, and the translation of SQLite's errors
into one clear line. Does not own what the records mean (`tables.py`), when they are
written (`writer.py`), nor how damage is found (`integrity.py`).

    groups        every planned group; `settled`: nobody will need its samples again
                  (dropped, or consumed by a step that a checkpoint covers)
    trajectories  samples of groups that are scored and not settled; key = group_id * 1024 + sample
    attempts      trainer instances and the step that each began at
    steps         what each step of each attempt consumed, and how (group ids and micro-steps as packed int64)
    checkpoints   the oldest one kept
    texts         what the samples of a group that is to be archived read and wrote, as long as the samples are there
    meta          end of the run with its last version's hash, summary of old steps (`tables.py`), how far the archive goes (`archiver.py`),
                  fingerprint of the data (`fingerprint.py`)
    lengths       mean completion tokens by prompt (hash of its text), a sliding window of prompts
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

from streamrl.errors import UserError
from streamrl.files import sync
from streamrl_workers.scheduler.journal.integrity import (
    DamagedJournalError,
    LogEnd,
    find_damage,
    read_log_end,
    row_digest,
)

SCHEMA_VERSION = 7
SAMPLE_BITS = 10
"""Samples of one group fit in so many bits (groupSize is at most 1024)."""

_PAGE_BYTES = 4096
_WAL_PAGES = 2048
"""The write-ahead log is written into the file when it holds so many pages (8 MiB)."""

_TABLES = {
    "meta": ["key TEXT PRIMARY KEY NOT NULL", "value TEXT NOT NULL"],
    "groups": [
        "group_id INTEGER PRIMARY KEY",
        "prompt_index INTEGER NOT NULL",
        "prompt_key INTEGER NOT NULL",
        "begun_step INTEGER",
        "size_bytes INTEGER",
        "samples_digest BLOB",
        "drop_reason TEXT",
        "settled INTEGER NOT NULL DEFAULT 0",
    ],
    "attempts": ["attempt INTEGER PRIMARY KEY", "instance TEXT NOT NULL", "step INTEGER NOT NULL"],
    "steps": [
        "step INTEGER NOT NULL",
        "attempt INTEGER NOT NULL",
        "group_ids BLOB NOT NULL",
        "metrics TEXT NOT NULL",
        "advantages BLOB",
        "version_hash BLOB NOT NULL",
        "micro_steps BLOB NOT NULL",
        "cuts BLOB NOT NULL",
        "PRIMARY KEY (step, attempt)",
    ],
    "checkpoints": ["step INTEGER PRIMARY KEY", "path TEXT NOT NULL"],
    "evaluations": [
        "step INTEGER PRIMARY KEY",
        "mean_reward REAL",
        "sampled_reward REAL",
        "prompts INTEGER",
        "failed INTEGER",
        "mean_tokens REAL",
    ],
    "texts": ["group_id INTEGER PRIMARY KEY", "data BLOB NOT NULL"],
    "lengths": ["prompt_key INTEGER PRIMARY KEY", "mean_tokens REAL NOT NULL", "group_id INTEGER NOT NULL"],
}
"""Columns of the tables whose rows have a digest (`integrity.py`). Samples have theirs in `groups`."""
_OTHERS = (
    "CREATE TABLE trajectories (key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE INDEX live_groups ON groups (group_id) WHERE settled = 0",
    "CREATE INDEX lengths_by_group ON lengths (group_id)",
)
_LOG_LOOKS = 20
"""At a log that changes between two looks: a scheduler writes it, and nothing in it is left behind."""
_FIX = DamagedJournalError.fix


log = logging.getLogger(__name__)


class JournalFaultError(RuntimeError):
    """The journal cannot be written while the run goes on (full disk, broken disk). What was acknowledged is safe."""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn damage, and SQLite's errors on opening or reading `path`, into a `UserError`."""
    try:
        yield
    except DamagedJournalError as error:
        raise UserError(field=str(path), rule=f"is damaged: {error}", fix=error.fix) from None
    except UnicodeError:  # in SQLite's own message
        raise UserError(field=str(path), rule="is damaged: its texts cannot be decoded", fix=_FIX) from None
    except sqlite3.OperationalError as error:
        raise UserError(field=str(path), rule=f"cannot be used as a journal: {error}", fix=_advice(error)) from None
    except sqlite3.DatabaseError as error:
        raise UserError(field=str(path), rule=f"is not a journal or is damaged: {error}", fix=_FIX) from None


def _advice(error: sqlite3.OperationalError) -> str:
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_FULL":
        return "make room on its disk"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "end the process that holds it"
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
        return "check that its directory exists and can be written"
    return _FIX


class WriterLock:
    """Held by the one scheduler that writes a journal; the system frees it when that process ends, however it ends."""

    def __init__(self, journal_path: Path) -> None:
        self._path = journal_path.with_name(journal_path.name + ".lock")
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise a UserError."""
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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

    @property
    def was_marked(self) -> bool:
        """Whether a journal was made beside it."""
        assert self._handle is not None, "only who holds the lock may ask"
        return os.fstat(self._handle).st_size > 0

    def mark(self) -> None:
        """Remember that the journal has been made: if it is missing later, it is lost."""
        assert self._handle is not None, "only who holds the lock may mark it"
        if not self.was_marked:
            os.write(self._handle, b"the journal beside this file has been made\n")
            os.fsync(self._handle)

    def release(self) -> None:
        """Give the lock back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def make_if_new(path: Path, lock: WriterLock) -> None:
    """Make an empty journal at `path`, whole or not at all, unless this run has had one already.

    Raises:
        UserError: it is missing, or cannot be made.
    """
    if not path.exists():
        if lock.was_marked or _sibling(path, "-wal").exists():
            raise UserError(field=str(path), rule="is missing, and this run had one", fix=_FIX)
        with translated(path):
            _make(path)
    lock.mark()


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The journal at `path`, which has been looked at from the first page to the last. The caller holds the `WriterLock`.

    Raises:
        UserError: it is not what was written.
    """
    _check_files(path)
    with translated(path):
        end = read_log_end(_sibling(path, "-wal"))
        if end.is_damaged:
            raise DamagedJournalError(f"{end.lost_frames} pages of its write-ahead log cannot be read")
        if end.lost_frames:
            log.warning("%s: its last commit was cut off; the run goes on from the commit before", path)
        connection = _connect(path, mode="rw")
        try:
            _configure(connection)
            check_schema(connection, path)
            find_damage(connection, {table: _intact(table) for table in _TABLES})
            _empty_log(connection, path, must=end.lost_frames > 0)
        except BaseException:
            connection.close()
            raise
        return connection


def _empty_log(connection: sqlite3.Connection, path: Path, *, must: bool) -> None:
    """`must`: pages of a commit that was cut off would stay behind, and look like damage."""
    busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy and must:
        raise UserError(field=str(path), rule="is being read by another process", fix="end it, and start again")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only view of the journal, also while a scheduler writes it.

    Raises:
        UserError: there is no such file, or it is not a journal that we can read.
    """
    _check_files(path)
    with translated(path):
        connection = _connect(path, mode="ro")
        try:
            check_schema(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def verify(connection: sqlite3.Connection, path: Path) -> None:
    """Read all of a journal that is open for reading, and its write-ahead log, before it is believed.

    Raises:
        UserError: it is not what was written.
    """
    with translated(path):
        find_damage(connection, {table: _intact(table) for table in _TABLES})
        end = _settled_log_end(_sibling(path, "-wal"))
        if end.is_damaged:
            raise DamagedJournalError(f"{end.lost_frames} pages of its write-ahead log cannot be read")
        if end.lost_frames:
            raise UserError(
                field=str(path),
                rule="its last commit cannot be read: it was cut off while it was written, or is damaged",
                fix="resume the run: it goes on from the commit before",
            )


def _settled_log_end(log_path: Path) -> LogEnd:
    """A live scheduler may be in the middle of a commit: what is found twice in a row is no race with it."""
    before = read_log_end(log_path)
    for _ in range(_LOG_LOOKS):
        if not before.lost_frames or (end := read_log_end(log_path)) == before:
            return before
        before = end
    return LogEnd()


def newest_checkpoint(connection: sqlite3.Connection) -> int:
    """Step of the oldest checkpoint that is kept: no attempt begins before it. 0 if there is none."""
    step: int = connection.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()[0]
    return step


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what another StreamRL wrote, and a file with anything in it but the journal's tables."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise UserError(
            field=str(path),
            rule=f"has journal schema {version or '2 or older'}, this StreamRL knows {SCHEMA_VERSION}",
            fix="use the StreamRL that wrote it, or start a new run",
        )
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode != "wal":
        raise DamagedJournalError("its header is not that of a journal")
    if _objects(connection) != _expected_objects():
        raise DamagedJournalError("its tables are not those of a journal")


@cache
def _expected_objects() -> list[tuple[str, ...]]:
    with closing(_with_digests(sqlite3.connect(":memory:"))) as connection:
        _create(connection)
        return _objects(connection)


def _objects(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    return connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()


def _check_files(path: Path) -> None:
    """What is not a regular file may never answer; SQLite keeps the log of one that is a link elsewhere."""
    if not path.exists():
        raise UserError(field=str(path), rule="does not exist", fix="name the folder of a run, or restore the journal")
    for file in (path, _sibling(path, "-wal"), _sibling(path, "-shm")):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UserError(field=str(file), rule="is not a regular file", fix=_FIX)
    if path.stat().st_size == 0:
        raise UserError(field=str(path), rule="is empty", fix=_FIX)


def _connect(path: Path, *, mode: str) -> sqlite3.Connection:
    address = f"file:{_quoted(path)}?mode={mode}"
    return _with_digests(sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False))


def _with_digests(connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.create_function("row_digest", -1, row_digest, deterministic=True)
    connection.execute("PRAGMA trusted_schema = ON")  # for that function; no other schema than ours is used
    return connection


def _make(path: Path) -> None:
    """Under another name first: a kill leaves a whole journal or none."""
    fresh = _sibling(path, ".new")
    for leftover in (fresh, _sibling(fresh, "-wal"), _sibling(fresh, "-shm")):
        leftover.unlink(missing_ok=True)
    with closing(_connect(fresh, mode="rwc")) as connection:
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
        _configure(connection)
        connection.execute("BEGIN IMMEDIATE")
        _create(connection)
        connection.execute("COMMIT")
    fresh.rename(path)
    sync(path.parent)


def _create(connection: sqlite3.Connection) -> None:
    for table, columns in _TABLES.items():
        keys = [column for column in columns if column.startswith("PRIMARY KEY")]
        plain = [column for column in columns if column not in keys]
        digest = f"digest INTEGER AS ({_digest(table)}) STORED"
        connection.execute(f"CREATE TABLE {table} ({', '.join([*plain, digest, *keys])})")
        for event in ("UPDATE", "DELETE"):
            connection.execute(
                f"CREATE TRIGGER {table}_before_{event.lower()} BEFORE {event} ON {table} "
                f"WHEN OLD.digest IS NOT {_digest(table, row='OLD.')} "
                f"BEGIN SELECT RAISE(ABORT, 'a row of {table} is not what was written'); END"
            )
    for statement in _OTHERS:
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _intact(table: str) -> str:
    """The SQL that a row is as it was written: by its digest, and each cell of its column's type, which SQLite leaves open."""
    kinds = [(name, kind, "NOT NULL" in rule) for name, kind, rule in _cells(table)]
    types = [
        f"typeof({name}) IN ('{kind.lower()}', '{kind.lower() if full else 'null'}')" for name, kind, full in kinds
    ]
    return " AND ".join([f"digest IS {_digest(table)}", *types])


def _cells(table: str) -> list[tuple[str, str, str]]:
    """Name, type and rules of each column."""
    columns = [column.split(maxsplit=2) for column in _TABLES[table] if not column.startswith("PRIMARY KEY")]
    return [(name, kind, " ".join(rules)) for name, kind, *rules in columns]


def _digest(table: str, *, row: str = "") -> str:
    """The SQL of a row's digest. SQLite stores the real number -0.0 as 0.0: that is what counts."""
    cells = _cells(table)
    return "row_digest(" + ", ".join(row + name + " + 0.0" * (kind == "REAL") for name, kind, _ in cells) + ")"


def _configure(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA recursive_triggers = ON")  # for rows that are replaced
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * _PAGE_BYTES}")


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _quoted(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
