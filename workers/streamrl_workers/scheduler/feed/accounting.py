"""What metrics read of steps: one summary for each that is recorded.

Owns the values; the core fills them. Means come as sum and count where they are reduced further.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.groups.life import GroupEvent
from streamrl_workers.scheduler.records import GroupStats, add_up
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
class StepSummary:
    """What one recorded step consumed, and what happened since the step before."""

    attempt: int
    step: int
    groups: int
    samples: int
    reward_sum: float
    reward_count: int
    """Samples with a reward."""
    reward_failed: int
    """Samples without."""
    tokens_sum: int
    """Completion tokens."""
    tokens_max: int
    staleness_sum: int
    """Over groups, in steps."""
    staleness_max: int
    staleness_histogram: Mapping[int, int]
    """Staleness in steps -> groups."""
    reissued_samples: int
    """Since the step before."""
    dropped_groups: Mapping[str, int]
    """Reason -> groups, since the step before."""
    trainer_metrics: Mapping[str, float]
    turns_sum: int = 0
    """Turns of the model, over samples."""
    part_sums: Mapping[str, float] = field(default_factory=dict)
    """Reward's name -> sum over the samples with a reward, before weights."""
    score_failures: Mapping[str, int] = field(default_factory=dict)
    """Kind -> samples that got no reward since the step before: training and held-out ones, of this or any later step."""

    @property
    def reward_mean(self) -> float:
        """Mean reward of the samples that have one; 0 if none has."""
        return self.reward_sum / self.reward_count if self.reward_count else 0.0

    @property
    def part_means(self) -> dict[str, float]:
        """Mean of each part of the reward, before weights, over the samples that have a reward."""
        return {name: total / self.reward_count for name, total in self.part_sums.items()} if self.reward_count else {}

    @property
    def tokens_mean(self) -> float:
        """Mean completion length in tokens."""
        return self.tokens_sum / self.samples if self.samples else 0.0

    @property
    def turns_mean(self) -> float:
        """Mean turns of a sample; 1 without an environment."""
        return self.turns_sum / self.samples if self.samples else 0.0

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the groups, in steps."""
        return self.staleness_sum / self.groups if self.groups else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """What happened since the step before."""

    reissued_samples: int
    dropped_groups: Mapping[str, int]
    score_failures: Mapping[str, int] = field(default_factory=dict)


def summarize(done: pb.StepDone, *, attempt: int, groups: Iterable[GroupStats], since: Since) -> StepSummary:
    """Add up the groups of one step."""
    stats = list(groups)
    staleness = [done.step - group.start_version for group in stats]
    samples = sum(group.samples for group in stats)
    rewarded = sum(group.reward_count for group in stats)
    return StepSummary(
        attempt=attempt,
        step=done.step,
        groups=len(stats),
        samples=samples,
        reward_sum=sum(group.reward_sum for group in stats),
        reward_count=rewarded,
        reward_failed=samples - rewarded,
        tokens_sum=sum(group.tokens_sum for group in stats),
        tokens_max=max((group.tokens_max for group in stats), default=0),
        staleness_sum=sum(staleness),
        staleness_max=max(staleness, default=0),
        staleness_histogram=dict(sorted(Counter(staleness).items())),
        reissued_samples=since.reissued_samples,
        dropped_groups=since.dropped_groups,
        trainer_metrics=dict(done.metrics),
        turns_sum=sum(group.turns_sum for group in stats),
        part_sums=add_up(group.part_sums for group in stats),
        score_failures=since.score_failures,
    )
