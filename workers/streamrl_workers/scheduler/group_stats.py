"""What one scored group adds to the summary of its step. Pure.

Small where samples are large: it stays in memory while the samples are in the journal alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    turns_sum: int = 0
    """Turns of the model; one for each sample without an environment."""
    part_sums: Mapping[str, float] = field(default_factory=dict)
    """By the reward's name, over the samples that have a reward: each of these has all parts."""


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
        turns_sum=sum(_turns(sample) for sample in samples),
        part_sums=add_up(sample.reward_parts for sample in samples if sample.HasField("reward")),
    )


def add_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name."""
    sums: defaultdict[str, float] = defaultdict(float)
    for some in parts:
        for name, value in some.items():
            sums[name] += value
    return dict(sorted(sums.items()))


def _turns(sample: pb.Trajectory) -> int:
    return sum(not segment.observation for segment in sample.segments) or 1


def stats_of_stored(trajectories: Iterable[bytes], *, begun: int) -> GroupStats:
    """The same of serialized samples."""
    return stats_of(map(pb.Trajectory.FromString, trajectories), begun=begun)
