"""What a dispatch policy sees and answers.

A policy answers with a plan: the order of the groups that wait, and perhaps two sides, each with generators
of its own. A plan is made rarely (`replanning.py`); between plans a dispatch is one pop of a heap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from streamrl_workers.scheduler.dispatch.makespan import Instance

Key = tuple[float, ...]
"""Place in the order of waiting groups: the smallest goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A planned group that waits, before its first sample is out."""

    group_id: int
    wave: int
    """Which batch of B groups it was planned in: group_id // B."""
    place: int
    """In that batch: group_id % B."""
    predicted_tokens: float
    """Of one completion; 0 while no length has been seen."""
    is_known: bool = True
    """Whether any signal that may decide knows the prompt; if not, the prediction is the median of all."""

    @property
    def rank(self) -> Key:
        """Smaller for longer ones; equal ones in the order of planning."""
        return (-self.predicted_tokens, self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What holds until the next plan."""

    longest_first: bool
    """Within the batch that a group was planned in; else the order of planning."""
    cutoff: Key = (-inf,)
    """Groups whose rank is not above it are the tail; by default none is."""
    tail_generators: frozenset[str] = frozenset()
    """They take the tail, the others the rest."""
    strict: bool = False
    """A free slot stays empty while a generator of the other side can serve what waits, if only later."""
    why: str
    """For people."""

    def key(self, candidate: Candidate) -> Key:
        """Its place in the queue of its side."""
        if self.longest_first:
            return (candidate.wave, -candidate.predicted_tokens, candidate.group_id)
        return (candidate.group_id,)

    def is_tail(self, candidate: Candidate) -> bool:
        """Whether the group belongs to the tail's side."""
        return bool(self.tail_generators) and candidate.rank <= self.cutoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a plan is made for: a batch as it was planned, and the generators that may take it."""

    trusted: bool
    """Whether predicted lengths have proved to be better than chance."""
    groups: Sequence[Candidate] = ()
    """In the order of planning."""
    samples: int = 1
    """Of each group."""
    overlap: int = 0
    """Batches that may begin before it is done: S; 0: batches take turns, but for what dynamic sampling plans in addition."""
    begun: bool = False
    """Whether something of the batch is out: its generators are not free any more."""
    instances: Sequence[Instance] = ()
    """Fastest first (`makespan.fastest_first`)."""
    load_spread_s: float = 0.0
    """Seconds from the first generator that had loaded the newest version to the last one."""
    rank_correlation: float = 1.0
    """Spearman's, of predicted places with the means that groups then had: the lower limit of the worst trusted signal."""


class Policy(Protocol):
    """One way to dispatch."""

    @property
    def models(self) -> bool:
        """Whether its plan looks at groups and instances; if not, they are not collected."""

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """The plan from now on."""


IN_ORDER = Plan(longest_first=False, why="in the order of planning")
LONGEST_FIRST = Plan(longest_first=True, why="longest predicted first")


def in_order(why: str) -> Plan:
    """The order of planning, for this reason."""
    return replace(IN_ORDER, why=f"{IN_ORDER.why}: {why}")


DISTRUST = in_order("length predictions have not proved to be good")


def unmodelled(work: Work) -> Plan | None:
    """The plan where there is nothing to model: without trust, groups or generators; else None."""
    if not work.trusted:
        return DISTRUST
    return None if work.groups and work.instances else IN_ORDER


def tail_plan(tail: Sequence[Candidate], generators: Sequence[Instance], *, strict: bool, why: str) -> Plan:
    """A plan with two sides.

    Args:
        tail: its groups, longest predicted first; at least one.
        generators: its generators; at least one.
        strict: see `Plan`.
        why: for people.
    """
    return Plan(
        longest_first=True,
        cutoff=tail[-1].rank,
        tail_generators=frozenset(instance.generator_id for instance in generators),
        strict=strict,
        why=why,
    )
