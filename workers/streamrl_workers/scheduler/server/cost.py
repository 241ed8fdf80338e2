"""What a run has cost: connected generators and the trainer by the job's `costPerHour`, and what a reward point cost. Pure: instants are parameters.

A process costs while it is connected: what loads a model or waits for a node is not seen here. Between two looks the counts of the first one hold.
"""

from collections.abc import Mapping
from typing import Any

from streamrl.spec import RLJobSpec

TRAINER_POOL = ""
"""Where the trainer's cost stands beside that of the pools."""
REWARD_POINT = 0.01
"""Of held-out reward."""
_HOUR_S = 3600.0
_MILLION = 1e6


def rates(spec: RLJobSpec) -> dict[str, float]:
    """Pool -> cost of one generator an hour; the trainer as a whole."""
    pools = {pool.name: float(pool.cost_per_hour) for pool in spec.generators}
    return {TRAINER_POOL: float(spec.trainer.cost_per_hour), **pools}


class CostMeter:
    """Adds up the cost of a run, through all lives of the scheduler."""

    def __init__(self, hourly: Mapping[str, float], *, spent: Mapping[str, float], now_s: float) -> None:
        """`spent`: by pool, by earlier lives; also of pools that are no more."""
        self._hourly = hourly
        self._spent = {pool: float(spent.get(pool, 0.0)) for pool in (*hourly, *spent)}
        self._counts: Mapping[str, int] = {}
        self._seen_s = now_s

    def look(self, counts: Mapping[str, int], *, now_s: float) -> None:
        """So many of each pool are connected from now on."""
        for pool, rate in self._per_hour().items():
            self._spent[pool] += rate * (now_s - self._seen_s) / _HOUR_S
        self._counts, self._seen_s = counts, now_s

    @property
    def spent(self) -> dict[str, float]:
        """By pool, up to the last look."""
        return dict(self._spent)

    @property
    def per_hour(self) -> dict[str, float]:
        """By pool, as of the last look."""
        return self._per_hour()

    @property
    def total(self) -> float:
        """Of all together."""
        return sum(self._spent.values())

    def _per_hour(self) -> dict[str, float]:
        return {pool: rate * self._counts.get(pool, 0) for pool, rate in self._hourly.items()}


def total(line: Mapping[str, Any]) -> float | None:
    """What the run had cost at a line of `steps.jsonl` or `evaluations.jsonl`; None: the line does not say."""
    spent = line.get("cost")
    return sum(spent.values()) if isinstance(spent, Mapping) else None


def per_million_tokens(cost: float | None, *, tokens: int) -> float | None:
    """Cost of a million of so many tokens that cost so much together."""
    return None if cost is None or not tokens else cost / tokens * _MILLION


def per_reward_point(first: Mapping[str, Any], last: Mapping[str, Any]) -> float | None:
    """Between two evaluations, of each .01 of mean held-out reward; None while nothing is won."""
    rewards, costs = [line.get("mean_reward") for line in (first, last)], [total(line) for line in (first, last)]
    if None in rewards or None in costs:
        return None
    points = (rewards[1] - rewards[0]) / REWARD_POINT  # type: ignore[operator] # neither is None
    return (costs[1] - costs[0]) / points if points > 0 else None  # type: ignore[operator] # as above
