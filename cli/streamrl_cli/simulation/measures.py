"""What is noted while a simulation runs: samples, steps, walls, sizes. Decides nothing.

A *sample event* is a sample's issue, end or score: what a scheduler has to decide about.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl_cli.simulation.chrome_trace import ChromeTrace
from streamrl_workers.metrics.bubbles import ProcessWall
from streamrl_workers.scheduler.accounting import StepSummary


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
    walls: dict[str, list[ProcessWall]] = field(default_factory=dict)
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

    def took(self, process: str, what: str, *, seconds: float, now_s: float) -> None:
        """Something that takes so many seconds from now: weights, a step, a checkpoint."""
        if self.trace is not None and seconds > 0:
            self.trace.span(process, what, begun_s=now_s, seconds=seconds)

    def composed(self, step: int, group_ids: Sequence[int]) -> None:
        """A step's record is written."""
        self.compositions[step] = tuple(group_ids)

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

    def resized(self, change: SizeChange) -> None:
        """A pool's size is decided."""
        self.sizes.append(change)

    def process_ended(self, kind: str, wall: ProcessWall) -> None:
        """A process is no more, or the run is over."""
        self.walls.setdefault(kind, []).append(wall)
