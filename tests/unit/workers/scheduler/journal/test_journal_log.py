"""The write-ahead log is read as SQLite writes it, a page at a time."""

import sqlite3
import struct
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from streamrl_workers.scheduler.journal.integrity import DamagedJournalError, read_log_end

LOG_BYTES = 2 * 2**20
HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24


@pytest.mark.parametrize("page_bytes", [512, 4096, 65536])
def test_a_log_of_any_size_is_read_a_page_at_a_time(page_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in (f"page_size = {page_bytes}", "journal_mode = WAL", "wal_autocheckpoint = 0"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("CREATE TABLE t AS SELECT randomblob(?) AS cell", (LOG_BYTES,))
        log = path.with_name("a.sqlite-wal")
        tracemalloc.start()
        end = read_log_end(log)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        size_bytes = log.stat().st_size
    assert (end.frames, end.lost_frames) == ((size_bytes - HEADER_BYTES) // (FRAME_HEADER_BYTES + page_bytes), 0)
    assert size_bytes > LOG_BYTES
    assert peak_bytes < LOG_BYTES / 4


@pytest.mark.parametrize("page_bytes", [0, 1, 500, 2**17, 2**32 - 1])
def test_a_page_of_no_size_is_damage(page_bytes: int, tmp_path: Path) -> None:
    """Its checksum is right."""
    header = [0x377F0683, 3007000, page_bytes, 0, 1, 2]  # whose last bit says: checksums of big-endian words
    first = second = 0
    for even, odd in zip(header[::2], header[1::2], strict=True):
        first = (first + even + second) % 2**32
        second = (second + odd + first) % 2**32
    log = tmp_path / "a-wal"
    log.write_bytes(struct.pack(">8I", *header, first, second) + bytes(100))
    with pytest.raises(DamagedJournalError, match="header of a-wal"):
        read_log_end(log)
