"""Appends a process's bubbles to `metrics/<process>.jsonl`, one cumulative line per sample; reads them back.

Owns: the line format. Does not own: when to sample, the numbers.

A line: `{"t": unix_s, "process": .., "role": .., "instance": .., "wall_s": .., "parts": {<every part>: seconds}}`.
Numbers are cumulative per instance; a restarted process appends under a new instance. The difference of two
neighbouring lines of one instance is what it did between them: enough for a timeline.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from streamrl.errors import UserError
from streamrl_workers.metrics.bubbles import PARTS

_DECIMALS = 6
"""Of seconds in a line: microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who measures."""

    process: str
    role: str  # generator | trainer | scheduler
    instance: str  # new at every process start


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleSample:
    """One line: cumulative seconds of one instance at an instant."""

    t_s: float  # unix time
    source: Source
    wall_s: float
    parts: Mapping[str, float]  # seconds


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


class BubbleSink:
    """The bubble file of one process."""

    def __init__(self, path: Path, *, source: Source) -> None:
        self._source = source
        self._file = JsonlFile(path)

    def write(self, *, t_s: float, wall_s: float, parts: Mapping[str, float]) -> None:
        """Append one sample; parts that are missing are written as zeros."""
        self._file.append(
            {
                "t": round(t_s, _DECIMALS),
                "process": self._source.process,
                "role": self._source.role,
                "instance": self._source.instance,
                "wall_s": round(wall_s, _DECIMALS),
                "parts": {part: round(parts.get(part, 0.0), _DECIMALS) for part in PARTS},
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file; half lines that a killed process left are passed over. A missing file is empty."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _parsed(line)
            if record is not None:
                yield record


def read_bubbles(path: Path) -> Iterator[BubbleSample]:
    """The samples of a bubble file, in the order written."""
    for record in read_jsonl(path):
        source = Source(process=record["process"], role=record["role"], instance=record["instance"])
        yield BubbleSample(t_s=record["t"], source=source, wall_s=record["wall_s"], parts=record["parts"])


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
