"""What a plan is worth by the model: the makespan of a batch under it, over draws of what lengths may turn out to be."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean, stdev

from streamrl_workers.scheduler.dispatch.makespan import Instance, Pace, dealt, list_seconds
from streamrl_workers.scheduler.dispatch.policy import Candidate, Plan, Work
from streamrl_workers.scheduler.dispatch.uncertain import possible_lengths

MOST_FOLLOWING = 2
"""Batches that are modelled behind one: more would seldom begin before its end."""


class Model:
    """One batch and one fleet."""

    def __init__(self, work: Work) -> None:
        """`work`: at least one instance."""
        self.work = work
        self._places = {group.group_id: place for place, group in enumerate(work.groups)}
        self._known: dict[Plan, list[float]] = {}
        """Makespans by plan, whatever its reason: a policy asks for some more than once."""

    @cached_property
    def draws(self) -> list[list[float]]:
        """Tokens of all samples, group after group in the order of `work.groups`."""
        return possible_lengths(
            [group.predicted_tokens for group in self.work.groups],
            samples=self.work.samples,
            rank_correlation=self.work.rank_correlation,
            unknown={place for place, group in enumerate(self.work.groups) if not group.is_known},
        )

    @property
    def fits(self) -> bool:
        """Whether there are slots for all samples, of which others may still hold some."""
        return len(self.work.groups) * self.work.samples <= sum(instance.slots for instance in self.work.instances)

    def seconds(self, plan: Plan) -> list[float]:
        """Makespan under the plan, beside what runs already and before what may begin behind it, by draw.

        Batches behind it are taken to be like it. They keep slots busy that would be free at its end, so its last samples
        do not get faster; when it is done decides when the batch after these may begin.

        Each side of the plan needs one of the instances, or nothing to do.
        """
        plan = replace(plan, why="")
        if plan not in self._known:
            self._known[plan] = self._makespans(plan)
        return self._known[plan]

    def in_order(self, groups: Sequence[Candidate]) -> list[list[float]]:
        """The draws of these groups only, in their order."""
        size = self.work.samples
        starts = [self._places[group.group_id] * size for group in groups]
        return [[tokens for start in starts for tokens in draw[start : start + size]] for draw in self.draws]

    def _makespans(self, plan: Plan) -> list[float]:
        groups = sorted(self.work.groups, key=plan.key)
        if not plan.tail_generators:
            return self._side(groups, self.work.instances)
        tail = [one for one in self.work.instances if one.generator_id in plan.tail_generators]
        rest = [one for one in self.work.instances if one.generator_id not in plan.tail_generators]
        sides = (
            self._side([group for group in groups if plan.is_tail(group)], tail),
            self._side([group for group in groups if not plan.is_tail(group)], rest),
        )
        return [max(both) for both in zip(*sides, strict=True)]

    def _side(self, groups: Sequence[Candidate], instances: Sequence[Instance]) -> list[float]:
        if not instances:
            return [float("inf") if groups else 0.0] * len(self.draws)
        places = dealt(len(groups) * self.work.samples, instances, together=self.work.samples)
        pace, batches = Pace(instances), min(self.work.overlap, MOST_FOLLOWING)
        return [
            list_seconds(lengths, pace, places=places, following=lengths * batches) for lengths in self.in_order(groups)
        ]


def plan_seconds(plan: Plan, work: Work) -> float:
    """Mean modelled makespan of the batch."""
    return fmean(Model(work).seconds(plan))


def gains(plan_s: Sequence[float], other_s: Sequence[float], *, share: float = 0.0) -> bool:
    """Whether a plan's makespans are less than the other's by more than this share, and by more than luck of the draws."""
    differences = [other - one for one, other in zip(plan_s, other_s, strict=True)]
    return fmean(differences) - _error(differences) > share * fmean(other_s)


def likely(seconds: Sequence[float]) -> float:
    """The mean over draws and its standard error: of many plans the one with the least mean alone owes it to luck of the draws."""
    return fmean(seconds) + _error(seconds)


# ---- inside


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for one value, which is the truth."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
