"""What goes into a scaling decision and what comes out. Values only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamrl.spec.generators import Scaling

Curve = Callable[[float, int, int], float]
"""(T_gen in seconds at n replicas, n, m) -> predicted T_gen in seconds at m replicas; both at least 1."""


def inverse(t_gen_s: float, replicas: int, others: int) -> float:
    """Generation that splits evenly: T_gen · n / m. The default curve while none was measured."""
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
    interval_s: float | None = None
    """Mean time between two steps in the last window."""
    slack_windows: int = 0
    """Windows in a row in which one replica less would have been enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas the pool should have, and why, with the numbers."""

    replicas: int
    reason: str


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
            curve: how T_gen follows the number of replicas.
        """
