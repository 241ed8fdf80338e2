"""Reads the metrics of a run folder: the door between foreign files and the page. Owns no presentation.

Owns names, types and bounds of what a report shows. Fields that it does not show are left out, and may be anything.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from streamrl import keys
from streamrl.errors import UserError
from streamrl.spec.schema import path_text
from streamrl_cli.reporting.samples import ShownSample, of_step
from streamrl_cli.runner.folder import RunFolder, open_folder
from streamrl_cli.runner.progress import PARTS
from streamrl_cli.runner.scaling import FILE_SCALING
from streamrl_workers.metrics.bubbles import Part, ProcessWall, bubble_ratios
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.stream.sample_choice import KINDS

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
Count = Annotated[int, Field(ge=0, le=2**53)]
ResizeRecord = TypedDict("ResizeRecord", {"time_s": Seconds, "pool": str, "from": Count, "to": Count, "reason": str})
"""A line of `scaling.jsonl`."""
MOST_PROCESSES = 1000
_NO_PROCESSES = frozenset(("steps.jsonl", "evaluations.jsonl", FILE_SCALING))
MOST_BINS = 120
"""Points of a timeline: as many as can be told apart on a screen."""
_SAMPLES_OF_A_KIND = 2
SHORTEST_BIN_S = 1.0
"""Processes write their parts once a second."""
RESIZE: TypeAdapter[ResizeRecord] = TypeAdapter(with_config(_STRICT)(ResizeRecord))
Record = TypeVar("Record")
Growth = tuple[float, float, Mapping[Part, float]]
"""From, until, seconds of each part between the two."""


@with_config(_STRICT)
class StepRecord(TypedDict):
    """A line of `steps.jsonl`."""

    step: Count
    reward_mean: Number
    elapsed_s: Seconds
    tokens: Count
    samples: NotRequired[Count]
    time_s: NotRequired[Seconds]
    length_mean: NotRequired[Number | None]
    length_max: NotRequired[Number | None]
    tokens_per_s: NotRequired[Number | None]
    staleness_mean: NotRequired[Number | None]
    staleness_max: NotRequired[Number | None]
    queue: NotRequired[Count | None]
    reward_parts: NotRequired[dict[str, Number | None]]
    trainer: NotRequired[dict[str, Number | None]]
    score_failures: NotRequired[dict[str, Count]]
    dropped: NotRequired[dict[str, Count]]


@with_config(_STRICT)
class EvaluationRecord(TypedDict):
    """A line of `evaluations.jsonl`."""

    step: Count
    mean_reward: Number | None
    sampled_reward: NotRequired[Number | None]


@with_config(_STRICT)
class WallRecord(TypedDict):
    """A line of a process's bubbles (`metrics/jsonl.py` of the workers)."""

    t: Seconds
    instance: str
    wall_s: Seconds
    parts: dict[Part, Seconds]


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
    """Part (causes of `pipeline` apart) -> seconds over the run, all instances of the process together."""
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Equal bins over the time of a run."""

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
class RunData:
    """Everything that a report shows."""

    folder: RunFolder
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    timelines: tuple[Timeline, ...]
    result: dict[str, Any] | None
    scaling: tuple[ResizeRecord, ...] = ()
    """Lines of `scaling.jsonl` (`runner/scaling.py`), in the order in which they happened."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> groups, over all lines of `steps.jsonl`: a step that is trained again does not undo what was lost before."""
    score_failures: Mapping[str, int] = field(default_factory=dict)
    """Kind -> samples that got no reward, held-out ones too, over the same lines."""
    samples: tuple[ShownSample, ...] = ()
    """Some of the newest step."""
    no_samples: str = ""
    """Why there are none to show; "": there are, or the folder has no journal."""


def read_run(path: Path) -> RunData:
    """Read a run folder.

    Raises `UserError`: it is not one, one of its files cannot be read, or nothing has been measured yet.
    """
    folder = open_folder(path)
    metrics = folder.file(keys.DIR_METRICS)
    lines = list(records(metrics / "steps.jsonl", STEP, beneath=folder.path))
    steps = {line["step"]: line for line in lines}
    held_out = records(metrics / "evaluations.jsonl", EVALUATION, beneath=folder.path)
    evaluations = {line["step"]: line for line in held_out}
    if not steps and not evaluations:
        raise UserError(field=str(path), rule="has no steps to report yet", fix="wait for the first step, or see logs/")
    samples, no_samples = _samples(folder)
    return RunData(
        folder=folder,
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        timelines=_timelines(folder),
        result=folder.result(),
        scaling=tuple(records(metrics / FILE_SCALING, RESIZE, beneath=folder.path)),
        dropped=sum((Counter(line.get("dropped", {})) for line in lines), Counter()),
        score_failures=sum((Counter(line.get("score_failures", {})) for line in lines), Counter()),
        samples=samples,
        no_samples=no_samples,
    )


def _samples(folder: RunFolder) -> tuple[tuple[ShownSample, ...], str]:
    """Of the newest step; a journal that cannot be believed costs the page its samples alone."""
    if not folder.file(keys.FILE_JOURNAL).exists():
        return (), ""
    try:
        return of_step(folder.path, step=None, kinds=tuple(KINDS), count=_SAMPLES_OF_A_KIND).samples, ""
    except UserError as error:
        return (), str(error)


def wall_lines(folder: RunFolder) -> dict[str, list[WallRecord]]:
    """Process -> its lines, of those that have some."""
    files = sorted(path for path in folder.file(keys.DIR_METRICS).glob("*.jsonl") if path.name not in _NO_PROCESSES)
    if len(files) > MOST_PROCESSES:
        raise UserError(field=str(folder.file(keys.DIR_METRICS)), rule=f"must hold at most {MOST_PROCESSES} processes")
    found = {path.stem: list(records(path, WALL, beneath=folder.path)) for path in files}
    return {name: lines for name, lines in found.items() if lines}


def _timelines(folder: RunFolder) -> tuple[Timeline, ...]:
    processes = wall_lines(folder)
    if not processes:
        return ()
    start_s = min(lines[0]["t"] - lines[0]["wall_s"] for lines in processes.values())
    end_s = max(lines[-1]["t"] for lines in processes.values())
    bins = Bins(start_s=start_s, width_s=max((end_s - start_s) / MOST_BINS, SHORTEST_BIN_S), end_s=end_s)
    order = sorted(processes, key=lambda name: (not name.startswith("trainer"), name))
    return tuple(_timeline(name, processes[name], bins=bins) for name in order)


def _timeline(name: str, lines: list[WallRecord], *, bins: Bins) -> Timeline:
    """Spread the growth of each part between two lines over the bins it falls in."""
    seconds = {part: [0.0] * bins.count for part in PARTS}
    totals: dict[str, float] = {}
    wall_s = 0.0
    for from_s, until_s, grown in growth(lines):
        wall_s += until_s - from_s
        for cause, amount in grown.items():
            totals[cause] = totals.get(cause, 0.0) + amount
            for index, share in bins.spread(from_s, until_s):
                seconds[cause.split("_", 1)[0]][index] += share * amount
    return Timeline(
        process=name,
        minutes=tuple(round((index + 0.5) * bins.width_s / 60, 6) for index in range(bins.count)),
        shares={part: tuple(round(min(1.0, value / bins.width_s), 4) for value in seconds[part]) for part in PARTS},
        bin_minutes=bins.width_s / 60,
        totals_s=totals,
        wall_s=wall_s,
    )


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


def weighted_bubbles(run: RunData) -> dict[str, float]:
    """Share of each part in the wall of all processes together, weighted by what a process costs an hour."""
    return bubble_ratios(_walls(run))


def cost(run: RunData) -> float:
    """What all processes have cost, by their wall time and `costPerHour`."""
    return sum(wall.wall_s * wall.cost_per_hour for wall in _walls(run)) / 3600


def _walls(run: RunData) -> Iterator[ProcessWall]:
    spec = run.folder.job.spec
    costs = {f"generator-{pool.name}": float(pool.cost_per_hour) for pool in spec.generators}
    rank_cost = float(spec.trainer.cost_per_hour) / spec.trainer.ranks
    for line in run.timelines:
        price = costs.get(line.process.rpartition("-")[0], rank_cost)
        yield ProcessWall(wall_s=line.wall_s, parts=line.totals_s, cost_per_hour=price)


STEP, EVALUATION, WALL = TypeAdapter(StepRecord), TypeAdapter(EvaluationRecord), TypeAdapter(WallRecord)


def records(path: Path, shape: TypeAdapter[Record], *, beneath: Path) -> Iterator[Record]:
    """The lines of a file of the run folder `beneath`.

    Raises `UserError`: the file cannot be read, or a line is not of this shape.
    """
    for line in read_jsonl(path, beneath=beneath):
        try:
            yield shape.validate_python(line)
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            field, rule = path_text(details["loc"]), details["msg"]
            got = None if details["type"] == "missing" else details["input"]
            raise UserError(field=f"{path}: {field}", rule=rule[:1].lower() + rule[1:], got=got) from None
