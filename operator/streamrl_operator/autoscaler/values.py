"""What goes into a scaling decision and what comes out. Values only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamrl.latency import LatencyCurve
from streamrl.spec.generators import Scaling

Curve = Callable[[float, int, int], float]
"""(T_gen in seconds at n replicas, n, m) -> predicted T_gen in seconds at m replicas; both at least 1."""


def inverse(t_gen_s: float, replicas: int, others: int) -> float:
    """Generation that splits evenly: T_gen · n / m. The most that another replica can bring, so with it Δ ≥ Δ' is asked for surely."""
    return t_gen_s * replicas / others


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How one process spent its time since it started."""

    wall_s: float
    idle_s: float
    """Of it: with nothing to do because another stage had nothing for it (all `pipeline` parts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One connected generator of the pool."""

    name: str
    slots: int
    active: int
    """Slots in use."""
    clock: Clock
    tokens: float = 0.0
    """Generated since it started, as of its clock."""
    busy_s: float = 0.0
    """Of its clock: generated, weighted by the slots in use while no sample waits."""
    skew_s: float = 0.0
    """Of its clock: generated with the other slots, empty since no sample waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is seen of a pool at one moment."""

    at_s: float
    """The caller's monotonic clock."""
    attempt: int
    """Of the trainer: a new one begins again at its checkpoint."""
    step: int
    """Training steps recorded."""
    waiting: int
    """Samples that wait for a slot, of all pools: there is one queue."""
    replicas: tuple[Replica, ...]
    """Those that are wanted and connected, by ordinal."""
    trainer: Clock | None
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
class Pace:
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
    before: Pace | None = None
    """When the newest replica was asked for; None: what it brought is counted."""
    newest: float = 0.0
    """What is expected of it."""
    released_s: float | None = None
    """They brought too little: no more of them until T_gen is longer than that. None: nothing is held."""
    why: str = ""
    """Of `released_s`, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a policy remembers between two calls."""

    wanted: int
    """Replicas."""
    changed_s: float | None = None
    """When `wanted` last changed; None: never."""
    base: Observation | None = None
    """Begin of the window that is being measured."""
    aligned: bool = False
    """Whether `base` was seen when a step had just ended: a window of whole steps begins there."""
    looks: int = 0
    """Since `base`."""
    queued: int = 0
    """Looks at which samples waited for a slot."""
    pace: Pace | None = None
    """Of the last windows, the newest as much as all before it."""
    gains: Gains = Gains()
    held: str = ""
    """Why it does not grow although the pace asks for it; empty: it may."""
    slack_windows: int = 0
    """Windows in a row in which one replica less would have been enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas the pool should have, and why, with the numbers."""

    replicas: int
    reason: str
    held: str = ""
    """Why the pool does not grow although the pace asks for it, without numbers of the moment; empty: it may."""


class Policy(Protocol):
    """Decides on one pool."""

    def __call__(
        self, scaling: Scaling, *, state: State, seen: Observation | None, now_s: float, curve: Curve = inverse
    ) -> tuple[Decision, State]:
        """The decision and the state for the next call.

        Args:
            scaling: of the pool; its choice is the policy's own.
            state: of the last call.
            seen: what is known now; None: nothing.
            now_s: the caller's monotonic clock.
            curve: how T_gen follows the number of replicas in Δ'.
        """
