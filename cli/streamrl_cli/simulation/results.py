"""What a simulation gave: what is noted while it runs, its numbers at the end, and a trace. Decides nothing.

Everything is in virtual time and follows from scenario and seed alone; how fast the simulator was is not in here. A *sample
event* is a sample's issue, end or score: what a scheduler has to decide about. Bubbles are those of docs/concepts.md, over
all processes of a pool, weighted by cost over all.

The trace (`chrome_trace.py`) has a process for each replica and one for the trainer; a track for each slot, one for weights.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from streamrl_cli.reporting.chrome_trace import ChromeTrace
from streamrl_cli.simulation.scenario import Scenario
from streamrl_workers.metrics.bubbles import PARTS, ProcessWall, bubble_ratios
from streamrl_workers.scheduler.views import StepSummary

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One recorded step."""

    summary: StepSummary
    at_s: float
    """When its record was durable."""
    makespan_s: float
    """From the first admission to the last end of its samples."""
    tokens: int
    trusted: bool
    """Whether dispatch may use predicted lengths."""
    dispatch: str
    """How it goes, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChange:
    """A pool's size, and why."""

    at_s: float
    pool: str
    replicas: int
    reason: str


@dataclass(slots=True)
class Measures:
    """Counters and rows."""

    trace: ChromeTrace | None = None
    issued: int = 0
    ended: int = 0
    scored: int = 0
    lost_samples: int = 0
    """Taken from a replica before their end: it died, or the group was dropped."""
    tokens: int = 0
    """Of ended samples."""
    steps: list[StepRow] = field(default_factory=list)
    sizes: list[SizeChange] = field(default_factory=list)
    walls: dict[str, list[ProcessWall]] = field(default_factory=lambda: defaultdict(list))
    """Pool, or `trainer` -> its processes."""
    compositions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Step -> groups, as last recorded."""
    _spans: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """Group -> first admission, last end, tokens ended."""
    _last: StepSummary | None = None

    @property
    def sample_events(self) -> int:
        """Issues, ends and scores."""
        return self.issued + self.ended + self.scored

    def began(self, process: str, sample: tuple[int, int], *, now_s: float) -> None:
        """A sample is in an engine."""
        self.issued += 1
        if sample[0] not in self._spans:
            self._spans[sample[0]] = (now_s, now_s, 0)
        if self.trace is not None:
            self.trace.began(process, sample, now_s=now_s)

    def finished(self, process: str, sample: tuple[int, int], *, tokens: int, now_s: float) -> None:
        """It has all its tokens."""
        self.ended += 1
        self.tokens += tokens
        first_s, _, before = self._spans[sample[0]]
        self._spans[sample[0]] = (first_s, now_s, before + tokens)
        if self.trace is not None:
            self.trace.ended(process, sample, tokens=tokens, now_s=now_s)

    def lost(self, process: str, sample: tuple[int, int], *, now_s: float) -> None:
        """It has left the engine before its end."""
        self.lost_samples += 1
        if self.trace is not None:
            self.trace.ended(process, sample, tokens=None, now_s=now_s)

    def took(self, process: str, what: str, *, seconds: float, begun_s: float) -> None:
        """Something that takes so many seconds: weights, a step, a checkpoint."""
        if self.trace is not None and seconds > 0:
            self.trace.span(process, what, begun_s=begun_s, seconds=seconds)

    def recorded(self, summary: StepSummary | None, *, trusted: bool, dispatch: str, now_s: float) -> None:
        """The newest recorded step may be another than before."""
        if summary is None or summary is self._last:
            return
        self._last = summary
        spans = [self._spans[group_id] for group_id in self.compositions[summary.step]]
        makespan_s = max(last_s for _, last_s, _ in spans) - min(first_s for first_s, _, _ in spans)
        row = StepRow(
            summary=summary,
            at_s=now_s,
            makespan_s=makespan_s,
            tokens=sum(tokens for _, _, tokens in spans),
            trusted=trusted,
            dispatch=dispatch,
        )
        self.steps.append(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A run that has ended."""

    scenario: Scenario
    measures: Measures
    wall_s: float
    """Virtual seconds from the start to the end of the run."""
    events: int
    """Of the simulator's heap."""
    core_calls: int
    reissued_samples: int
    moved_samples: int = 0
    """Of those that went on at another replica because it paid."""

    @property
    def steps(self) -> Sequence[StepRow]:
        """One row for each record of a step, repeated ones too, in the order of time."""
        return self.measures.steps

    @property
    def trained_s(self) -> float:
        """When the last step was recorded."""
        return self.steps[-1].at_s

    def ratios(self, kind: str | None = None) -> Mapping[str, float]:
        """Part -> share of the wall, of one pool or the trainer; of all, weighted by cost, without `kind`."""
        kinds = list(self.measures.walls) if kind is None else [kind]
        return bubble_ratios(wall for name in kinds for wall in self.measures.walls[name])


def summary(outcome: SimulationResult) -> dict[str, Any]:
    """Everything, as plain data: the JSON file."""
    rows = _history(outcome.steps)
    samples = sum(row.summary.stats.samples for row in rows)
    tokens = sum(row.tokens for row in rows)
    trained_s, walls = outcome.trained_s, outcome.measures.walls
    ages: Counter[int] = sum((Counter(row.summary.staleness_histogram) for row in rows), Counter())
    dropped: Counter[str] = sum((Counter(row.summary.dropped_groups) for row in outcome.steps), Counter())
    return {
        "steps": len(rows),
        "virtual_s": outcome.wall_s,
        "trained_s": trained_s,
        "samples": samples,
        "tokens": tokens,
        "samples_per_s": samples / trained_s if trained_s else None,
        "tokens_per_s": tokens / trained_s if trained_s else None,
        "step_s": trained_s / len(rows),
        "steady_step_s": steady_step_s(rows),
        "makespan_s": sum(row.makespan_s for row in rows) / len(rows),
        "cost": sum(wall.wall_s * wall.cost_per_hour / _HOUR_S for wall in chain(*walls.values())),
        "bubbles": {"all": outcome.ratios()} | {kind: outcome.ratios(kind) for kind in walls},
        "seconds": {kind: _seconds(those) for kind, those in walls.items()},
        "staleness": {str(age): ages[age] for age in sorted(ages)},
        "dropped_groups": {reason: dropped[reason] for reason in sorted(dropped)},
        "reissued_samples": outcome.reissued_samples,
        "moved_samples": outcome.moved_samples,
        "lost_samples": max(0, outcome.measures.lost_samples - outcome.moved_samples),
        "sizes": [asdict(change) for change in outcome.measures.sizes],
        "by_step": [_row(row) for row in outcome.steps],
        "sample_events": outcome.measures.sample_events,
        "events": outcome.events,
        "core_calls": outcome.core_calls,
    }


def steady_step_s(rows: Sequence[StepRow]) -> float | None:
    """Mean seconds between the end of the first step and that of the last: without the filling of the pipeline."""
    return (rows[-1].at_s - rows[0].at_s) / (len(rows) - 1) if len(rows) > 1 else None


def _history(rows: Sequence[StepRow]) -> list[StepRow]:
    """The newest row of each step: one that was taken again counts once."""
    return list({row.summary.step: row for row in rows}.values())


def _row(row: StepRow) -> dict[str, Any]:
    found = row.summary
    return {
        "step": found.step,
        "attempt": found.attempt,
        "at_s": row.at_s,
        "makespan_s": row.makespan_s,
        "samples": found.stats.samples,
        "tokens": row.tokens,
        "staleness_mean": found.staleness_mean,
        "staleness_max": found.staleness_max,
        "reissued_samples": found.reissued_samples,
        "trusted": row.trusted,
        "dispatch": row.dispatch,
    }


def _seconds(walls: Sequence[ProcessWall]) -> dict[str, float]:
    parts = {part: sum(wall.parts[part] for wall in walls) for part in PARTS}
    return parts | {"wall": sum(wall.wall_s for wall in walls)}
