"""Where each process's wall time went, over the time of a run or a part of it, from the lines that processes write once a second.

Owns how little of a file is read. Lines are cumulative, so those between two read ones are not needed: of a long file some hundred are
read, at equal distances, and both sides of each place where the process was started anew. Totals are exact; where within a stretch time
was spent is not told, as its bin does not tell it either.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from streamrl.errors import UserError
from streamrl.files import open_regular
from streamrl.spec.schema import path_text
from streamrl_cli.runner.progress import PARTS
from streamrl_workers.metrics.bubbles import Part
from streamrl_workers.metrics.jsonl import MOST_BYTES, MOST_LINE_BYTES, parse_line

MOST_BINS = 120
"""Points of a timeline: as many as can be told apart on a screen."""
SHORTEST_BIN_S = 1.0
"""Processes write their parts once a second."""
_LINES = 4 * MOST_BINS
"""Read of a long file."""
_MOST_STARTS = 1000
_NEAR_BYTES = 2**16
"""Some hundred lines: so far a place is looked for by halves, then one by one."""
Seconds = Annotated[float, Field(ge=0, le=1e11)]


@with_config(ConfigDict(strict=True, allow_inf_nan=False))
class WallRecord(TypedDict):
    """A line of a process's bubbles (`metrics/jsonl.py` of the workers)."""

    t: Seconds
    instance: str
    wall_s: Seconds
    parts: dict[Part, Seconds]


WALL = TypeAdapter(WallRecord)
Record = TypeVar("Record")
Growth = tuple[float, float, Mapping[Part, float]]
"""From, until, seconds of each part between the two."""


def checked(line: object, shape: TypeAdapter[Record], *, path: Path) -> Record:
    """A line of a file as this shape. Raises `UserError`: it has another."""
    try:
        return shape.validate_python(line)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        field, rule = path_text(details["loc"]), details["msg"]
        got = None if details["type"] == "missing" else details["input"]
        raise UserError(field=f"{path}: {field}", rule=rule[:1].lower() + rule[1:], got=got) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one process did over time."""

    process: str
    minutes: tuple[float, ...]
    """Middle of each bin, minutes since the run's first line."""
    bin_minutes: float
    shares: Mapping[str, tuple[float, ...]]
    """Part -> share of each bin, 0 to 1."""
    totals_s: Mapping[str, float]
    """Part (causes of `pipeline` apart) -> seconds over the time that is shown, all instances of the process together."""
    wall_s: float
    instances: tuple[tuple[float, str], ...]
    """(seconds since the epoch, name) of each start of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Equal bins over a time."""

    start_s: float
    end_s: float
    width_s: float

    @property
    def count(self) -> int:
        """Number of bins, at least one."""
        return max(1, math.ceil((self.end_s - self.start_s) / self.width_s))

    def spread(self, from_s: float, until_s: float) -> list[tuple[int, float]]:
        """(bin, share of the interval in it); an interval that is a point goes to its bin whole."""
        first, last = self._bin(from_s), self._bin(until_s)
        if until_s <= from_s or first == last:
            return [(last, 1.0)]
        shares = []
        for index in range(first, last + 1):
            begin_s = self.start_s + index * self.width_s
            overlap_s = min(until_s, begin_s + self.width_s) - max(from_s, begin_s)
            shares.append((index, overlap_s / (until_s - from_s)))
        return shares

    def _bin(self, at_s: float) -> int:
        return min(max(int((at_s - self.start_s) / self.width_s), 0), self.count - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """A part of a run, in minutes since its first line."""

    start: float
    end: float


class ClockRange(NamedTuple):
    """A part of a run by the clock of its lines."""

    from_s: float
    until_s: float


def timelines(files: Mapping[str, Path], *, beneath: Path, window: TimeRange | None = None) -> tuple[Timeline, ...]:
    """Of each process its timeline, the trainer first; `window` None: of the whole run.

    Raises `UserError`: a file cannot be read, or a line is not of this shape.
    """
    ends = {name: found for name, path in files.items() if (found := _ends(path, beneath=beneath))}
    if not ends:
        return ()
    start_s = min(first["t"] - first["wall_s"] for first, _ in ends.values())
    shown = ClockRange(-math.inf, math.inf)  # a clock that jumps leaves no line out
    from_s, until_s = start_s, max(last["t"] for _, last in ends.values())
    if window is not None:
        shown = ClockRange(start_s + 60 * window.start, start_s + 60 * window.end)
        from_s, until_s = shown
    bins = Bins(start_s=from_s, end_s=until_s, width_s=max((until_s - from_s) / MOST_BINS, SHORTEST_BIN_S))
    order = sorted(ends, key=lambda name: (not name.startswith("trainer"), name))
    return tuple(
        _timeline(name, _lines(files[name], *shown, beneath=beneath), shown=shown, bins=bins, start_s=start_s)
        for name in order
    )


def _timeline(name: str, lines: list[WallRecord], *, shown: ClockRange, bins: Bins, start_s: float) -> Timeline:
    """Spread the growth of each part between two lines over the bins it falls in."""
    seconds = {part: [0.0] * bins.count for part in PARTS}
    totals: dict[str, float] = {}
    wall_s = 0.0
    for from_s, until_s, grown in growth(lines):
        inside = _inside(from_s, until_s, shown)
        if not inside:
            continue
        wall_s += inside * (until_s - from_s)
        for cause, amount in grown.items():
            totals[cause] = totals.get(cause, 0.0) + inside * amount
            for index, share in bins.spread(max(from_s, bins.start_s), min(until_s, bins.end_s)):
                seconds[cause.split("_", 1)[0]][index] += share * inside * amount
    before = round((bins.start_s - start_s) / 60, 6)
    starts = {line["instance"]: line["t"] - line["wall_s"] for line in reversed(lines)}
    return Timeline(
        process=name,
        minutes=tuple(round(before + (index + 0.5) * bins.width_s / 60, 6) for index in range(bins.count)),
        shares={part: tuple(round(min(1.0, value / bins.width_s), 4) for value in seconds[part]) for part in PARTS},
        bin_minutes=bins.width_s / 60,
        totals_s=totals,
        wall_s=wall_s,
        instances=tuple(sorted((at_s, name) for name, at_s in starts.items())),
    )


def _inside(from_s: float, until_s: float, shown: ClockRange) -> float:
    """Share of an interval that is shown."""
    if until_s <= from_s:
        return float(shown.from_s <= until_s <= shown.until_s)
    return max(0.0, min(until_s, shown.until_s) - max(from_s, shown.from_s)) / (until_s - from_s)


def growth(lines: list[WallRecord]) -> list[Growth]:
    """(from, until, growth of each part) between consecutive lines of the same instance."""
    rows: list[Growth] = []
    instance, wall_s, parts = "", 0.0, dict[Part, float]()
    for line in lines:
        if line["instance"] != instance:
            wall_s, parts = 0.0, {}
        grown = {part: value - parts.get(part, 0.0) for part, value in line["parts"].items()}
        rows.append((line["t"] - (line["wall_s"] - wall_s), line["t"], grown))
        instance, wall_s, parts = line["instance"], line["wall_s"], line["parts"]
    return rows


# ---- reading


@dataclass(frozen=True, slots=True)
class _Line:
    """A line and where it lies in its file."""

    begin: int
    end: int
    record: WallRecord


class _WallFile:
    """Lines of one file, found by their places."""

    def __init__(self, file: BinaryIO, *, path: Path) -> None:
        self._file, self._path = file, path
        self.size_bytes = os.fstat(file.fileno()).st_size
        if self.size_bytes > MOST_BYTES:
            raise UserError(field=str(path), rule=f"must be at most {MOST_BYTES >> 20} MiB")

    def at(self, offset: int) -> _Line | None:
        """The first whole line that begins there or behind it; None: there is none."""
        self._file.seek(max(0, offset - 1))
        begin = offset if not offset else offset - 1 + len(self._readline())
        while (line := self._readline()).endswith(b"\n"):
            record = parse_line(line)
            if record is not None:
                return _Line(begin, begin + len(line), checked(record, WALL, path=self._path))
            begin += len(line)
        return None

    def last(self) -> _Line | None:
        """The last whole line."""
        back = _NEAR_BYTES
        while True:
            offset, found = max(0, self.size_bytes - back), None
            while (line := self.at(offset)) is not None:
                found, offset = line, line.end
            if found is not None or back >= self.size_bytes:
                return found
            back *= 4

    def last_before(self, at_s: float) -> int:
        """Where the last line of before that time begins; 0: there is none."""
        low, high = 0, self.size_bytes
        while high - low > 1:
            middle = (low + high) // 2
            line = self.at(middle)
            if line is None or line.record["t"] >= at_s:
                high = middle
            else:
                low = line.begin
        return low

    def between(self, left: _Line, right: _Line) -> Iterator[_Line]:
        """Lines between two on whose sides the process is not the same one: the last of each instance and the first of the next."""
        while left.record["instance"] != right.record["instance"]:
            low, high = left, right
            while (line := self.at((low.end + high.begin) // 2)) is not None and line.begin < high.begin:
                if line.record["instance"] == left.record["instance"]:
                    low = line
                else:
                    high = line
            while (line := self.at(low.end)) is not None and line.record["instance"] == left.record["instance"]:
                low = line
            if line is None:
                return
            yield low
            yield line
            left = line

    def _readline(self) -> bytes:
        line = self._file.readline(MOST_LINE_BYTES + 1)
        if len(line) > MOST_LINE_BYTES:
            raise UserError(field=str(self._path), rule=f"a line must be at most {MOST_LINE_BYTES} bytes")
        return line


def _ends(path: Path, *, beneath: Path) -> tuple[WallRecord, WallRecord] | None:
    with open_regular(path, beneath=beneath) as file:
        lines = _WallFile(file, path=path)
        first, last = lines.at(0), lines.last()
    return None if first is None or last is None else (first.record, last.record)


def _lines(path: Path, from_s: float, until_s: float, *, beneath: Path) -> list[WallRecord]:
    """Lines from the last before `from_s` to the first behind `until_s`: all, or some hundred of many."""
    with open_regular(path, beneath=beneath) as opened:
        file = _WallFile(opened, path=path)
        begin, end = file.last_before(from_s), file.last_before(until_s)
        found: list[_Line] = []
        offset = begin
        while offset <= end and (line := file.at(offset)) is not None:
            found.append(line)
            offset = max(line.end, begin + len(found) * (end - begin) // _LINES)
        while found and found[-1].record["t"] < until_s and (line := file.at(found[-1].end)) is not None:
            found.append(line)
        whole, starts = found[:1], 0
        for left, right in pairwise(found):
            for line in file.between(left, right):
                whole.append(line)
                starts += 1
                if starts > 2 * _MOST_STARTS:  # each is two lines
                    raise UserError(field=str(path), rule=f"must be of at most {_MOST_STARTS} starts of a process")
            whole.append(right)
    return [line.record for line in whole]
