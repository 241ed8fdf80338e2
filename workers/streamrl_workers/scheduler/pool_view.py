"""The generators of each pool, in numbers: what an autoscaler and people want to know of them.

Owns the values. Decides nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.fleet import IDLE_CAUSES, Fleet, Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """Generators of one pool, or of all."""

    generators: int
    """Connected, those that leave included."""
    leaving: int
    """Of these: take nothing more, as they go or were drained."""
    silent: int
    """Of these: not heard for a lease."""
    slots: int
    """Of generators that do not leave."""
    free_slots: int
    """Without a sample, of generators that take one."""
    active: int
    """Samples that are out."""
    idle: Mapping[str, int]
    """Cause -> generators that have a free slot and nothing to take; the key set is stable."""


def pool_view(generators: Iterable[Generator]) -> PoolView:
    """Add up these generators."""
    members = list(generators)
    staying = [generator for generator in members if not (generator.leaving or generator.drained)]
    causes = Counter(generator.idle_cause for generator in members if generator.free > 0)
    return PoolView(
        generators=len(members),
        leaving=len(members) - len(staying),
        silent=sum(generator.silent for generator in members),
        slots=sum(generator.slots for generator in staying),
        free_slots=sum(max(0, generator.free) for generator in members),
        active=sum(len(generator.leases) for generator in members),
        idle={cause: causes[cause] for cause in IDLE_CAUSES},
    )


def pool_views(generators: Iterable[Generator]) -> dict[str, PoolView]:
    """Pool -> its generators in numbers; a pool without a connected one is left out."""
    pools: dict[str, list[Generator]] = {}
    for generator in generators:
        pools.setdefault(generator.pool, []).append(generator)
    return {name: pool_view(members) for name, members in sorted(pools.items())}


def speeds(fleet: Fleet) -> dict[str, LatencyCurve]:
    """Pool -> its curve, of its generator with the most slots."""
    largest: dict[str, Generator] = {}
    for generator in fleet:
        if generator.pool not in largest or generator.slots > largest[generator.pool].slots:
            largest[generator.pool] = generator
    return {pool: fleet.curve(generator) for pool, generator in sorted(largest.items())}
