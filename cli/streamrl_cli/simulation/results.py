"""What a simulation gave, in numbers: the content of the table, of the JSON file and of the plot. Pure.

Everything is in virtual time and follows from scenario and seed alone; how fast the simulator was is not in here.
Bubbles are those of docs/concepts.md, over all processes of a pool, weighted by cost over all.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl_cli.simulation.measures import Measures, StepRow
from streamrl_cli.simulation.scenario import Scenario
from streamrl_workers.metrics.bubbles import PARTS, ProcessWall, bubble_ratios

_HOUR_S = 3600.0
TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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

    def process_walls(self) -> Mapping[str, Sequence[ProcessWall]]:
        """Pool or `trainer` -> walls of its processes."""
        return self.measures.walls


def summary(outcome: Outcome) -> dict[str, Any]:
    """Everything, as plain data: the JSON file."""
    rows = _history(outcome.steps)
    samples = sum(row.summary.samples for row in rows)
    tokens = sum(row.tokens for row in rows)
    trained_s = outcome.trained_s
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
        "cost": sum(
            wall.wall_s * wall.cost_per_hour / _HOUR_S for walls in outcome.process_walls().values() for wall in walls
        ),
        "bubbles": {"all": outcome.ratios()} | {kind: outcome.ratios(kind) for kind in outcome.process_walls()},
        "seconds": {kind: _seconds(walls) for kind, walls in outcome.process_walls().items()},
        "staleness": _staleness(rows),
        "dropped_groups": _dropped(outcome.steps),
        "reissued_samples": outcome.reissued_samples,
        "moved_samples": outcome.moved_samples,
        "lost_samples": max(0, outcome.measures.lost_samples - outcome.moved_samples),
        "sizes": [
            {"at_s": change.at_s, "pool": change.pool, "replicas": change.replicas, "reason": change.reason}
            for change in outcome.measures.sizes
        ],
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
        "samples": found.samples,
        "tokens": row.tokens,
        "staleness_mean": found.staleness_mean,
        "staleness_max": found.staleness_max,
        "reissued_samples": found.reissued_samples,
        "trusted": row.trusted,
        "dispatch": row.dispatch,
    }


def _staleness(rows: Sequence[StepRow]) -> dict[str, int]:
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row.summary.staleness_histogram)
    return {str(age): counts[age] for age in sorted(counts)}


def _dropped(rows: Sequence[StepRow]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row.summary.dropped_groups)
    return {reason: counts[reason] for reason in sorted(counts) if counts[reason]}


def _seconds(walls: Sequence[ProcessWall]) -> dict[str, float]:
    parts = {part: sum(wall.parts[part] for wall in walls) for part in PARTS}
    return parts | {"wall": sum(wall.wall_s for wall in walls)}
