"""Length pools: generators of their own for the longest predicted groups of a batch, longest first inside each pool.

Algorithm 2 of StreamRL (arXiv 2504.15930), `split: Algorithm2`:

    long = the longPercent longest predicted groups; they count as P90 of the predicted lengths, the others as P50
    for every split N_l + N_s of the instances:   T_pool = PTL(BS) * P * ceil(M_pool / BS)      (Eq. 2, for one instance)
    keep the split with the least max(T_l, T_s): the pools run in parallel

`split: Searched`: Algorithm 2 for each of LONG_PERCENTS, with its generators for the long ones and with twice as many; the least modelled
makespan (`model.py`) is taken.

A generator that has nothing left of its pool, and holds nothing, steals from the other one (`rollout.py`).
Over unequal instances a pool's samples are dealt in proportion to their full speed; the long pool has the fastest.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import ceil
from statistics import fmean

from streamrl.latency import LatencyCurve, rounds_seconds
from streamrl_workers.scheduler.dispatch.model import MakespanModel
from streamrl_workers.scheduler.dispatch.order import Candidate, Order, PlannedBatch, longest_in_batch

LONG_PERCENTILE = 90
SHORT_PERCENTILE = 50
LONG_PERCENTS = (1, 5, 10, 20, 50)
"""Few, since the scheduler answers nobody meanwhile."""
_ROUNDING = 1e-9
"""Shares that add up to a whole sample must not become one more by rounding."""


def splits(batch: PlannedBatch) -> bool:
    """Whether there are two of everything."""
    return min(len(batch.groups), len(batch.instances)) > 1


def best_pools(batch: PlannedBatch, model: MakespanModel) -> Order:
    """Those with the least modelled makespan; the batch has two of everything."""

    def modelled_s(split: tuple[int, int]) -> float:
        return fmean(model.seconds(pools(model.batch, long_percent=split[0], times=split[1], why="")))

    long_percent, times = min(product(LONG_PERCENTS, (1, 2)), key=modelled_s)
    return pools(batch, long_percent=long_percent, times=times, why="length pools")


def pools(batch: PlannedBatch, *, long_percent: int, times: int = 1, why: str) -> Order:
    """The order with Algorithm 2's pools; `times`: so many times its generators for the long ones."""
    groups, instances = algorithm_2(batch, long_percent=long_percent)
    instances = min(times * instances, len(batch.instances) - 1)
    longest = longest_first(batch)
    return Order(
        key=longest_in_batch,
        last_long=longest[groups - 1].rank,
        long_generators=frozenset(instance.generator_id for instance in batch.instances[:instances]),
        why=f"{why}: the {groups} longest of {len(longest)} groups on {instances} of {len(batch.instances)} generators",
    )


def algorithm_2(batch: PlannedBatch, *, long_percent: int) -> tuple[int, int]:
    """So many of the longest groups on so many of the first instances; of equal splits that with the fewest."""
    rising = [group.predicted_tokens for group in reversed(longest_first(batch))]
    groups = min(max(1, round(len(rising) * long_percent / 100)), len(rising) - 1)
    long_tokens, short_tokens = percentile(rising, LONG_PERCENTILE), percentile(rising, SHORT_PERCENTILE)
    long: Counter[tuple[LatencyCurve, int]] = Counter()
    short = Counter((instance.curve, instance.slots) for instance in batch.instances)
    costs: list[tuple[float, int]] = []
    for count, instance in enumerate(batch.instances[:-1], start=1):
        kind = (instance.curve, instance.slots)
        long[kind] += 1
        short[kind] -= 1
        long_s = pool_seconds(long, samples=groups * batch.samples, tokens=long_tokens)
        short_s = pool_seconds(short, samples=(len(rising) - groups) * batch.samples, tokens=short_tokens)
        costs.append((max(long_s, short_s), count))
    return groups, min(costs)[1]


def longest_first(batch: PlannedBatch) -> list[Candidate]:
    """Its groups, longest predicted first."""
    return sorted(batch.groups, key=lambda group: group.rank)


def percentile(rising: Sequence[float], percent: int) -> float:
    """The smallest value that is not below `percent` percent of them (nearest rank)."""
    return rising[max(0, ceil(len(rising) * percent / 100) - 1)]


def pool_seconds(kinds: Counter[tuple[LatencyCurve, int]], *, samples: int, tokens: float) -> float:
    """Eq. 2 for the slowest instance of a pool.

    Args:
        kinds: (curve, slots) -> instances.
        samples: that the pool has to make.
        tokens: of each.
    """
    speeds = {(curve, slots): curve.tokens_per_s(slots) for (curve, slots), count in kinds.items() if count}
    all_speed = sum(speed * kinds[kind] for kind, speed in speeds.items())
    return max(
        rounds_seconds(curve, batch=slots, samples=ceil(samples * speed / all_speed - _ROUNDING), mean_tokens=tokens)
        for (curve, slots), speed in speeds.items()
    )
