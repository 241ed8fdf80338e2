"""Tail isolation: the longest requests alone on few replicas, where all requests run at once.

    min over (q, m) of the likely max{ T_tail(q, m), T_bulk(N - q, R - m) }          (after TailSieve, 2026)

m of R replicas take the q longest predicted of N groups. T is the exact replica time of the slowest replica of a side,
beside what runs there already. TailSieve knows the lengths; here they are drawn around predictions (`uncertain.py`), and
"likely" is the mean over draws and its error, so that a split is not chosen which only pays if nobody of the bulk is long
after all. That takes more replicas for fewer groups: with lengths known best at 2 of 16 replicas for the longest, a
predictor of recall .87 wants 8.

As q grows the tail gets slower and the bulk faster, the likely time of the slower one falls and then rises: for each
m a search over a coarse scale of q. Owns the search. Does not own whether sides pay (`tail_isolation.py`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from streamrl.spec.scheduling import SkewAware
from streamrl_workers.scheduler.dispatch.makespan import Instance, Pace, Together, dealt
from streamrl_workers.scheduler.dispatch.modelled import Model, likely
from streamrl_workers.scheduler.dispatch.policy import Candidate
from streamrl_workers.scheduler.dispatch.skew_aware import algorithm_2

GROWTH = 1.4
"""Numbers of replicas and of groups that are tried grow at least by this factor."""
NUMBERS = 12
"""About so many are tried at most: the search must not take long with a thousand replicas either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to isolate the tail."""

    groups: int
    """q: so many of the longest are the tail."""
    replicas: frozenset[int]
    """m of them, by place among the instances."""
    seconds: tuple[float, ...]
    """Makespan, by draw."""

    @property
    def likely_s(self) -> float:
        """Over the draws."""
        return likely(self.seconds)


class Isolation:
    """The search for one batch and one fleet."""

    def __init__(self, model: Model, ranked: Sequence[Candidate]) -> None:
        """`ranked`: groups of the model, longest predicted first, at least two; the model has two instances or more."""
        self._ranked = ranked
        self._instances = model.work.instances
        self._samples = model.work.samples
        self._groups = len(ranked)
        self._draws = model.in_order(ranked)

    def best(self) -> Split | None:
        """The best split whose tail has the first instances, that of Algorithm 2 among them; None if no split fits."""
        found = [split for size in scale(len(self._instances) - 1) if (split := self.at(range(size))) is not None]
        groups, static = algorithm_2(self._ranked, self._instances, samples=self._samples, options=SkewAware())
        paper = self.at(range(static.tail_instances), groups=groups)
        if paper is not None:
            found.append(paper)
        return min(found, key=lambda split: (split.likely_s, len(split.replicas)), default=None)

    def at(self, replicas: Collection[int], *, groups: int | None = None) -> Split | None:
        """The best q, or this one, for these replicas of the tail; None if it does not fit."""
        tail = _Side([self._instances[place] for place in sorted(replicas)], samples=self._samples, groups=self._groups)
        others = [instance for place, instance in enumerate(self._instances) if place not in replicas]
        bulk = _Side(others, samples=self._samples, groups=self._groups)
        low, high = max(1, self._groups - bulk.most), min(self._groups - 1, tail.most)
        if low > high or not low <= (low if groups is None else groups) <= high:
            return None
        known: dict[int, tuple[float, ...]] = {}

        def seconds(count: int) -> tuple[float, ...]:
            if count not in known:
                border = count * self._samples
                known[count] = tuple(
                    max(tail.seconds(draw[:border]), bulk.seconds(draw[border:])) for draw in self._draws
                )
            return known[count]

        best = _least([low, *(count for count in scale(high) if count > low)], seconds) if groups is None else groups
        return Split(groups=best, replicas=frozenset(replicas), seconds=seconds(best))


def _least(counts: Sequence[int], seconds: Callable[[int], Sequence[float]]) -> int:
    """Where a time that falls and then rises is least: thirds are left out until few counts are left."""
    first, last = 0, len(counts) - 1
    while last - first > 2:  # noqa: PLR2004 - a third to the left, a third to the right
        left = first + (last - first) // 3
        right = last - (last - first) // 3
        if likely(seconds(counts[left])) <= likely(seconds(counts[right])):
            last = right
        else:
            first = left
    return min(counts[first : last + 1], key=lambda count: (likely(seconds(count)), count))


class _Side:
    """Instances of one side."""

    def __init__(self, instances: Sequence[Instance], *, samples: int, groups: int) -> None:
        places = dealt(groups * samples, instances, together=samples)
        self.seconds = Together(Pace(instances), places).seconds
        """Makespan of samples that all begin now."""
        self.most = len(places) // samples
        """Groups that find free slots at once."""


def scale(most: int) -> list[int]:
    """Numbers from 1 to `most`, each `GROWTH` times the one before or one more; if that makes too many, with larger steps."""
    found, number = [], 1
    growth = max(GROWTH, most ** (1 / NUMBERS))
    while number < most:
        found.append(number)
        number = max(number + 1, int(number * growth))
    return [*found, most] if most > 0 else []
