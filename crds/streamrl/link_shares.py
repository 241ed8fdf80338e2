"""Who gets how much of the work and of the uplink, where several clusters generate: so that a step ends soonest.

Each of K clusters has samples of a step and a share of the home cluster's link, over which a version goes out and samples come back:

    in turns      T = w/p + L (a/p + c)         the version, then its samples, each made and sent
    overlapped    T = max((w + L a)/p, L c)     bytes travel while samples are made: StreamAsync

    w  seconds of a version, a  of a sample's bytes, both at the full link      L  samples      sum L = all of them
    c  seconds a sample, of the whole cluster                                   p  share        sum p <= 1, p <= what its own link takes

A version is a fixed cost of a cluster, not of a sample: often the best plan leaves a cluster out. So all subsets are tried. For one of them and a time T the most samples follow in closed form:

    in turns      L is concave in p: p = (sqrt((T a + w c)/l) - a)/c within its bounds, l by sum p = 1
    overlapped    L <= T/c costs w + L a of the link's T seconds: the cheapest samples first

and T by bisection, since more time never means fewer samples. Pure; scheduler and planner share it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf, sqrt

MOST_CLUSTERS = 10
"""All subsets of them are tried."""
_HALVINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRates:
    """A cluster as measured."""

    sample_s: float
    """Of all its generators together, a sample."""
    version_s: float = 0.0
    """Of one version at the full link; 0 at home."""
    sample_bytes_s: float = 0.0
    """Of a sample's bytes at the full link; 0 at home."""
    most_link: float = 1.0
    """Share of the full link that the cluster's own link takes."""
    floor_s: float = 0.0
    """The longest answer takes it so long; of a plan's clusters the fastest one has that answer."""

    def __post_init__(self) -> None:
        if not (0 < self.sample_s < inf and 0 <= self.version_s < inf and 0 <= self.sample_bytes_s < inf):
            raise ValueError(f"times of a cluster must be finite, and those of a sample above 0; got {self}")
        if not 0 < self.most_link <= 1:
            raise ValueError(f"most_link must be above 0 and at most 1, got {self.most_link}")

    @property
    def uses_link(self) -> bool:
        """Whether it is another cluster than the home."""
        return self.version_s > 0 or self.sample_bytes_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShare:
    """What a cluster gets; a cluster that is left out gets nothing."""

    samples: float = 0.0
    """Of a step."""
    link: float = 0.0
    """Share of the home cluster's link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """The best plan."""

    step_s: float
    shares: Mapping[str, ClusterShare]


def best_plan(
    clusters: Mapping[str, ClusterRates],
    *,
    samples: float,
    is_overlapped: bool,
    needed: Collection[str] = (),
    within_s: float = inf,
) -> LinkPlan:
    """The plan of the shortest step; an endless one if none is shorter than `within_s`.

    Args:
        clusters: by name, at least one.
        samples: of a step.
        is_overlapped: whether bytes travel while samples are made.
        needed: clusters that are not left out.
        within_s: longer steps are not looked for, which takes much less.
    """
    if not 1 <= len(clusters) <= MOST_CLUSTERS:
        raise ValueError(f"there must be 1 to {MOST_CLUSTERS} clusters, got {len(clusters)}")
    if not 0 < samples < inf:
        raise ValueError(f"samples must be above 0, got {samples}")
    most = _most_overlapped if is_overlapped else _most_in_turns
    free = [name for name in clusters if name not in needed]
    subsets = [(*needed, *more) for size in range(len(free) + 1) for more in combinations(free, size)]
    subsets = [subset for subset in subsets if subset]
    step_s, best = within_s, None
    for subset in subsets:  # of equal plans the one with fewer clusters
        members = [clusters[name] for name in subset]
        floor_s = min(one.floor_s for one in members)
        if floor_s < step_s and (step_s == inf or _made(most(members, step_s)) > samples):
            step_s, best = max(floor_s, _least_time(partial(most, members), samples=samples)), subset
    left_out = {name: ClusterShare() for name in clusters}
    if best is None:
        return LinkPlan(step_s=inf, shares=left_out)
    found = most([clusters[name] for name in best], step_s)
    rounding = samples / _made(found)
    exact = [ClusterShare(samples=share.samples * rounding, link=share.link) for share in found]
    return LinkPlan(step_s=step_s, shares=left_out | dict(zip(best, exact, strict=True)))


def most_samples(cluster: ClusterRates, *, step_s: float, is_overlapped: bool) -> float:
    """What a cluster makes within a time if it is alone on the link: the best plan gives it no more."""
    return _made((_most_overlapped if is_overlapped else _most_in_turns)([cluster], step_s))


def _made(shares: Sequence[ClusterShare]) -> float:
    return sum(share.samples for share in shares)


def _least_time(most: Callable[[float], list[ClusterShare]], *, samples: float) -> float:
    high_s = 1.0
    while _made(most(high_s)) < samples:
        high_s *= 2
    low_s = 0.0 if high_s == 1.0 else high_s / 2
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if _made(most(middle_s)) >= samples else (middle_s, high_s)
    return high_s


# ---- the most samples that these clusters make within a time; none where not all of them can have a version


def _have_version(members: Sequence[ClusterRates], step_s: float) -> bool:
    least = [one.version_s / step_s for one in members]
    return sum(least) <= 1 and all(share <= one.most_link for share, one in zip(least, members, strict=True))


def _most_in_turns(members: Sequence[ClusterRates], step_s: float) -> list[ClusterShare]:
    if not _have_version(members, step_s):
        return [ClusterShare()] * len(members)
    return [
        ClusterShare(samples=_samples_in_turns(one, step_s, link=link), link=link)
        for one, link in zip(members, _links(members, step_s), strict=True)
    ]


def _samples_in_turns(one: ClusterRates, step_s: float, *, link: float) -> float:
    if not one.uses_link:
        return step_s / one.sample_s
    return max(0.0, step_s * link - one.version_s) / (one.sample_bytes_s + one.sample_s * link)


def _links(members: Sequence[ClusterRates], step_s: float) -> list[float]:
    """All have the same gain of samples from a little more of the link, but for those at a bound. Each rises in pieces of lines with `x` = 1/sqrt(l)."""
    lines = [
        (sqrt(step_s * one.sample_bytes_s + one.version_s * one.sample_s), one, one.version_s / step_s)
        for one in members
    ]

    def at(x: float) -> list[float]:
        return [
            min(max((x * slope - one.sample_bytes_s) / one.sample_s, least), one.most_link) if one.uses_link else 0.0
            for slope, one, least in lines
        ]

    bends = sorted(
        (one.sample_bytes_s + one.sample_s * link) / slope
        for slope, one, least in lines
        if one.uses_link
        for link in (least, one.most_link)
    )
    before = 0.0
    for bend in bends:
        given, asked = sum(at(before)), sum(at(bend))
        if asked >= 1:
            return at(bend if asked == given else before + (bend - before) * (1 - given) / (asked - given))
        before = bend
    return at(before)


def _most_overlapped(members: Sequence[ClusterRates], step_s: float) -> list[ClusterShare]:
    if not _have_version(members, step_s):
        return [ClusterShare()] * len(members)
    left_s = step_s - sum(one.version_s for one in members)
    shares = [ClusterShare()] * len(members)
    for place in sorted(range(len(members)), key=lambda place: members[place].sample_bytes_s):
        one = members[place]
        samples = step_s / one.sample_s
        if one.sample_bytes_s:
            samples = min(samples, min(left_s, step_s * one.most_link - one.version_s) / one.sample_bytes_s)
        left_s -= samples * one.sample_bytes_s
        shares[place] = ClusterShare(samples=samples, link=(one.version_s + samples * one.sample_bytes_s) / step_s)
    return shares
