"""Reads the metrics of a run folder. Owns no presentation."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.errors import UserError
from streamrl_cli.runner.folder import RunFolder, open_folder, read_json
from streamrl_cli.runner.scaling import FILE_SCALING
from streamrl_workers.metrics.bubbles import ProcessWall, bubble_ratios
from streamrl_workers.metrics.sink import read_jsonl

PARTS = ("busy", "pipeline", "weights", "skew", "other")
"""The parts that a wall is made of, in the order in which they are drawn."""
MOST_BINS = 120
"""Points of a timeline: as many as can be told apart on a screen."""
SHORTEST_BIN_S = 1.0
"""Processes write their parts once a second."""


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
    steps: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]
    timelines: tuple[Timeline, ...]
    result: dict[str, Any] | None
    scaling: tuple[dict[str, Any], ...] = ()
    """Lines of `scaling.jsonl` (`runner/scaling.py`), in the order in which they happened."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> groups, over all lines of `steps.jsonl`: a step that is trained again does not undo what was lost before."""
    score_failures: Mapping[str, int] = field(default_factory=dict)
    """Kind -> samples that got no reward, held-out ones too, over the same lines."""


def read_run(path: Path) -> RunData:
    """Read a run folder.

    Raises:
        UserError: it is not one, or nothing has been measured yet.
    """
    folder = open_folder(path)
    metrics = folder.file(keys.DIR_METRICS)
    lines = list(read_jsonl(metrics / "steps.jsonl"))
    steps = {int(line["step"]): line for line in lines}
    evaluations = {int(line["step"]): line for line in read_jsonl(metrics / "evaluations.jsonl")}
    if not steps and not evaluations:
        raise UserError(field=str(path), rule="has no steps to report yet", fix="wait for the first step, or see logs/")
    result = folder.file(keys.FILE_RESULT)
    return RunData(
        folder=folder,
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        timelines=_timelines(metrics),
        result=read_json(result) if result.exists() else None,
        scaling=tuple(read_jsonl(metrics / FILE_SCALING)),
        dropped=_total(lines, "dropped"),
        score_failures=_total(lines, "score_failures"),
    )


def _total(lines: list[dict[str, Any]], column: str) -> dict[str, int]:
    """Counts of what happened at all, over all lines."""
    total: Counter[str] = Counter()
    for line in lines:
        total.update(line.get(column, {}))
    return {key: count for key, count in total.items() if count}


def _timelines(metrics: Path) -> tuple[Timeline, ...]:
    files = {path.stem: list(read_jsonl(path)) for path in sorted(metrics.glob("*.jsonl"))}
    processes = {name: lines for name, lines in files.items() if lines and "parts" in lines[0]}
    if not processes:
        return ()
    start_s = min(lines[0]["t"] - lines[0]["wall_s"] for lines in processes.values())
    end_s = max(lines[-1]["t"] for lines in processes.values())
    bins = Bins(start_s=start_s, width_s=max((end_s - start_s) / MOST_BINS, SHORTEST_BIN_S), end_s=end_s)
    order = sorted(processes, key=lambda name: (not name.startswith("trainer"), name))
    return tuple(_timeline(name, processes[name], bins=bins) for name in order)


def _timeline(name: str, lines: list[dict[str, Any]], *, bins: Bins) -> Timeline:
    """Spread the growth of each part between two lines over the bins it falls in."""
    seconds = {part: [0.0] * bins.count for part in PARTS}
    totals: dict[str, float] = {}
    wall_s = 0.0
    for from_s, until_s, grown in _growth(lines):
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


def _growth(lines: list[dict[str, Any]]) -> list[tuple[float, float, dict[str, float]]]:
    """(from, until, growth of each part) between consecutive lines of the same instance."""
    rows: list[tuple[float, float, dict[str, float]]] = []
    before: dict[str, Any] | None = None
    for line in lines:
        fresh = before is None or before["instance"] != line["instance"]
        base = {} if fresh or before is None else before["parts"]
        base_wall_s = 0.0 if fresh or before is None else before["wall_s"]
        grown = {part: value - base.get(part, 0.0) for part, value in line["parts"].items()}
        rows.append((line["t"] - (line["wall_s"] - base_wall_s), line["t"], grown))
        before = line
    return rows


def weighted_bubbles(run: RunData) -> dict[str, float]:
    """Share of each part in the wall of all processes together, weighted by what a process costs an hour."""
    spec = run.folder.job.spec
    costs = {f"generator-{pool.name}": float(pool.cost_per_hour) for pool in spec.generators}
    rank_cost = float(spec.trainer.cost_per_hour) / spec.trainer.ranks
    return bubble_ratios(
        ProcessWall(
            wall_s=line.wall_s,
            parts=line.totals_s,
            cost_per_hour=costs.get(line.process.rpartition("-")[0], rank_cost),
        )
        for line in run.timelines
    )
