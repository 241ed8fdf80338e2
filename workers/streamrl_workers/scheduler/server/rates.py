"""Rates over the last heartbeats and the last steps: what the scheduler's `/numbers` says of speed.

Owns the windows and the differences. Instants are parameters. Absent is None: a rate needs two points.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streamrl_workers.metrics.bubbles import PARTS

LEASES = 2
"""Of a window, about: long enough that a step's rhythm does not show."""
SHARES = 8
"""Of a window's span: two heartbeats that are kept are at least one of them apart, so it holds few however often they come."""
STEPS = 8
"""Steps in a window."""
SHORTEST_S = 1e-3
"""A shorter wall gives no rate: what is divided by it need not be a number any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One heartbeat; all three only grow while the process lives."""

    wall_s: float
    parts: Mapping[str, float]
    """Seconds by part of the wall."""
    tokens: int = 0
    """Generated."""


@dataclass(slots=True)
class BeatWindow:
    """The last heartbeats of one connection: those of the last `span_s` of its wall, and the one before them."""

    span_s: float
    _beats: deque[Beat] = field(default_factory=deque)

    def add(self, beat: Beat) -> None:
        """A heartbeat has come."""
        apart = len(self._beats) > 1 and beat.wall_s - self._beats[-2].wall_s >= self.span_s / SHARES
        if len(self._beats) > 1 and not apart:  # nor is a wall that is not a number
            self._beats.pop()
        self._beats.append(beat)
        while len(self._beats) > 2 and beat.wall_s - self._beats[1].wall_s >= self.span_s:  # noqa: PLR2004 - a rate needs two
            self._beats.popleft()

    @property
    def wall_s(self) -> float:
        """Seconds between the first and the last heartbeat."""
        return self._beats[-1].wall_s - self._beats[0].wall_s if self._beats else 0.0

    def shares(self) -> dict[str, float] | None:
        """Part -> share of the wall (they add up to 1)."""
        wall_s = self.wall_s
        if wall_s < SHORTEST_S:
            return None
        first, last = self._beats[0].parts, self._beats[-1].parts
        return {part: (last.get(part, 0.0) - first.get(part, 0.0)) / wall_s for part in PARTS}

    def tokens_per_s(self) -> float | None:
        """Tokens a second of its wall."""
        wall_s = self.wall_s
        return (self._beats[-1].tokens - self._beats[0].tokens) / wall_s if wall_s >= SHORTEST_S else None


def mean_shares(windows: Iterable[BeatWindow]) -> dict[str, float] | None:
    """Mean over the processes of which anything is known."""
    known = [shares for window in windows if (shares := window.shares()) is not None]
    if not known:
        return None
    return {part: sum(shares[part] for shares in known) / len(known) for part in PARTS}


def tokens_per_s(windows: Iterable[BeatWindow]) -> float | None:
    """Sum over the processes of which anything is known."""
    known = [rate for window in windows if (rate := window.tokens_per_s()) is not None]
    return sum(known) if known else None


class StepClock:
    """When the last steps were recorded."""

    def __init__(self, *, now_s: float) -> None:
        self._newest_s = now_s
        self._ends_s: deque[float] = deque(maxlen=STEPS + 1)

    def recorded(self, *, now_s: float) -> None:
        """A step is recorded."""
        self._newest_s = now_s
        self._ends_s.append(now_s)

    def since_s(self, *, now_s: float) -> float:
        """Seconds since the last recorded step, or since the start."""
        return now_s - self._newest_s

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the last steps."""
        if len(self._ends_s) < 2:  # noqa: PLR2004 - a duration has two ends
            return None
        return (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
