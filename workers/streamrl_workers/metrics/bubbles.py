"""Partitions the wall time of a process into busy time and bubbles; sums bubbles over processes by cost.

Owns: the parts, the rule of the skew part, the ratios. Does not own: clocks (instants are parameters), writing.

Invariant: after any sequence of transitions, the parts add up to the wall (to float rounding).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Cause = Literal["no_prompts", "no_samples", "staleness", "due_group", "back_pressure", "turn"]
Part = Literal[
    "busy",
    "pipeline_no_prompts",
    "pipeline_no_samples",
    "pipeline_staleness",
    "pipeline_due_group",
    "pipeline_back_pressure",
    "pipeline_turn",
    "weights",
    "skew",
    "other",
]
PARTS: tuple[Part, ...] = get_args(Part)
CAUSES: tuple[Cause, ...] = get_args(Cause)

_PIPELINE: dict[str, Part] = {
    "no_prompts": "pipeline_no_prompts",
    "no_samples": "pipeline_no_samples",
    "staleness": "pipeline_staleness",
    "due_group": "pipeline_due_group",
    "back_pressure": "pipeline_back_pressure",
    "turn": "pipeline_turn",
}
_IDLE_OTHERWISE: dict[str, Part] = {"no_weights": "weights", "ended": "other"}
"""Idle causes of the protocol that are no pipeline bubble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a process does from one instant to the next: `part`, of which `skew_share` (0 to 1) counts as skew."""

    part: Part
    skew_share: float = 0.0


def idle(cause: str) -> State:
    """The state of an idle process that was told `cause` (`Idle.cause` of the protocol); unknown causes are `other`."""
    return State(part=_PIPELINE.get(cause) or _IDLE_OTHERWISE.get(cause, "other"))


def generating(*, active: int, slots: int, waiting: bool) -> State:
    """A generator with `active` > 0 of `slots` in use. Empty slots are skew only when nothing waits for one."""
    assert 0 < active <= slots, f"{active} of {slots} slots"
    return State(part="busy", skew_share=0.0 if waiting else (slots - active) / slots)


class WallPartition:
    """Accumulates seconds by part. Instants come from one monotonic clock and do not go back."""

    def __init__(self, *, now_s: float, part: Part = "other") -> None:
        self._begun_s = now_s
        self._last_s = now_s
        self._state = State(part=part)
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @property
    def state(self) -> State:
        """What the process does now."""
        return self._state

    def enter(self, state: State | Part, *, now_s: float) -> None:
        """From `now_s` on the process is in `state`."""
        self._advance(now_s)
        self._state = State(part=state) if isinstance(state, str) else state

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
