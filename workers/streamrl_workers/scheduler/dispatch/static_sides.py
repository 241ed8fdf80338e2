"""Static sides by search: the q longest predicted groups on m generators, all others on the rest, each side longest first.

    min over (q, m) of the likely max{ T_tail(q, m), T_rest(N - q, R - m) }

Sides as Algorithm 2 makes them (`skew_aware.py`), with q and m chosen by the model of a batch instead of by rounds of P90 and P50.
What isolation (`isolation.py`) does not look at: the rest may have more samples than slots. Where there is room for twice the
batch, few generators that take many short ones one after the other leave nearly all others to the longest, a few on each: with 1,024
samples on 32 generators of 64 slots best is 112 on 27 and 912 on 5. A tail's free slot then stays empty while the rest waits, so sides
are strict, and are made only for what they gain by the model.

For a q the tail gets faster and the rest slower with m, so the best m is where they cross: by bisection, over few draws. What comes
out best is modelled over all draws. Owns the search. Does not own whether sides may be (`tail_isolation.py`).
"""

from collections.abc import Iterator

from streamrl.spec.scheduling import SkewAware
from streamrl_workers.scheduler.dispatch.makespan import Pace, dealt, list_seconds
from streamrl_workers.scheduler.dispatch.modelled import Model, likely
from streamrl_workers.scheduler.dispatch.policy import Plan, tail_plan
from streamrl_workers.scheduler.dispatch.skew_aware import algorithm_2

PROBES = 2
"""Draws for the search."""
FINALISTS = 5
"""So many of the best are modelled over all draws."""
TAIL_SHARES = (0.02, 0.04, 0.06, 0.09, 0.12, 0.16, 0.2, 0.25, 0.33, 0.5)
"""q as shares of the groups."""
MOST_MODELLED = 400_000
"""Samples that the search models, over all it tries: bounds its time, to half a second or so. With more it tries fewer q, with far more only Algorithm 2's."""
_PAPER = (SkewAware(objective="Max"), SkewAware(objective="Sum"))

Split = tuple[int, int]
"""q groups of the tail on the first m instances."""


def best_static(model: Model) -> Plan:
    """The plan with the least likely makespan; the model has two groups and two instances or more."""
    search = _Search(model)
    return min((search.plan(split) for split in search.finalists()), key=lambda plan: likely(model.seconds(plan)))


# ---- inside


class _Search:
    """One batch and one fleet."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._instances = model.work.instances
        self._ranked = sorted(model.work.groups, key=lambda group: group.rank)
        self._samples = model.work.samples
        self._draws = model.in_order(self._ranked)[:PROBES]
        self._known: dict[Split, tuple[float, float]] = {}

    def plan(self, split: Split) -> Plan:
        """The plan with these sides."""
        groups, tail = split
        why = f"the {groups} longest of {len(self._ranked)} groups on {tail} of {len(self._instances)} generators, the others on the rest"
        return tail_plan(self._ranked[:groups], self._instances[:tail], strict=True, why=why)

    def finalists(self) -> list[Split]:
        """The best by the probes, and Algorithm 2's with either objective."""
        found = {split for groups in self._tails() for split in self._crossing(groups)}
        best = sorted(found, key=lambda split: (max(self._seconds(split)), split))[:FINALISTS]
        return list(dict.fromkeys([*best, *self._paper()]))

    def _paper(self) -> Iterator[Split]:
        for options in _PAPER:
            groups, split = algorithm_2(self._ranked, self._instances, samples=self._samples, options=options)
            yield groups, split.tail_instances

    def _tails(self) -> list[int]:
        """Numbers of groups to try, as many as there is time for."""
        count = len(self._ranked)
        steps = (len(self._instances) - 1).bit_length() + 2
        most = MOST_MODELLED // (count * self._samples * len(self._draws) * steps)
        shares = (
            TAIL_SHARES if most >= len(TAIL_SHARES) else TAIL_SHARES[1 :: -(-len(TAIL_SHARES) // most)] if most else ()
        )
        return sorted({min(max(1, round(count * share)), count - 1) for share in shares})

    def _crossing(self, groups: int) -> set[Split]:
        """The two numbers of instances between which the tail stops being the slower side."""
        low, high = 1, len(self._instances) - 1
        while low < high:
            middle = (low + high) // 2
            tail_s, rest_s = self._seconds((groups, middle))
            low, high = (middle + 1, high) if tail_s > rest_s else (low, middle)
        return {(groups, tail) for tail in (low - 1, low) if tail}

    def _seconds(self, split: Split) -> tuple[float, float]:
        """Of the tail and of the rest, the mean over the probes."""
        if split not in self._known:
            groups, tail = split
            border = groups * self._samples
            sides = ((slice(border), self._instances[:tail]), (slice(border, None), self._instances[tail:]))
            tail_s, rest_s = (self._side(part, Pace(instances)) for part, instances in sides)
            self._known[split] = tail_s, rest_s
        return self._known[split]

    def _side(self, part: slice, pace: Pace) -> float:
        places = dealt(len(self._draws[0][part]), pace.instances, together=self._samples)
        return sum(list_seconds(draw[part], pace, places=places) for draw in self._draws) / len(self._draws)
