"""What an order is worth: the modelled makespan of one batch, over draws of what lengths may turn out to be.

    z of a sample = r z_p + noise of its group + noise of its own        z_p: normal quantile of its group's place
    tokens        = the batch's own distribution at Phi(z)

r is the correlation of a prediction with one sample; what was measured is that with means of groups, c:

    r = c sqrt(1 - w + w / G)        w: share of the spread that is between the samples of a group

An order that takes predictions for the truth is too bold: it gives the predicted short ones slow crowded generators, and
the makespan is that of the one which was long after all. Draws are the same each time, so orders are repeatable.
The scheduler answers nobody while it models, so a large batch is thinned out.
The model knows nothing of what runs already (`makespan.py`). Pure.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import pi, sin, sqrt
from random import Random
from statistics import NormalDist, fmean, stdev

from streamrl_workers.scheduler.dispatch.makespan import dealt, list_seconds, step_tables
from streamrl_workers.scheduler.dispatch.order import Order, PlannedBatch
from streamrl_workers.scheduler.lengths.quantiles import places

WITHIN_SHARE = 0.4
"""w is not measured; answers of one prompt differ by about half as much as prompts do, and too much noise is the safe side."""
MOST_SAMPLES, LEAST_INSTANCES = 550, 8
"""A batch of more samples is modelled by every k-th of its groups, on every k-th of its instances, as long as so many are left."""
SAMPLES_DRAWN, MOST_DRAWS = 3072, 24
"""Samples of all draws together: bounds the time of an order."""
_SEED = 20_240
_NORMAL = NormalDist()


class MakespanModel:
    """One batch on its generators."""

    def __init__(self, batch: PlannedBatch) -> None:
        """`batch`: at least one group and one instance."""
        self.batch = thinned(batch)
        self._starts = {group.group_id: place * batch.samples for place, group in enumerate(self.batch.groups)}
        self._known: dict[tuple[object, ...], list[float]] = {}

    @cached_property
    def draws(self) -> list[list[float]]:
        """Tokens of all samples, group after group in the order of planning."""
        return possible_lengths(self.batch)

    def seconds(self, order: Order) -> list[float]:
        """Makespan by draw: until the long pool, if there is one, and all others are done."""
        known = (order.key, order.last_long, order.long_generators)
        if known not in self._known:
            long_s, short_s = (self._pool_seconds(order, long=long) for long in (True, False))
            self._known[known] = list(map(max, long_s, short_s))
        return self._known[known]

    def _pool_seconds(self, order: Order, *, long: bool) -> list[float]:
        groups = [group for group in sorted(self.batch.groups, key=order.key) if order.is_long(group) is long]
        instances = [one for one in self.batch.instances if (one.generator_id in order.long_generators) is long]
        if not (groups and instances):
            return [float("inf") if groups else 0.0] * len(self.draws)
        size = self.batch.samples
        starts = [self._starts[group.group_id] for group in groups]
        places = dealt(len(groups) * size, instances, together=size)
        tables = step_tables(instances)
        return [
            list_seconds(
                [tokens for start in starts for tokens in draw[start : start + size]],
                tables,
                places=places,
                refilled=self.batch.overlaps,
            )
            for draw in self.draws
        ]


def gains(one_s: Sequence[float], other_s: Sequence[float], *, share: float = 0.0) -> bool:
    """Whether an order's makespans are less than the other's by more than this share, and by more than luck of the draws."""
    differences = [other - one for one, other in zip(one_s, other_s, strict=True)]
    return fmean(differences) - _error(differences) > share * fmean(other_s)


def thinned(batch: PlannedBatch) -> PlannedBatch:
    """The batch, if it is small; else a smaller one with as many samples for each instance."""
    step = min(len(batch.groups) * batch.samples // MOST_SAMPLES, len(batch.instances) // LEAST_INSTANCES)
    return replace(batch, groups=batch.groups[::step], instances=batch.instances[::step]) if step > 1 else batch


def possible_lengths(batch: PlannedBatch) -> list[list[float]]:
    """Draws of the tokens of all samples, group after group."""
    groups, samples = batch.groups, batch.samples
    table = sorted(group.predicted_tokens for group in groups if group.is_known)
    table = table or sorted(group.predicted_tokens for group in groups)
    within = WITHIN_SHARE if samples > 1 else 0.0
    known = min(1.0, 2 * sin(pi / 6 * max(0.0, batch.rank_correlation))) * sqrt(1 - within + within / samples)
    normal = {tokens: _NORMAL.inv_cdf(place) for tokens, place in places(table).items()}
    correlated = [(known, normal[group.predicted_tokens]) if group.is_known else (0.0, 0.0) for group in groups]
    chance = Random(_SEED)
    draws = min(max(1, SAMPLES_DRAWN // (samples * len(groups))), MOST_DRAWS)
    return [
        [tokens for r, z in correlated for tokens in _group(table, r, z, within, samples, chance)] for _ in range(draws)
    ]


# ---- inside


def _group(table: Sequence[float], r: float, z: float, within: float, samples: int, chance: Random) -> list[float]:
    """Tokens of one group's samples; `within` of the spread is between them, as far as the prediction leaves any."""
    common = sqrt(max(0.0, 1 - within - r * r))
    own = sqrt(max(0.0, 1 - r * r - common * common))
    middle = r * z + common * chance.gauss(0.0, 1.0)
    last = len(table) - 1
    return [
        table[min(int(_NORMAL.cdf(middle + own * chance.gauss(0.0, 1.0)) * len(table)), last)] for _ in range(samples)
    ]


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for one value, which is all that is known."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
