"""Files of JSON lines: appended to by one process, read back whole or followed. Does not own what a line says."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from streamrl.errors import UserError
from streamrl.files import MissingFileError, bounded_lines, open_regular, parse_json

MOST_BYTES = 2**30
"""Of a file that is read back: a month of lines, one a second."""
MOST_LINE_BYTES = 2**20


class JsonlFile:
    """Appends JSON lines; each line is with the operating system when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # nothing of ours is left to flush at a kill
            if _ends_torn(path):
                self._write(b"\n")  # a killed predecessor's half line becomes a line of its own
        except OSError as error:
            raise self._unwritable(error) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        try:
            self._write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        written = self._file.write(line)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(field=str(self._path), rule=f"cannot be written: {error.strerror}", fix="free or fix the disk")


@dataclass(slots=True, kw_only=True)
class LineReader:
    """Follows a JSON-lines file: each call gives the whole lines that are new."""

    path: Path
    offset: int = 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Parsed lines since the last call; a line still being written waits for the next."""
        try:
            file = open_regular(self.path)
        except MissingFileError:
            return
        with file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                with suppress(ValueError):  # half a line that a full disk left
                    yield parse_json(line.decode())


def read_jsonl(path: Path, *, beneath: Path | None = None) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file; half lines that a killed process left are passed over. A missing file is empty.

    Args:
        path: the file; a number that is none (`NaN`) is read as absent.
        beneath: a run folder above it that may be foreign (`streamrl.files`).

    Raises:
        UserError: it cannot be read, or it or one of its lines is too large.
    """
    try:
        file = open_regular(path, beneath=beneath)
    except MissingFileError:
        return
    with file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise UserError(field=str(path), rule=f"must be at most {MOST_BYTES >> 20} MiB")
        for line in bounded_lines(file, name=str(path), most_bytes=MOST_LINE_BYTES):
            record = parse_line(line)
            if record is not None:
                yield record


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None: it is none, as half a line that a killed process left."""
    try:
        record = json.loads(line.decode("utf-8", errors="replace"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
