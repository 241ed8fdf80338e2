"""Where a process's wall time goes: busy, or a bubble; and the ratios over several processes, weighted by cost.

    WallPartition   pure: instants are parameters; after any transitions the parts add up to the wall (to float rounding)
    Recorder        a partition by this process's clock; writes file and counters every `INTERVAL_S` and at the end.
                    Thread-safe: a worker thread may `enter` states while the loop writes samples
    BubbleSink      one cumulative line per sample in `metrics/<process>.jsonl`

A line: `{"t": unix_s, "process": .., "role": .., "instance": .., "wall_s": .., "parts": {<every part>: seconds}}`.
Seconds are cumulative per instance; a restarted process appends under a new instance. The difference of two
neighbouring lines of one instance is what it did between them: enough for a timeline.
Does not own what the process does.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from streamrl_workers.metrics.jsonl import JsonlFile

Part = Literal[
    "busy",
    "pipeline_no_prompts",
    "pipeline_no_samples",
    "pipeline_staleness",
    "pipeline_scoring",
    "pipeline_due_group",
    "pipeline_back_pressure",
    "pipeline_phase",
    "weights",
    "skew",
    "other",
]
PARTS: tuple[Part, ...] = get_args(Part)
_PIPELINE: dict[str, Part] = {part.removeprefix("pipeline_"): part for part in PARTS if part.startswith("pipeline_")}
CAUSES = tuple(_PIPELINE)
_IDLE_OTHERWISE: dict[str, Part] = {"no_weights": "weights", "ended": "other"}
"""Idle causes of the protocol that are no pipeline bubble."""
_AWAITS_WEIGHTS = frozenset({"staleness", "phase", "no_weights"})
"""Idle causes that new weights end: with a pull on its way, the transfer is what is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WallState:
    """What a process does from one instant to the next: `part`, of which `skew_share` (0 to 1) counts as skew."""

    part: Part
    skew_share: float = 0.0


def idle(cause: str) -> WallState:
    """The state of an idle process that was told `cause` (`Idle.cause` of the protocol); unknown causes are `other`."""
    return WallState(part=_PIPELINE.get(cause) or _IDLE_OTHERWISE.get(cause, "other"))


def generating(*, active: int, slots: int, waiting: bool) -> WallState:
    """A generator with `active` > 0 of `slots` in use. Empty slots are skew only when nothing waits for one."""
    assert 0 < active <= slots, f"{active} of {slots} slots"
    return WallState(part="busy", skew_share=0.0 if waiting else (slots - active) / slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorState:
    """What a generator is in between two transitions."""

    connected: bool  # welcomed by the scheduler
    usable: bool  # verified weights are in the engine
    swapping: bool  # weights go into the engine
    pulling: bool  # weights are on their way
    blocked: bool  # the scheduler does not take what is finished
    active: int  # requests in the engine; none while it is paused
    slots: int
    queued: bool  # samples wait for a slot, here or at the scheduler
    idle_cause: str  # as the scheduler told


def generator_wall(now: GeneratorState) -> WallState:
    """The state that this situation counts as."""
    if not now.connected:
        return WallState(part="other")
    if now.swapping or not now.usable:
        return WallState(part="weights")
    if now.blocked:
        return idle("back_pressure")
    if now.active:
        return generating(active=now.active, slots=now.slots, waiting=now.queued)
    if now.pulling and now.idle_cause in _AWAITS_WEIGHTS:
        return WallState(part="weights")
    return idle(now.idle_cause)


class WallPartition:
    """Accumulates seconds by part. Instants come from one monotonic clock and do not go back."""

    def __init__(self, *, now_s: float, part: Part = "other") -> None:
        self._begun_s = now_s
        self._last_s = now_s
        self._state = WallState(part=part)
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @property
    def state(self) -> WallState:
        """What the process does now."""
        return self._state

    def enter(self, state: WallState | Part, *, now_s: float) -> None:
        """From `now_s` on the process is in `state`."""
        self._advance(now_s)
        self._state = WallState(part=state) if isinstance(state, str) else state

    def parts(self, *, now_s: float) -> dict[str, float]:
        """Cumulative seconds of every part up to `now_s`, zeros included."""
        self._advance(now_s)
        return dict(self._seconds)

    def wall_s(self, *, now_s: float) -> float:
        """Seconds since the partition began."""
        return now_s - self._begun_s

    def _advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._last_s
        assert elapsed_s >= 0, f"the clock went back by {-elapsed_s} s"
        skew_s = elapsed_s * self._state.skew_share
        self._seconds["skew"] += skew_s
        self._seconds[self._state.part] += elapsed_s - skew_s
        self._last_s = now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessWall:
    """One process's wall, for the ratios over several."""

    wall_s: float
    parts: Mapping[str, float]  # seconds
    cost_per_hour: float


def bubble_ratios(processes: Iterable[ProcessWall]) -> dict[str, float]:
    """Part / wall over all processes, weighted by cost; all parts, and `pipeline` as the sum of its causes.

    Zeros when there is no wall yet.
    """
    wall_cost = 0.0
    costs: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for process in processes:
        wall_cost += process.wall_s * process.cost_per_hour
        for part in PARTS:
            costs[part] += process.parts.get(part, 0.0) * process.cost_per_hour
    ratios = {part: cost / wall_cost if wall_cost > 0 else 0.0 for part, cost in costs.items()}
    return ratios | {"pipeline": sum(ratios[part] for part in _PIPELINE.values())}


_DECIMALS = 6
"""Of seconds in a line: microseconds."""
INTERVAL_S = 1.0
"""Between two samples: the resolution of timelines."""


class BubbleSink:
    """The bubble file of one process."""

    def __init__(self, path: Path, *, process: str, role: str, instance: str) -> None:
        """`role`: generator | trainer | scheduler; `instance`: new at every process start."""
        self._labels = {"process": process, "role": role, "instance": instance}
        self._file = JsonlFile(path)

    def write(self, *, t_s: float, wall_s: float, parts: Mapping[str, float]) -> None:
        """Append one sample; parts that are missing are written as zeros."""
        self._file.append(
            {
                "t": round(t_s, _DECIMALS),
                **self._labels,
                "wall_s": round(wall_s, _DECIMALS),
                "parts": {part: round(parts.get(part, 0.0), _DECIMALS) for part in PARTS},
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class BubbleMetrics(Protocol):
    """Counters of a process's wall time."""

    def bubbles(self, *, parts: Mapping[str, float], wall_s: float) -> None:
        """Take over cumulative seconds."""


class Recorder:
    """Counts the wall of this process from its construction on; it begins in `other`."""

    def __init__(
        self,
        *,
        sink: BubbleSink | None,
        metrics: BubbleMetrics | None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._metrics = metrics
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._partition = WallPartition(now_s=clock_s())

    def enter(self, state: WallState | Part) -> None:
        """From now on the process is in `state`."""
        with self._lock:
            self._partition.enter(state, now_s=self._clock_s())

    @contextmanager
    def during(self, state: WallState | Part) -> Iterator[None]:
        """Inside, the process is in `state`; afterwards in the state it was in."""
        with self._lock:
            before = self._partition.state
            self._partition.enter(state, now_s=self._clock_s())
        try:
            yield
        finally:
            self.enter(before)

    def totals(self) -> tuple[float, dict[str, float]]:
        """Wall seconds and cumulative seconds of every part, now."""
        with self._lock:
            now_s = self._clock_s()
            return self._partition.wall_s(now_s=now_s), self._partition.parts(now_s=now_s)

    def refresh(self) -> tuple[float, dict[str, float]]:
        """Bring the counters up to now; what `totals` says."""
        wall_s, parts = self.totals()
        if self._metrics is not None:
            self._metrics.bubbles(parts=parts, wall_s=wall_s)
        return wall_s, parts

    def sample(self) -> None:
        """Write one sample to file and counters."""
        wall_s, parts = self.refresh()
        if self._sink is not None:
            self._sink.write(t_s=time.time(), wall_s=wall_s, parts=parts)

    async def run(self) -> None:
        """Write a sample every `INTERVAL_S` until cancelled; the last one is written by `close`."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def close(self) -> None:
        """Write the last sample and close the file."""
        self.sample()
        if self._sink is not None:
            self._sink.close()
            self._sink = None
