"""What goes into a scaling decision and what comes out. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.latency import LatencyCurve
from streamrl.spec.generators import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTimes:
    """How one process spent its time since it started."""

    wall_s: float
    idle_s: float
    """Of it: with nothing to do because another stage had nothing for it (all `pipeline` parts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedReplica:
    """One connected generator of the pool."""

    name: str
    slots: int
    active: int
    """Slots in use."""
    clock: ProcessTimes
    tokens: float = 0.0
    """Generated since it started, as of its clock."""
    busy_s: float = 0.0
    """Of its clock: generated, weighted by the slots in use while no sample waits."""
    skew_s: float = 0.0
    """Of its clock: generated with the other slots, empty since no sample waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObservation:
    """What is seen of a pool at one moment."""

    at_s: float
    """The caller's monotonic clock."""
    attempt: int
    """Of the trainer: a new one begins again at its checkpoint."""
    step: int
    """Training steps recorded."""
    waiting: int
    """Samples that wait for a slot, of all pools: there is one queue."""
    replicas: tuple[ConnectedReplica, ...]
    """Those that are wanted and connected, by ordinal."""
    trainer: ProcessTimes | None
    """None: no trainer is connected."""
    since_step_s: float = 0.0
    """Since the last step was recorded."""
    latency: LatencyCurve | None = None
    """Of the pool's replicas, as measured; None: not known."""

    @property
    def backlog(self) -> int:
        """Queue depth: waiting samples beyond what free slots take.

        Where slots are free and samples wait, it is for another reason (staleness, back-pressure, no weights).
        """
        return self.waiting if all(replica.active >= replica.slots for replica in self.replicas) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePace:
    """What the two stages need for one step, measured over a window of whole steps."""

    replicas: int
    interval_s: float
    """Mean time between two steps."""
    t_gen_s: float
    """Seconds that the pool's generators need for a step: the interval without their idle time."""
    t_train_s: float
    """Seconds that the trainer needs for a step: the interval without its idle time."""
    tokens_per_s: float = 0.0
    """That all replicas together generate."""
    waits: float = 1.0
    """Share of the time of generating in which samples wait for a slot, at most."""
    batch: float = 0.0
    """Samples that a replica generates at once while none waits, on average."""
    latency: LatencyCurve | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """What was expected of added replicas, and what came. Both as logarithms of a speed-up: of several they add up."""

    expected: float = 0.0
    came: float = 0.0
    before: StagePace | None = None
    """When the newest replica was asked for; None: what it brought is counted."""
    newest: float = 0.0
    """What is expected of it."""
    released_s: float | None = None
    """They brought too little: no more of them until T_gen is longer than that. None: nothing is held."""
    why: str = ""
    """Of `released_s`, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """What a policy remembers between two calls."""

    wanted: int
    """Replicas."""
    changed_s: float | None = None
    """When `wanted` last changed; None: never."""
    base: PoolObservation | None = None
    """Begin of the window that is being measured."""
    aligned: bool = False
    """Whether `base` was seen when a step had just ended: a window of whole steps begins there."""
    looks: int = 0
    """Since `base`."""
    queued: int = 0
    """Looks at which samples waited for a slot."""
    pace: StagePace | None = None
    """Of the last windows, the newest as much as all before it."""
    gains: Gains = Gains()
    held: str = ""
    """Why it does not grow although the pace asks for it; empty: it may."""
    slack_windows: int = 0
    """Windows in a row in which one replica less would have been enough."""


def resized(state: ScalingState, *, replicas: int, now_s: float) -> ScalingState:
    """After a change of size that no policy decided on: what was measured was of other replicas, and is no proof of what they bring."""
    return ScalingState(wanted=replicas, changed_s=now_s, pace=state.pace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas the pool should have, and why, with the numbers."""

    replicas: int
    reason: str
    held: str = ""
    """Why the pool does not grow although the pace asks for it, without numbers of the moment; empty: it may."""


class ScalingPolicy(Protocol):
    """Decides on one pool."""

    def __call__(
        self,
        scaling: Scaling,
        *,
        state: ScalingState,
        seen: PoolObservation | None,
        now_s: float,
    ) -> tuple[Decision, ScalingState]:
        """The decision and the state for the next call.

        Args:
            scaling: of the pool; its choice is the policy's own.
            state: of the last call.
            seen: what is known now; None: nothing.
            now_s: the caller's monotonic clock.
        """


_IDLE = "pipeline"
"""Parts of the wall whose names begin so are idle time that another stage causes (docs/concepts.md, Bubbles)."""


def generator_name(pool: str, *, ordinal: int) -> str:
    """Name of a generator in the run, and of its pod."""
    return f"generator-{pool}-{ordinal}"


def observe(numbers: Mapping[str, Any] | None, *, pool: str, wanted: int, now_s: float) -> PoolObservation | None:
    """The pool as the page shows it; None without a page, after the run's end, or if the page is not whole.

    Only ordinals below `wanted` count: one that is leaving is no replica any more.
    """
    if numbers is None or numbers.get("ended"):
        return None
    names = [generator_name(pool, ordinal=ordinal) for ordinal in range(wanted)]
    try:
        connected = {str(line["id"]): line for line in numbers["generators"]}
        trainer = numbers["trainer"]
        return PoolObservation(
            at_s=now_s,
            attempt=int(numbers["attempt"]),
            step=int(numbers["step"]),
            waiting=int(numbers["queue"]),
            replicas=tuple(_replica(connected[name]) for name in names if name in connected),
            trainer=None if trainer is None else _clock(trainer),
            since_step_s=float(numbers["scaling"]["since_step_s"]),
            latency=_latency(numbers["dispatch"]["pools"].get(pool)),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _replica(line: Mapping[str, Any]) -> ConnectedReplica:
    parts = line["bubbles"]
    return ConnectedReplica(
        name=str(line["id"]),
        slots=int(line["slots"]),
        active=int(line["active"]),
        clock=_clock(line),
        tokens=float(line["tokens"]),
        busy_s=float(parts.get("busy", 0.0)),
        skew_s=float(parts.get("skew", 0.0)),
    )


def _latency(speed: Mapping[str, Any] | None) -> LatencyCurve | None:
    """The pool's decoding step by its batch, as measured; a guess or half a curve is none."""
    if speed is None or speed["speed"] != "known":
        return None
    points = sorted((int(batch), float(seconds)) for batch, seconds in speed["step_s"].items())
    return LatencyCurve(tuple(batch for batch, _ in points), tuple(seconds for _, seconds in points))


def _clock(line: Mapping[str, Any]) -> ProcessTimes:
    idle_s = sum(float(seconds) for part, seconds in line["bubbles"].items() if part.startswith(_IDLE))
    return ProcessTimes(wall_s=float(line["wall_s"]), idle_s=idle_s)
