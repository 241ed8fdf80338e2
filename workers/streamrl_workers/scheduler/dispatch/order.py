"""The order of what waits, and what a policy makes it from.

A policy answers with an order: a key for what waits, the smallest first, and perhaps two length pools. Generators of the
long pool take the groups that are predicted longest, all others the rest. The queue and the assignment know nothing else
of dispatch. An order is made rarely (`planning.py`); between two orders a dispatch is one pop of a heap.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

from streamrl.spec.base import PluginOptions
from streamrl_workers.scheduler.dispatch.makespan import Instance

Key = tuple[float, ...]
"""Place in the order of waiting groups: the smallest goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A planned group that waits, before its first sample is out."""

    group_id: int
    batch: int
    """Which batch of B groups it was planned in: group_id // B."""
    place: int
    """In that batch: group_id % B."""
    predicted_tokens: float
    """Of one completion; 0 while no length has been seen."""
    is_known: bool = True
    """Whether any signal that may decide knows the prompt; if not, the prediction is the median of all."""

    @property
    def rank(self) -> Key:
        """In its batch: smaller for longer ones, equal ones in the order of planning."""
        return (-self.predicted_tokens, self.place)


def as_planned(candidate: Candidate) -> Key:
    """First planned, first taken."""
    return (candidate.group_id,)


def longest_in_batch(candidate: Candidate) -> Key:
    """Longest predicted first, batch by batch: else short prompts would wait behind newly planned long ones for ever."""
    return (candidate.batch, -candidate.predicted_tokens, candidate.group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What holds until the next order."""

    key: Callable[[Candidate], Key]
    """A group's place in the queue of its pool. A function of a module: orders with the same one are equal."""
    long_generators: frozenset[str] = frozenset()
    """Generators of the long pool; empty: there is one pool."""
    last_long: Key = (-inf,)
    """Groups whose rank is not above it belong to the long pool; by default none does."""
    why: str
    """For people."""

    @property
    def reorders(self) -> bool:
        """Whether it is another one than that of planning."""
        return self.key is not as_planned

    def is_long(self, candidate: Candidate) -> bool:
        """Whether the group waits for the long pool."""
        return bool(self.long_generators) and candidate.rank <= self.last_long


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """What an order is made for: a batch as it was planned, and the generators that may take it."""

    trusted: bool
    """Whether predicted lengths have proved to be better than chance."""
    groups: Sequence[Candidate] = ()
    """In the order of planning."""
    samples: int = 1
    """Of each group."""
    overlaps: bool = False
    """Whether another batch may begin before it is done, and take the slots that free."""
    begun: bool = False
    """Whether something of it is out: its generators are not free any more."""
    instances: Sequence[Instance] = ()
    """Fastest first (`makespan.fastest_first`)."""
    measured: bool = True
    """Whether the speed of all instances is known."""
    rank_correlation: float = 1.0
    """Spearman's, of predicted places with the means that groups then had: the lower limit of the worst trusted signal."""

    @property
    def fits(self) -> bool:
        """Whether there are slots for all samples, of which others may still hold some."""
        return len(self.groups) * self.samples <= sum(instance.slots for instance in self.instances)


class Policy(Protocol):
    """One way to dispatch."""

    def order(self, batch: PlannedBatch) -> Order:
        """The order from now on."""


class DispatchPolicy(ABC):
    """Base of plug-ins that dispatch. It is called in the scheduler's event loop: every message waits for it."""

    def __init__(self, options: PluginOptions) -> None:
        self.options: Any = options

    @abstractmethod
    def order(self, batch: PlannedBatch) -> Order:
        """The order from now on."""


IN_ORDER = Order(key=as_planned, why="in the order of planning")
LONGEST_FIRST = Order(key=longest_in_batch, why="longest predicted first")


def in_order(why: str) -> Order:
    """The order of planning, for this reason."""
    return replace(IN_ORDER, why=f"{IN_ORDER.why}: {why}")
