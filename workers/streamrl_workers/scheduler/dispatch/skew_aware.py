"""Algorithm 2 of StreamRL (arXiv 2504.15930): static sides for the tail of a batch and for the rest.

    tail = the tailPercent longest predicted of the batch; it counts as P90 of the predicted lengths, the rest as P50
    for every split N_l + N_r of the instances:   T_side = PTL(BS) * P * ceil(M_side / BS)      (Eq. 2, for one instance)
    keep the split with the least  max(T_l, T_r)   (objective Max)   or   T_l + T_r   (objective Sum, as printed)

The two sides run in parallel, so the makespan is the slower one: `Max` is never worse by the model. Inside a side
the longest go first. Over unequal instances a side's samples are dealt in proportion to their full speed, and the
fastest instances are the tail's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from streamrl.latency import LatencyCurve, rounds_seconds
from streamrl.spec.scheduling import SkewAware
from streamrl_workers.scheduler.dispatch.makespan import Instance
from streamrl_workers.scheduler.dispatch.policy import DISTRUST, LONGEST_FIRST, Candidate, Plan, Work, tail_plan

TAIL_PERCENTILE = 90
REST_PERCENTILE = 50
_ROUNDING = 1e-9
"""Shares that add up to a whole sample must not become one more by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSplit:
    """One split of the instances."""

    tail_instances: int
    """The first so many are the tail's."""
    tail_s: float
    rest_s: float

    def cost_s(self, objective: Literal["Max", "Sum"]) -> float:
        """What the objective makes least."""
        return max(self.tail_s, self.rest_s) if objective == "Max" else self.tail_s + self.rest_s


class SkewAwarePolicy:
    """Two static sides, made anew for each batch."""

    models = True

    def __init__(self, options: SkewAware) -> None:
        self._options = options

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """Sides by the algorithm; longest first alone where there are not two of everything."""
        if not work.trusted:
            return DISTRUST
        if len(work.groups) < 2 or len(work.instances) < 2:  # noqa: PLR2004 - two sides
            return LONGEST_FIRST
        ranked = sorted(work.groups, key=lambda group: group.rank)
        count, split = algorithm_2(ranked, work.instances, samples=work.samples, options=self._options)
        why = (
            f"Algorithm 2: the {count} longest of {len(ranked)} on {split.tail_instances} of {len(work.instances)}, "
            f"{split.tail_s:.4g} s and {split.rest_s:.4g} s modelled"
        )
        return tail_plan(ranked[:count], work.instances[: split.tail_instances], strict=True, why=why)


def algorithm_2(
    ranked: Sequence[Candidate], instances: Sequence[Instance], *, samples: int, options: SkewAware
) -> tuple[int, SideSplit]:
    """Groups of the tail, and the split of the instances.

    Args:
        ranked: longest predicted first, at least two.
        instances: fastest first, at least two.
        samples: of each group.
        options: share of the tail and objective.
    """
    count = tail_count(len(ranked), percent=options.tail_percent)
    rising = [group.predicted_tokens for group in reversed(ranked)]
    split = best_split(
        instances,
        tail_samples=count * samples,
        rest_samples=(len(ranked) - count) * samples,
        tail_tokens=percentile(rising, TAIL_PERCENTILE),
        rest_tokens=percentile(rising, REST_PERCENTILE),
        objective=options.objective,
    )
    return count, split


def tail_count(groups: int, *, percent: int) -> int:
    """Groups of the tail: at least one, and never all."""
    return min(max(1, round(groups * percent / 100)), groups - 1)


def percentile(rising: Sequence[float], percent: int) -> float:
    """The smallest value that is not below `percent` percent of them (nearest rank)."""
    return rising[max(0, ceil(len(rising) * percent / 100) - 1)]


def best_split(
    instances: Sequence[Instance],
    *,
    tail_samples: int,
    rest_samples: int,
    tail_tokens: float,
    rest_tokens: float,
    objective: Literal["Max", "Sum"],
) -> SideSplit:
    """The split with the least cost; of equal ones the smaller makespan, then the fewest instances for the tail.

    Args:
        instances: fastest first, at least two.
        tail_samples: samples of the tail; `rest_samples` of the rest.
        tail_tokens: what each of the tail counts as; `rest_tokens` each of the rest.
        objective: what is made least.
    """
    tail: Counter[tuple[LatencyCurve, int]] = Counter()
    rest = Counter((instance.curve, instance.slots) for instance in instances)
    splits = []
    for count, instance in enumerate(instances[:-1], start=1):
        kind = (instance.curve, instance.slots)
        tail[kind] += 1
        rest[kind] -= 1
        splits.append(
            SideSplit(
                tail_instances=count,
                tail_s=side_seconds(tail, samples=tail_samples, tokens=tail_tokens),
                rest_s=side_seconds(rest, samples=rest_samples, tokens=rest_tokens),
            )
        )
    return min(splits, key=lambda split: (split.cost_s(objective), split.cost_s("Max"), split.tail_instances))


def side_seconds(kinds: Counter[tuple[LatencyCurve, int]], *, samples: int, tokens: float) -> float:
    """Eq. 2 for the slowest instance of a side.

    Args:
        kinds: (curve, slots) -> instances.
        samples: that the side has to make.
        tokens: of each.
    """
    speeds = {(curve, slots): curve.tokens_per_s(slots) for (curve, slots), count in kinds.items() if count}
    all_speed = sum(speed * kinds[kind] for kind, speed in speeds.items())
    return max(
        rounds_seconds(curve, batch=slots, samples=ceil(samples * speed / all_speed - _ROUNDING), mean_tokens=tokens)
        for (curve, slots), speed in speeds.items()
    )
