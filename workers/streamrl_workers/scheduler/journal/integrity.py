"""What a journal holds is what was written: digests of rows and samples, and the search for damage.

Owns the digests, and what is done to a file before it is believed. Does not own where the digests stand
(`store.py`: every row has one) nor what a history must be (`check.py`).

    a page, an index         SQLite's own integrity check
    a cell of any row        the row's digest over all of its cells; SQLite computes it on every write, and no row
                             that differs from its digest is changed or deleted (triggers)
    samples                  one digest for each group's, in the group's row; compared whenever they are read
    the write-ahead log      its frames have checksums, but SQLite takes the first bad frame for the end of the log:
                             here a bad frame with more of this log behind it is damage
"""

import sqlite3
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO

_ROW_DIGEST_BYTES = 8
_LOG_HEADER = struct.Struct(">8I")  # magic, format, page size, checkpoint, salt, salt, checksum, checksum
_FRAME_HEADER = struct.Struct(">6I")  # page, pages of the file if this frame ends a commit, salts, checksums
_LOG_MAGIC = 0x377F0683
"""The last bit: whether checksums are of big-endian words."""
_PAGES_BYTES = frozenset(2**power for power in range(9, 17))
_WORD = 0xFFFFFFFF


class DamagedJournalError(ValueError):
    """Something that is not what was written; the text says what, `fix` what to do."""

    fix = "restore it from a copy, or start a new run"


class DamagedSamplesError(DamagedJournalError):
    """Samples of one group."""

    fix = "`streamrl journal repair` has them generated again"


def row_digest(*cells: str | bytes | float | None) -> int:
    """64 bits over the cells of a row, in their order, with their types."""
    return int.from_bytes(blake2b(repr(cells).encode(), digest_size=_ROW_DIGEST_BYTES).digest(), "little", signed=True)


def samples_digest(samples: Sequence[bytes]) -> bytes:
    """SHA-256 over a group's serialized samples: the length of each (8 bytes, little-endian), then their bytes, by index."""
    digest = sha256(b"".join(len(data).to_bytes(8, "little") for data in samples))
    for data in samples:
        digest.update(data)
    return digest.digest()


def find_damage(connection: sqlite3.Connection, intact: Mapping[str, str]) -> None:
    """Read every page, and every row of these tables (name -> SQL that is true of a row as it was written).

    Raises:
        DamagedJournalError: one is not what was written.
    """
    (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if said != "ok":
        raise DamagedJournalError(f"SQLite finds: {' '.join(said.split())}")
    for table, condition in intact.items():
        (count,) = connection.execute(f"SELECT count(*) FROM {table} WHERE NOT ({condition})").fetchone()  # noqa: S608 - our names
        if count:
            raise DamagedJournalError(f"{count} row{'s' * (count > 1)} of {table} differ from what was written")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """How far a write-ahead log can be believed, and what is behind."""

    salts: tuple[int, ...] = ()
    """What tells this log from those that stood in the same file before."""
    frames: int = 0
    """Frames that SQLite believes."""
    lost_frames: int = 0
    """Frames of this log. Only a commit that was cut off while it was written leaves some, or damage."""
    is_damaged: bool = False
    """Some are of a later commit: the one before had reached the disk, so it was not cut off."""


def read_log_end(path: Path) -> LogEnd:
    """How the write-ahead log at `path` ends; there may be none.

    Raises:
        DamagedJournalError: it is no log.
    """
    try:
        with path.open("rb") as log:
            header = log.read(_LOG_HEADER.size)
            return _read_frames(log, header, name=path.name) if header else LogEnd()
    except FileNotFoundError:
        return LogEnd()


def _read_frames(log: BinaryIO, header: bytes, *, name: str) -> LogEnd:
    if len(header) < _LOG_HEADER.size:
        raise DamagedJournalError(f"{name} is cut off")
    magic, _, page_bytes, _, *salts, check0, check1 = _LOG_HEADER.unpack(header)
    words = struct.Struct(">2I" if magic & 1 else "<2I")
    checksum = _checksum(words, header[:-8], (0, 0))
    if magic | 1 != _LOG_MAGIC or checksum != (check0, check1) or page_bytes not in _PAGES_BYTES:
        raise DamagedJournalError(f"the header of {name} is not what was written")
    good = 0
    lost: list[bool] = []  # of each frame whether it ends a commit
    while len(frame := log.read(_FRAME_HEADER.size + page_bytes)) >= _FRAME_HEADER.size:
        _, commit, salt0, salt1, check0, check1 = _FRAME_HEADER.unpack_from(frame)
        page = frame[_FRAME_HEADER.size :]
        if not lost and [salt0, salt1] == salts and len(page) == page_bytes:
            following = _checksum(words, page, _checksum(words, frame[:8], checksum))
            if following == (check0, check1):
                checksum, good = following, good + 1
                continue
        if salts[0] == salt0 or salts[1] == salt1:  # both differ in what an earlier log has left
            lost.append(commit > 0)
    return LogEnd(salts=tuple(salts), frames=good, lost_frames=len(lost), is_damaged=any(lost[:-1]))


def _checksum(words: struct.Struct, data: bytes, start: tuple[int, int]) -> tuple[int, int]:
    """SQLite's checksum of pairs of words; each sum needs the one before. About 20 ms for each MB, and a log has 8 MiB as a rule."""
    first, second = start
    for even, odd in words.iter_unpack(data):
        first = (first + even + second) & _WORD
        second = (second + odd + first) & _WORD
    return first, second
