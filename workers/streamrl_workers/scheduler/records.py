"""What the journal holds of a run, as values: its records, and what they leave after a restart.

The journal's files belong to `journal/`; what the core asks for besides, to `effects.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    texts: bytes = b""
    """Serialized `GroupTexts`; empty: the group is not to be archived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The group will never be trained."""

    group_id: int
    reason: str
    mean_tokens: float | None = None
    """Of its completions; None: they did not all finish, or their lengths are known from `Scored`."""
    trajectories: tuple[bytes, ...] = ()
    """As of `Scored`, where all are finished and no `Scored` came before: for the archive alone."""
    texts: bytes = b""


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
    advantages: bytes = b""
    """As of `StepDone`, and so are the others."""
    version_hash: bytes = b""
    micro_steps: tuple[int, ...] = ()
    cuts: bytes = b""


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
    mean_reward: float | None  # of the greedy answers; None: nothing could be scored
    sampled_reward: float | None = None  # mean of the sampled answers; None: there are none, or nothing could be scored
    prompts: int
    failed: int  # greedy answers without a reward
    mean_tokens: float  # of the greedy answers
    tasks: Mapping[str, "EvaluatedTask"] = field(default_factory=dict)
    """By name, of each task; empty: the job has one task. Not in the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedTask:
    """The same of the prompts of one task."""

    mean_reward: float | None
    sampled_reward: float | None
    prompts: int
    failed: int
    mean_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run has ended; live groups are dropped with reason run_ended."""

    step: int
    version_hash: bytes = b""
    """Of version `step`, the last one. Empty: it is not known."""


Record = Planned | Scored | Dropped | AttemptStarted | StepTaken | Checkpointed | Evaluated | RunEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStats:
    """What scored samples add up to: those of a group, or of a step."""

    samples: int
    reward_sum: float
    reward_count: int
    """Samples with a reward."""
    lengths: tuple[int, ...]
    """Completion tokens of each sample."""
    turns_sum: int
    """Turns of the model; one for each sample without an environment."""
    unrewarded: int = 0
    """Samples whose source gives no reward."""
    truncated: int = 0
    """Samples that ended at a limit of tokens."""
    part_sums: Mapping[str, float]
    """By the reward's name, before weights, over the samples that have a reward: each of these has all parts."""

    @property
    def tokens_sum(self) -> int:
        """Completion tokens of all."""
        return sum(self.lengths)

    @property
    def tokens_max(self) -> int:
        """Of the longest."""
        return max(self.lengths, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredGroup:
    """A live group found in the journal, or one of a step that may be repeated (its samples stay in the journal).
    `stats` None: planned only, it is generated again."""

    group_id: int
    prompt_index: int
    start_version: int | None
    trajectories: tuple[bytes, ...]
    size_bytes: int
    stats: SampleStats | None = None


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
    cuts: Mapping[int, bytes] = field(default_factory=dict)
    """Passes of the same records, each a `pb.PassCuts`; those that were not cut are left out."""
    evaluated_steps: frozenset[int] = frozenset()
    prompt_lengths: Mapping[int, float] = field(default_factory=dict)
    """EMA of completion tokens by prompt key, for length prediction."""
    ended: bool = False
    fingerprint: Mapping[str, str] | None = None
    """Of the data that prompts were made of; None: the journal has none yet."""
