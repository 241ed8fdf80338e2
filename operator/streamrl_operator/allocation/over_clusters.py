"""Generators of several clusters: how many devices each pool should have, which clusters to leave out, how many devices train.

A pool is a `Stage`: its seconds of a step if it generated alone. So n devices of it make `samples / seconds(n)` samples a second, and
the rates of a cluster's pools add up. Seconds of a step over clusters follow by `streamrl.link_shares`: each cluster needs a version
over the home cluster's link, and a subset of the clusters may be faster than all of them.

The rule is that of `choice.py`: the cheapest step among those at most the tolerance longer than the fastest one. The search is exact
as long as it is not ended: branch and bound over clusters. More devices never make a step longer, so with all that are left a part of
a choice has its least time. What is still to be made costs at least what it would with parts of devices, and with the whole link for
each cluster. A choice names the clusters that have devices, so all of these have versions: no subsets are tried again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from streamrl.errors import UserError
from streamrl.link_shares import ClusterRates, LinkPlan, best_plan, most_samples
from streamrl_operator.allocation.choice import TOLERANCE, Allocation, Stage

HOME = ""
"""Name of the cluster whose generators need no link."""
MOST_PLANS = 2_000
"""That a search looks at: some seconds."""
_FINE_OPTIONS = 100
_GROWTH = 1.05
"""If a cluster has more options than the former, each next one has a rate so much larger; less a profile can hardly tell apart."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPool:
    """A pool whose size is chosen; no devices at all leave it out."""

    name: str
    cluster: str = HOME
    generation: Stage
    """Its seconds of a whole step, alone; `sizes.most` is what there is."""
    floor_s: float = 0.0
    """Of the longest answer, with any number of devices. The fastest pool that is taken has that answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """What a cluster takes of the home cluster's link."""

    version_s: float
    """Of one version at the full link."""
    sample_bytes_s: float
    """Of a sample's bytes at the full link."""
    most_link: float = 1.0
    """Share of the full link that the cluster's own link takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAllocation:
    """Devices of each pool, and who makes how much of a step."""

    sizes: Allocation
    pool_devices: Mapping[str, int]
    """By pool; 0: it is left out."""
    link_plan: LinkPlan
    """By cluster."""
    is_best: bool
    """False: the search was ended before all was tried, and there may be a cheaper one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationProblem:
    """What there is, and what a step is."""

    pools: Sequence[ClusterPool]
    links: Mapping[str, LinkTimes]
    """Of each cluster but the home."""
    training: Stage
    trainer_devices: int
    samples: int
    """Of a step."""
    is_overlapped: bool
    """Whether bytes travel while samples are made."""
    fixed_cost_per_hour: float = 0.0

    @property
    def clusters(self) -> tuple[str, ...]:
        """Of the pools."""
        return tuple(dict.fromkeys(pool.cluster for pool in self.pools))


def over_clusters(
    asked: AllocationProblem,
    *,
    tolerance: float = TOLERANCE,
    exactly: Collection[str] | None = None,
    most_plans: int = MOST_PLANS,
) -> ClusterAllocation:
    """The cheapest choice within the tolerance of the fastest one.

    Args:
        asked: pools, links, training.
        tolerance: share of the best time by which a step may be longer.
        exactly: each of these clusters has devices and versions, and no other one; None: the best choice of clusters.
        most_plans: that are looked at; then the best one so far is the answer.

    Raises:
        UserError: there are too few devices.
    """
    if not asked.training.sizes.upto(asked.trainer_devices):
        raise UserError(field="trainer devices", rule="must be enough for one trainer", got=asked.trainer_devices)
    chosen = asked.clusters if exactly is None else exactly
    fronts = [
        _options_of(asked, cluster, is_needed=exactly is not None) for cluster in asked.clusters if cluster in chosen
    ]
    if not any(front.most_rate for front in fronts):
        raise UserError(field="devices of pools", rule="must be enough for one generator")
    return _Search(asked, [front for front in fronts if front.options], most_plans=most_plans).best(tolerance)


@dataclass(frozen=True, slots=True)
class _Option:
    """Devices of the pools of a cluster."""

    rate: float
    """Samples a second of all together."""
    cost: float
    """An hour."""
    floor_s: float
    """The least of the pools that have devices."""
    devices: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _ClusterOptions:
    """The options of a cluster that no other one betters, by rising cost: a dearer one has a higher rate or a lower floor."""

    cluster: str
    options: Sequence[_Option]

    @property
    def is_needed(self) -> bool:
        """Whether it cannot be left out."""
        return all(one.rate for one in self.options)

    @property
    def most_rate(self) -> float:
        """With all devices."""
        return max((one.rate for one in self.options), default=0.0)

    @property
    def least_floor_s(self) -> float:
        """With all devices."""
        return min((one.floor_s for one in self.options), default=inf)


def _options_of(asked: AllocationProblem, cluster: str, *, is_needed: bool) -> _ClusterOptions:
    options = [_Option(0.0, 0.0, inf, ())]
    for pool in (one for one in asked.pools if one.cluster == cluster):
        stage = pool.generation
        own = [_Option(0.0, 0.0, inf, ((pool.name, 0),))]
        for devices in stage.sizes.upto(stage.sizes.most):
            rate, cost = asked.samples / stage.seconds(devices), devices * stage.device_cost_per_hour
            own.append(_Option(rate, cost, pool.floor_s, ((pool.name, devices),)))
        options = _thinned(
            _undominated(
                _Option(a.rate + b.rate, a.cost + b.cost, min(a.floor_s, b.floor_s), a.devices + b.devices)
                for a in options
                for b in own
            )
        )
    return _ClusterOptions(cluster, [option for option in options if option.rate or not is_needed])


def _undominated(options: Iterable[_Option]) -> list[_Option]:
    """And the first one, which has nothing."""
    nothing, *others = options
    kept, rates = [nothing], {nothing.floor_s: nothing.rate}
    order = sorted(others, key=lambda one: (one.cost, -one.rate, one.floor_s, sum(count for _, count in one.devices)))
    for option in order:
        if all(rate < option.rate for floor_s, rate in rates.items() if floor_s <= option.floor_s):
            rates[option.floor_s] = option.rate
            kept.append(option)
    return kept


def _thinned(options: list[_Option]) -> list[_Option]:
    """With the last one, which has the highest rate and the lowest floor."""
    if len(options) <= _FINE_OPTIONS:
        return options
    kept = options[:1]
    for option in options[1:]:
        is_other = option.rate >= kept[-1].rate * _GROWTH or option.floor_s < kept[-1].floor_s
        if is_other or option is options[-1]:
            kept.append(option)
    return kept


class _CheapestRate:
    """Least cost of a rate that these clusters bring, with parts of a device: straight pieces, each dearer than the one before."""

    def __init__(self, fronts: Sequence[Sequence[tuple[float, float]]]) -> None:
        """Of each cluster the rate and cost of its options, by rising cost."""
        self._start = [sum(hull[0][at] for hull in map(_hull, fronts)) for at in (0, 1)]
        pieces = [(b[0] - a[0], b[1] - a[1]) for hull in map(_hull, fronts) for a, b in pairwise(hull)]
        self._pieces = sorted(pieces, key=lambda piece: piece[1] / piece[0])

    def least_cost(self, *, cost: float, rate: float, samples: float, between_s: tuple[float, float]) -> float:
        """Least of (cost an hour x seconds of a step): for all times between these, `cost` and `rate` being there already.

        It is convex and in pieces straight by the time: its least is at an end, or where a piece is used up.
        """
        (low_s, high_s), (rate, cost) = between_s, (rate + self._start[0], cost + self._start[1])
        least = cost * high_s if rate * high_s >= samples else inf
        if rate * low_s >= samples:
            return cost * low_s
        for more, price in self._pieces:
            step_s = samples / rate if rate else inf
            if low_s <= step_s <= high_s:
                least = min(least, cost * step_s)
            full = rate + more
            for end_s in between_s:
                if rate * end_s < samples <= full * end_s:
                    least = min(least, (cost + price * (samples / end_s - rate) / more) * end_s)
            rate, cost = full, cost + price
            if rate * low_s >= samples:
                return least
        step_s = samples / rate if rate else inf
        return min(least, cost * step_s) if low_s <= step_s <= high_s else least


def _hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull, by rising rate."""
    kept: list[tuple[float, float]] = []
    for rate, cost in points:
        if kept and rate <= kept[-1][0]:
            continue
        while len(kept) > 1 and (kept[-1][1] - kept[-2][1]) * (rate - kept[-2][0]) >= (cost - kept[-2][1]) * (
            kept[-1][0] - kept[-2][0]
        ):
            kept.pop()
        kept.append((rate, cost))
    return kept


class _Search:
    """Branch and bound. A choice is a tuple of options, one for each of the first clusters."""

    def __init__(self, asked: AllocationProblem, fronts: Sequence[_ClusterOptions], *, most_plans: int) -> None:
        self._asked, self._fronts, self._plans_left = asked, fronts, most_plans
        self._is_ended = False
        """Something was left untried."""
        self._known: dict[tuple[_Option, ...], LinkPlan] = {}
        self._best: tuple[float, int, tuple[_Option, ...]] = (inf, 0, ())
        """Cost an hour x seconds of a step; devices that train; options."""
        self._least_s = self._limit_s = 0.0
        self._rest: list[_CheapestRate] = []
        """Of the clusters from each one on."""

    def best(self, tolerance: float) -> ClusterAllocation:
        training = self._asked.training
        sizes = training.sizes.upto(self._asked.trainer_devices)
        self._least_s = max(self._generation_s(()), training.seconds(sizes[-1]))
        self._limit_s = self._least_s * (1 + tolerance) * (1 + _ROUNDING)
        usable = [
            [(self._usable(front.cluster, one.rate), one.cost) for one in front.options] for front in self._fronts
        ]
        self._rest = [_CheapestRate(usable[first:]) for first in range(len(usable) + 1)]
        costs = {size: self._asked.fixed_cost_per_hour + size * training.device_cost_per_hour for size in sizes}
        self._begin(trainers=sizes[-1], cost=costs[sizes[-1]])
        within = [size for size in sizes if training.seconds(size) <= self._limit_s]
        bounds = {size: self._bound((), cost=costs[size], least_s=training.seconds(size)) for size in within}
        for size in sorted(within, key=lambda size: bounds[size]):
            if bounds[size] < self._best[0]:
                self._extend((), trainers=size, cost=costs[size])
        return self._allocation(*self._best[1:])

    def _begin(self, *, trainers: int, cost: float) -> None:
        """All devices of the clusters that the fastest step takes: within every tolerance."""
        shares = self._plan(()).shares
        chosen = tuple(
            front.options[-1 if front.cluster in shares and shares[front.cluster].samples else 0]
            for front in self._fronts
        )
        step_s = max(self._generation_s(chosen), self._asked.training.seconds(trainers))
        self._best = ((cost + sum(one.cost for one in chosen)) * step_s, trainers, chosen)

    def _extend(self, chosen: tuple[_Option, ...], *, trainers: int, cost: float) -> None:
        """Try the options of the next cluster, the most promising first."""
        train_s = self._asked.training.seconds(trainers)
        if len(chosen) == len(self._fronts):
            found = cost * max(train_s, self._generation_s(chosen))
            if found < self._best[0]:
                self._best = (found, trainers, chosen)
            return
        next_ones = [(*chosen, option) for option in self._fronts[len(chosen)].options]
        bounds = [self._bound(one, cost=cost + one[-1].cost, least_s=train_s) for one in next_ones]
        for bound, one in sorted(zip(bounds, next_ones, strict=True), key=lambda pair: pair[0]):
            if bound >= self._best[0]:
                return
            if self._plans_left <= 0:
                self._is_ended = True
                return
            so_far = cost + one[-1].cost
            within_s = min(self._limit_s, self._best[0] / so_far if so_far else inf)
            least_s = max(train_s, self._generation_s(one, within_s=within_s))
            if least_s <= self._limit_s and self._bound(one, cost=so_far, least_s=least_s) < self._best[0]:
                self._extend(one, trainers=trainers, cost=so_far)

    def _bound(self, chosen: tuple[_Option, ...], *, cost: float, least_s: float) -> float:
        """No choice that begins so is cheaper."""
        rate = sum(self._usable(front.cluster, one.rate) for front, one in zip(self._fronts, chosen, strict=False))
        between_s = (max(least_s, self._least_s), self._limit_s)
        rest = self._rest[len(chosen)]
        bound = rest.least_cost(cost=cost, rate=rate, samples=self._asked.samples, between_s=between_s)
        return bound * (1 - _ROUNDING)

    def _usable(self, cluster: str, rate: float) -> float:
        """Samples a second at most, if the cluster had all of the link that it can take, for the longest time."""
        if cluster == HOME or not rate:
            return rate
        alone = most_samples(self._rates(cluster, rate), step_s=self._limit_s, is_overlapped=self._asked.is_overlapped)
        return alone / self._limit_s

    def _generation_s(self, chosen: tuple[_Option, ...], *, within_s: float = inf) -> float:
        """With all devices of the clusters that are not chosen yet, the best of which are taken; endless if it is not within that time."""
        return self._plan(chosen, within_s=within_s).step_s

    def _plan(self, chosen: tuple[_Option, ...], *, within_s: float = inf) -> LinkPlan:
        if chosen in self._known:
            return self._known[chosen]
        self._plans_left -= 1
        asked, clusters, needed = self._asked, {}, []
        for place, front in enumerate(self._fronts):
            one = chosen[place] if place < len(chosen) else None
            rate, floor_s = (one.rate, one.floor_s) if one else (front.most_rate, front.least_floor_s)
            if rate:
                clusters[front.cluster] = self._rates(front.cluster, rate, floor_s=floor_s)
                needed += [front.cluster] if one or front.is_needed else []
        if not clusters:
            return LinkPlan(step_s=inf, shares={})
        plan = best_plan(
            clusters, samples=asked.samples, is_overlapped=asked.is_overlapped, needed=needed, within_s=within_s
        )
        if plan.step_s < inf:
            self._known[chosen] = plan
        return plan

    def _rates(self, cluster: str, rate: float, *, floor_s: float = 0.0) -> ClusterRates:
        if cluster == HOME:
            return ClusterRates(sample_s=1 / rate, floor_s=floor_s)
        link = self._asked.links[cluster]
        return ClusterRates(
            sample_s=1 / rate,
            version_s=link.version_s,
            sample_bytes_s=link.sample_bytes_s,
            most_link=link.most_link,
            floor_s=floor_s,
        )

    def _allocation(self, trainers: int, chosen: tuple[_Option, ...]) -> ClusterAllocation:
        asked = self._asked
        taken = {name: count for option in chosen for name, count in option.devices}
        devices = {pool.name: taken.get(pool.name, 0) for pool in asked.pools}
        cost = sum(devices[pool.name] * pool.generation.device_cost_per_hour for pool in asked.pools)
        sizes = Allocation(
            generator_devices=sum(devices.values()),
            trainer_devices=trainers,
            generation_s=self._generation_s(chosen),
            training_s=asked.training.seconds(trainers),
            cost_per_hour=asked.fixed_cost_per_hour + trainers * asked.training.device_cost_per_hour + cost,
        )
        return ClusterAllocation(
            sizes=sizes, pool_devices=devices, link_plan=self._plan(chosen), is_best=not self._is_ended
        )
