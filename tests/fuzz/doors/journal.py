"""A run folder's `journal.sqlite`, to `streamrl journal check` and to a scheduler that starts: refused, or with the content that was written.

Owns no judgement of content that another scheduler could have written: digests are against accidents, and edits are accidents.
"""

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuzz.harness import Door, Enter
from streamrl.errors import UserError
from streamrl_workers.scheduler.journal import store
from streamrl_workers.scheduler.journal.check import check_run
from streamrl_workers.scheduler.journal.writer import JournalWriter
from support.flips import content
from support.journal_stories import JOURNAL, finished, killed


@contextmanager
def opened() -> Iterator[Enter]:
    """A run folder, made anew for each input."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        whole = asyncio.run(finished(home))
        written = [content(_placed(data, home / "honest", whole)) for data in HONEST]

        def enter(data: bytes) -> str:
            run_dir = _placed(data, home / "tried", whole)
            same = content(run_dir) in written
            verdict = _checked(run_dir)
            assert same or verdict != "exact", "vouched for other content"
            started = _started(run_dir)
            assert same or started != "started", "a scheduler goes on with other content"
            return f"{verdict}; {started}"

        yield enter


def _placed(data: bytes, to: Path, whole: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(whole, to)
    (to / JOURNAL).write_bytes(data)
    return to


def _checked(run_dir: Path) -> str:
    try:
        report = check_run(run_dir)
    except UserError as error:
        return _kind(error)
    return "violated" if report.violations else "exact"


def _started(run_dir: Path) -> str:
    journal = JournalWriter(run_dir / JOURNAL)
    try:
        journal.open()
    except UserError as error:
        return _kind(error)
    finally:
        journal.close()
    return "started"


def _kind(error: UserError) -> str:
    """Without numbers: they are of this input."""
    assert error.fix, f"it does not say what to do: {error}"
    return "".join(letter for letter in error.rule if not letter.isdigit())


def plant(patch: pytest.MonkeyPatch) -> None:
    """Nobody compares rows with their digests."""

    def find_pages(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA integrity_check(1)")

    patch.setattr(store, "find_damage", find_pages)


def _honest() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        for name in ("a", "b"):
            (Path(directory) / name).mkdir()
        ended = asyncio.run(finished(Path(directory) / "a"))
        cut = asyncio.run(killed(Path(directory) / "b"))
        return [(run_dir / JOURNAL).read_bytes() for run_dir in (ended, cut)]


HONEST = _honest()
DOOR = Door(
    name="journal",
    opened=opened,
    honest=HONEST,
    words=[b"SQLite format 3\x00", b"CREATE VIEW meta AS SELECT 1", b"folded", b"zero_variance", b"trainer-1"],
    most_input=1 << 20,
    most_held=32 << 20,
    most_cpu_s=10.0,
    plant=plant,
)
