"""Single flipped bits in the files of a run's folder, at seeded places, and what StreamRL then says of the run."""

import random
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_USER_ERROR, UserError
from streamrl_cli.main import main
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.writer import JournalWriter

EXACT = "exactly once"


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of one file."""

    offset: int
    bit: int

    def of(self, data: bytes) -> bytes:
        """The bytes with this bit flipped."""
        flipped = bytearray(data)
        flipped[self.offset] ^= 1 << self.bit
        return bytes(flipped)


def flips(data: bytes, *, seed: int, count: int) -> Iterator[Flip]:
    """Half of them anywhere, half where there is something other than zeros: much of a journal's pages is free."""
    chance = random.Random(seed)
    used = [offset for offset, byte in enumerate(data) if byte]
    for number in range(count):
        offset = chance.choice(used) if number % 2 else chance.randrange(len(data))
        yield Flip(offset, chance.randrange(8))


def spoilt_copies(run_dir: Path, name: str, *, to: Path, seed: int, count: int) -> Iterator[tuple[Flip, Path]]:
    """The folder again and again, each time with one flip in file `name`."""
    data = (run_dir / name).read_bytes()
    for flip in flips(data, seed=seed, count=count):
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(run_dir, to)
        (to / name).write_bytes(flip.of(data))
        yield flip, to


def content(run_dir: Path) -> dict[str, list[tuple[Any, ...]]] | None:
    """Every row that SQLite reads, without any of our code; None: it reads none."""
    try:
        connection = sqlite3.connect(f"file:{run_dir / 'journal.sqlite'}?mode=ro", uri=True)
    except (sqlite3.Error, UnicodeError):  # also of a garbled schema in its own message
        return None
    try:
        connection.text_factory = bytes
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        names = sorted(str(name, "latin-1") for (name,) in rows)
        return {name: connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in names}
    except (sqlite3.Error, UnicodeError):  # also of a garbled schema in its own message
        return None
    finally:
        connection.close()


def said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `streamrl journal check` says: `EXACT`, or why not."""
    code = main(["journal", "check", str(run_dir)])
    out, err = capsys.readouterr()
    if code == EXIT_DONE:
        assert EXACT in out
        return EXACT
    assert EXACT not in out
    if code == EXIT_USER_ERROR:
        assert len(err.splitlines()) == 1, err
        assert "; " in err, f"it does not say what to do: {err}"
        return err
    assert code == EXIT_FAULT
    return out


def resumed(run_dir: Path) -> rec.Recovered | None:
    """What a scheduler that starts again finds; None: it refuses."""
    journal = JournalWriter(run_dir / "journal.sqlite")
    try:
        return journal.open()
    except UserError as error:
        assert "; " in str(error), f"it does not say what to do: {error}"
        return None
    finally:
        journal.close()
