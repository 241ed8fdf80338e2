"""What the journal holds of a run, as values: its records, and what they leave after a restart.

Owns no behaviour but the sums of one scored group, which stay in memory while its samples are in the journal alone.
The journal's files belong to `journal/`; what the core asks for besides, to `effects.py`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Group `group_id` will be made of train prompt `prompt_index`."""

    group_id: int
    prompt_index: int
    prompt_key: int = 0
    """Stable 63-bit hash of the prompt's text: lengths are remembered by it. 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """All samples of the group are finished and scored. Committed before the group is delivered."""

    group_id: int
    start_version: int
    """Weight version (step) of the group's earliest first token."""
    trajectories: tuple[bytes, ...]
    """Serialized `Sample`, by sample index."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The group will never be trained."""

    group_id: int
    reason: str
    mean_tokens: float | None = None
    """Of its completions; None: they did not all finish, or their lengths are known from `Scored`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    """Trainer instance `instance` begins at `step` (its checkpoint); later steps of older attempts no longer count."""

    attempt: int
    instance: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """Step `step` of `attempt` consumed exactly these groups."""

    attempt: int
    step: int
    group_ids: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """The oldest checkpoint kept is that of `step` (history: steps < `step`); those steps' trajectories can go.

    `path` is that of the newest.
    """

    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Held-out evaluation of version `step`."""

    step: int
    mean_reward: float | None  # None: nothing could be scored
    prompts: int
    failed: int
    mean_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run has ended; live groups are dropped with reason run_ended."""

    step: int


Record = Planned | Scored | Dropped | AttemptStarted | StepTaken | Checkpointed | Evaluated | RunEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """What a scored group adds to the summary of its step."""

    start_version: int
    samples: int
    reward_sum: float
    reward_count: int
    tokens_sum: int
    tokens_max: int
    turns_sum: int = 0
    """Turns of the model; one for each sample without an environment."""
    part_sums: Mapping[str, float] = field(default_factory=dict)
    """By the reward's name, over the samples that have a reward: each of these has all parts."""


def stats_of(trajectories: Iterable[pb.Sample], *, start_version: int) -> GroupStats:
    """Add up the samples of one group."""
    samples = list(trajectories)
    rewards = [sample.reward for sample in samples if sample.HasField("reward")]
    tokens = [len(sample.tokens) >> 2 for sample in samples]
    return GroupStats(
        start_version=start_version,
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


def _turns(sample: pb.Sample) -> int:
    return sum(not segment.observation for segment in sample.segments) or 1


def stats_of_stored(trajectories: Iterable[bytes], *, start_version: int) -> GroupStats:
    """The same of serialized samples."""
    return stats_of(map(pb.Sample.FromString, trajectories), start_version=start_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredGroup:
    """A live group found in the journal, or one of a step that may be repeated (`stats` are there: its samples stay
    in the journal). Neither `trajectories` nor `stats`: planned only, it is generated again."""

    group_id: int
    prompt_index: int
    start_version: int | None
    trajectories: tuple[bytes, ...]
    size_bytes: int
    stats: GroupStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a journal holds. The defaults are a new journal."""

    next_group_id: int = 0
    attempt: int = 0
    """Newest attempt, 0 if none yet."""
    instance: str = ""
    """Trainer instance of that attempt."""
    checkpoint_step: int = 0
    step: int = 0
    """Steps taken in the effective history (steps of older attempts behind a rollback do not count): the newest
    `AttemptStarted.step`, plus the steps that this attempt has taken since."""
    groups: tuple[RecoveredGroup, ...] = ()
    """Live groups and the groups of steps not yet covered by a checkpoint."""
    compositions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """step -> groups, newest record of every step >= `checkpoint_step`. Steps >= `step` were undone by a rollback:
    the attempt takes them again with exactly these groups."""
    evaluated_steps: frozenset[int] = frozenset()
    prompt_lengths: Mapping[int, float] = field(default_factory=dict)
    """EMA of completion tokens by prompt key, for length prediction."""
    ended: bool = False
