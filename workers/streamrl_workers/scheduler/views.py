"""The state of a run in numbers: what metrics, the autoscaler and people read.

`StepSummary` describes a recorded step, `CoreView` and `PoolView` the present. Decides nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.delivery import Why
from streamrl_workers.scheduler.dispatch.order import Order
from streamrl_workers.scheduler.generators import IDLE_CAUSES, Fleet, Generator
from streamrl_workers.scheduler.lengths import Lengths
from streamrl_workers.scheduler.model import GroupEvent
from streamrl_workers.scheduler.records import SampleStats
from streamrl_workers.scheduler.versions.turns import ClusterTurn
from streamrl_workers.tasks.values import FailureKind

FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
"""Why a sample has no reward; metrics have them all, zeros included."""
DROP_REASONS = tuple(
    event.value
    for event in (
        GroupEvent.REWARD_FAILED,
        GroupEvent.GENERATION_FAILED,
        GroupEvent.ZERO_VARIANCE,
        GroupEvent.TOO_STALE,
        GroupEvent.RUN_ENDED,
    )
)
"""Why a group is never trained; metrics have them all, zeros included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """Generators of one pool, or of all."""

    generators: int
    """Connected, those that leave included."""
    leaving: int
    """Of these: take nothing more, as they go or were drained."""
    silent: int
    """Of these: have sent nothing for a lease."""
    slots: int
    """Of generators that do not leave."""
    free_slots: int
    """Without a sample, of generators that take one."""
    active: int
    """Samples that are out."""
    idle: Mapping[str, int]
    """Cause -> generators that have a free slot and nothing to take, or are paused; the key set is stable."""


def pool_view(generators: Iterable[Generator]) -> PoolView:
    """Add up these generators."""
    members = list(generators)
    staying = [generator for generator in members if not generator.leaving]
    causes = Counter(
        "phase" if one.paused else one.reported.idle_cause for one in members if one.paused or one.free > 0
    )
    return PoolView(
        generators=len(members),
        leaving=len(members) - len(staying),
        silent=sum(generator.unresponsive for generator in members),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """One of several tasks in one recorded step."""

    groups: int
    """Of the step."""
    stats: SampleStats
    """Of these."""
    dropped_groups: int
    """Since the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What one recorded step consumed, and what happened since the step before."""

    attempt: int
    step: int
    stats: SampleStats
    """Of its groups."""
    tasks: Mapping[str, TaskSummary]
    """By name, of each task; empty: the job has one task."""
    staleness_histogram: Mapping[int, int]
    """Staleness in steps -> groups, rising."""
    trainer_metrics: Mapping[str, float]
    reissued_samples: int
    """Since the step before."""
    dropped_groups: Mapping[str, int]
    """Reason -> groups, since the step before."""
    score_failures: Mapping[str, int]
    """Kind -> samples that got no reward since the step before: training and held-out ones, of this or any later step."""

    @property
    def groups(self) -> int:
        """Groups of the step."""
        return sum(self.staleness_histogram.values())

    @property
    def staleness_mean(self) -> float:
        """Over groups, in steps."""
        return sum(age * count for age, count in self.staleness_histogram.items()) / self.groups

    @property
    def staleness_max(self) -> int:
        """In steps."""
        return max(self.staleness_histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreView:
    """The scheduler's state in numbers."""

    attempt: int
    step: int
    """Steps recorded in the effective history."""
    steps: int
    ended: bool
    groups_by_state: Mapping[str, int]
    """Groups in memory by state of life; the key set is stable."""
    waiting_samples: int
    active_leases: int
    buffered_bytes: int
    buffered_groups: int
    """Scored, in no step's record."""
    delivered_groups: int
    """Groups of the current step that the trainer has."""
    undelivered: Why | None
    """Why no further group is delivered; None: nothing has happened yet."""
    announced_step: int | None
    """Step of the weight version that is announced to generators."""
    evaluating_step: int | None
    checkpoint: tuple[int, str] | None
    """Step and path of the newest checkpoint that the trainer has reported."""
    fleet: PoolView
    """All generators."""
    pools: Mapping[str, PoolView]
    """Pool -> its generators; a pool without a connected one is left out."""
    prompts_ready: int
    ignored_progress: int
    """Progress items of unknown or revoked leases, since the start."""
    reissued_samples: int
    """Since the start."""
    moved_samples: int
    """Samples that continued at another generator while theirs was connected, since the start."""
    dropped_groups: Mapping[str, int]
    """Reason -> groups, since the start."""
    dropped_groups_of: Mapping[str, int]
    """Task -> groups, since the start; if the job has one task, its name is empty."""
    score_failures: Mapping[str, int]
    """Kind -> samples that got no reward, training and held-out ones, since the start."""
    score_errors: Mapping[str, str]
    """Kind -> text of its first failure since the start; only kinds that have failed."""
    order: Order
    """In which order what waits is taken now, and why."""
    speeds: Mapping[str, LatencyCurve]
    """Pool -> its curve, of its generator with the most slots."""
    cluster_turns: Mapping[str, ClusterTurn]
    """Other cluster -> its turn at the newest version; empty: a version is announced to all at once."""
    lengths: Lengths
    """What is predicted of lengths, and how well."""
