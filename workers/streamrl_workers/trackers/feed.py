"""Follows a run folder for one tracker: what is new in the metrics and in the archive, and how far the tracker came.

    metrics/steps.jsonl, metrics/evaluations.jsonl, archive/ ──▶ TrackerFeed ──▶ NewPoints ──▶ trackers/<key>.json

Invariants: a step is told once: what a later attempt trains again keeps the values of the first. An evaluation is never told before the
steps behind it. Reads what the scheduler writes, and writes nothing but the position.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.files import MissingFileError, read_json
from streamrl.keys import DIR_ARCHIVE, DIR_METRICS, DIR_TRACKERS
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.jsonl import LineReader
from streamrl_workers.stream.archive import ArchivedEntry, read_archive
from streamrl_workers.stream.run_folder import write_json_atomically
from streamrl_workers.stream.sample_choice import KINDS, choose
from streamrl_workers.trackers.registry import SampleRow, ScalarPoint
from streamrl_workers.trackers.scalars import evaluation_point, step_point

STEPS_FILE, EVALUATIONS_FILE = "steps.jsonl", "evaluations.jsonl"
MOST_LINES = 500
"""Of a file at a time: what is told has a deadline."""
MOST_TABLES = 20
"""At a time, as for lines."""
MOST_CHARS = 2000
"""Of a prompt or completion in a table."""

log = logging.getLogger("streamrl.trackers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerPosition:
    """How far a tracker came. Offsets are bytes of the two files."""

    steps: int = 0
    """Told: the step of the next line that is new."""
    steps_offset: int = 0
    evaluations: int = 0
    """Evaluations of smaller steps were told."""
    evaluations_offset: int = 0
    segment: int = 0
    groups: int = 0
    """Of this segment that were looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPoints:
    """What is new."""

    points: tuple[ScalarPoint, ...]
    tables: dict[int, list[SampleRow]]
    """Step -> its samples."""
    position: TrackerPosition
    """Once all this is told."""
    is_all: bool
    """Nothing more was there."""


class TrackerFeed:
    """What one tracker is still to be told."""

    def __init__(self, run_dir: Path, *, key: str, sample_interval_steps: int) -> None:
        self._run_dir = run_dir
        self._metrics = run_dir / DIR_METRICS
        self._file = run_dir / DIR_TRACKERS / f"{key}.json"
        self._interval = sample_interval_steps
        self.position = self._stored()

    def new(self, *, final: bool = False) -> NewPoints:
        """What came since the position, or a bounded part of it. `final`: no line is still being written."""
        before = self.position
        steps = LineReader(path=self._metrics / STEPS_FILE, offset=before.steps_offset)
        lines = list(islice(steps.new_lines(), MOST_LINES))
        trained = list(_first(map(step_point, filter(_has_step, lines)), above=before.steps))
        is_all = len(lines) < MOST_LINES
        told = max([before.steps, *(point.step for point in trained)])
        evaluated, evaluations_offset = self._evaluated(None if final and is_all else told)
        tables = self._samples(final=final)
        position = TrackerPosition(
            steps=told,
            steps_offset=steps.offset,
            evaluations=max([before.evaluations, *(point.step + 1 for point in evaluated)]),
            evaluations_offset=evaluations_offset,
            segment=tables.segment,
            groups=tables.groups,
        )
        return NewPoints(
            points=(*trained, *evaluated), tables=tables.by_step, position=position, is_all=is_all and tables.is_all
        )

    def _evaluated(self, last_step: int | None) -> tuple[list[ScalarPoint], int]:
        """Evaluations up to `last_step` (None: all), and the offset behind them."""
        reader = LineReader(path=self._metrics / EVALUATIONS_FILE, offset=self.position.evaluations_offset)
        points, offset = [], reader.offset
        for line in filter(_has_step, reader.new_lines()):
            point = evaluation_point(line)
            if last_step is not None and point.step > last_step:
                break  # the line of its step may have been lost with a scheduler; the next step's comes, or the end
            points.append(point)
            offset = reader.offset
        return list(_first(points, above=self.position.evaluations - 1)), offset

    def told(self, position: TrackerPosition) -> None:
        """All up to `position` is where a kill does not take it away. Raises `UserError`: the disk refuses."""
        if position != self.position:
            write_json_atomically(self._file, asdict(position))
        self.position = position

    def _stored(self) -> TrackerPosition:
        try:
            document = read_json(self._file, beneath=self._run_dir)
            return TrackerPosition(**{name: int(value) for name, value in document.items()})
        except MissingFileError:
            return TrackerPosition()
        except (AttributeError, TypeError, ValueError):
            raise UserError(field=str(self._file), rule="is not what was written", fix="remove it") from None

    def _samples(self, *, final: bool) -> "_NewTables":
        """Tables of the steps that are due among the groups that were archived since."""
        if not self._interval:
            return _NewTables(segment=self.position.segment, groups=self.position.groups)
        try:
            return _tables(self._new_groups(), start=self.position, interval=self._interval, final=final)
        except UserError as error:
            log.warning("samples are looked for again: %s", error)
            return _NewTables(segment=self.position.segment, groups=self.position.groups)

    def _new_groups(self) -> Iterator[tuple[int, int, ArchivedEntry]]:
        """(segment, groups of it up to this one, the group) of those behind the position."""
        seen = Counter[int]()
        for entry in read_archive(self._run_dir / DIR_ARCHIVE, beneath=self._run_dir, first=self.position.segment):
            seen[entry.segment] += 1
            if (entry.segment, seen[entry.segment]) > (self.position.segment, self.position.groups):
                yield entry.segment, seen[entry.segment], entry


@dataclass(slots=True, kw_only=True)
class _NewTables:
    """Tables, and the position behind them."""

    segment: int
    groups: int
    by_step: dict[int, list[SampleRow]] = field(default_factory=dict)
    is_all: bool = True


def _tables(
    groups: Iterable[tuple[int, int, ArchivedEntry]], *, start: TrackerPosition, interval: int, final: bool
) -> _NewTables:
    """A step's groups follow each other: it is whole when one of a later step comes, or at the end of the run."""
    found = _NewTables(segment=start.segment, groups=start.groups)
    step, members = 0, list[ArchivedEntry]()
    for segment, number, entry in groups:
        trained = entry.head.step + 1 if entry.head.HasField("step") else 0
        if members and trained > step:
            found.by_step[step], members = list(_rows(members, step=step)), []
            found.segment, found.groups = segment, number - 1
            if len(found.by_step) == MOST_TABLES:
                found.is_all = False
                return found
        if trained and not trained % interval and trained >= step:
            step = trained
            members.append(entry)
        if not members:
            found.segment, found.groups = segment, number
    if members and final:
        found.by_step[step] = list(_rows(members, step=step))
    return found


def _has_step(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("step"), int)


def _first(points: Iterable[ScalarPoint], *, above: int) -> Iterator[ScalarPoint]:
    """Each step once, in the order in which they came, and only those that were not told before."""
    for point in points:
        if point.step > above:
            above = point.step
            yield point


def _rows(entries: list[ArchivedEntry], *, step: int) -> Iterator[SampleRow]:
    for entry, index, kinds in choose(entries, kinds=tuple(KINDS), count=1):
        stored = entry.samples()
        sample = stored.samples[index]
        texts = stored.texts.samples
        written = texts[index] if index < len(texts) else pb.SampleTexts()
        reward = sample.reward if sample.HasField("reward") else None
        tokens = entry.head.samples[index].tokens
        texts_of = (stored.texts.prompt[-MOST_CHARS:], "\n".join(written.turns)[:MOST_CHARS])
        yield step, ", ".join(kinds), reward, tokens, sample.finish_reason, *texts_of
