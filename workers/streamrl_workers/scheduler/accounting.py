"""What metrics read: counts now, and one summary for each recorded step.

Owns the values; the core fills them. Means come as sum and count where they are reduced further.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """What a scored group adds to the summary of its step."""

    begun: int
    samples: int
    reward_sum: float
    reward_count: int
    tokens_sum: int
    tokens_max: int


def stats_of(trajectories: Iterable[pb.Trajectory], *, begun: int) -> GroupStats:
    """Add up the samples of one group."""
    samples = list(trajectories)
    rewards = [sample.reward for sample in samples if sample.HasField("reward")]
    tokens = [len(sample.tokens) >> 2 for sample in samples]
    return GroupStats(
        begun=begun,
        samples=len(samples),
        reward_sum=sum(rewards),
        reward_count=len(rewards),
        tokens_sum=sum(tokens),
        tokens_max=max(tokens, default=0),
    )


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

    @property
    def reward_mean(self) -> float:
        """Mean reward of the samples that have one; 0 if none has."""
        return self.reward_sum / self.reward_count if self.reward_count else 0.0

    @property
    def tokens_mean(self) -> float:
        """Mean completion length in tokens."""
        return self.tokens_sum / self.samples if self.samples else 0.0

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the groups, in steps."""
        return self.staleness_sum / self.groups if self.groups else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """What happened since the step before."""

    reissued_samples: int
    dropped_groups: Mapping[str, int]


def summarize(done: pb.StepDone, *, attempt: int, groups: Iterable[GroupStats], since: Since) -> StepSummary:
    """Add up the groups of one step."""
    stats = list(groups)
    staleness = [done.step - group.begun for group in stats]
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
    )


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
    handed_groups: int
    """Of the step that is being handed over."""
    generators: int
    idle_causes: Mapping[str, int]
    """Cause -> generators that have a free slot and nothing to take; the key set is stable."""
    announced_step: int | None
    """Weight version that generators are told to use."""
    evaluating_step: int | None
    prompts_ready: int
    ignored_progress: int
    """Progress items of unknown or revoked leases, since the start."""
    reissued_samples: int
    """Since the start."""
    dropped_groups: Mapping[str, int]
    """Reason -> groups, since the start."""
