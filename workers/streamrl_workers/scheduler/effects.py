"""Values between the scheduler's pure core and the shell that does the I/O.

The core (`core.py`) takes events and returns a list of effects; the shell (`shell/executor.py`) carries
them out in order. Messages to generators and the trainer are the protocol's own.
Owns no behaviour.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.group_stats import GroupStats

# What the task pool is asked and answers passes through the core as it is; its names are part of this module.
# ruff: noqa: PLC0414
from streamrl_workers.tasks.values import (
    PlayTurn as PlayTurn,
)
from streamrl_workers.tasks.values import (
    Prompt as Prompt,
)
from streamrl_workers.tasks.values import (
    Score as Score,
)
from streamrl_workers.tasks.values import (
    ScoreSample as ScoreSample,
)
from streamrl_workers.tasks.values import (
    Split as Split,
)
from streamrl_workers.tasks.values import (
    TurnAnswer as TurnAnswer,
)

# ---------------------------------------------------------------- values that come in


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorInfo:
    """A generator that has said hello. `step` None: it has no weights yet."""

    generator_id: str
    instance: str
    pool: str
    slots: int
    step: int | None
    attempt: int | None


# ---------------------------------------------------------------- journal records (the durable truth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Group `group_id` will be made of train prompt `prompt_index`."""

    group_id: int
    prompt_index: int
    prompt_key: int = 0
    """Stable 63-bit hash of the prompt's text: lengths are remembered by it. 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """All samples of the group are finished and scored. Committed before the group is handed over."""

    group_id: int
    begun_step: int
    """Weight version (step) of the group's earliest first token."""
    trajectories: tuple[bytes, ...]
    """Serialized `Trajectory`, by sample index."""
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


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedPrompts:
    """Ask the task pool for prompts `first_index` .. `first_index + count - 1`."""

    split: Split
    first_index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSome:
    """A ranker has put work off: the shell calls `core.rank_some()` soon, between other events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRanker:
    """For a ranker that answers later. The shell answers `core.prompts_ranked(scores)`, in any portions, or never."""

    prompts: tuple[tuple[int, str], ...]
    """To score: (prompt key, text)."""
    pairs: tuple[tuple[str, float], ...]
    """To learn: (text, mean completion tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToGenerator:
    """Send a command to one generator."""

    generator_id: str
    command: pb.GeneratorCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class ToTrainer:
    """Send a command to the trainer."""

    command: pb.TrainerCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class HandGroup:
    """Send a finished group to the trainer (a `TrainerCommand` with a `Group`). Its samples stay serialized."""

    group_id: int
    step: int
    trajectories: tuple[bytes, ...]
    """Serialized `Trajectory`, by sample index. Empty: a group of a recorded step, the shell takes them from the journal."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Append to the journal. The shell answers `core.committed(sequence)` when it is durable; sequences rise by 1."""

    sequence: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over: stop everybody, write the result, exit 0."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The run cannot go on (every group is dropped, or checkpoint and journal do not fit): stop everybody, say `reason` on one line, exit 2."""

    reason: str


Effect = (
    NeedPrompts
    | RankSome
    | AskRanker
    | ScoreSample
    | PlayTurn
    | ToGenerator
    | ToTrainer
    | HandGroup
    | Write
    | Finished
    | Failed
)


# ---------------------------------------------------------------- recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredGroup:
    """A live group found in the journal, or one of a step that may be repeated (`stats` are there: its samples stay
    in the journal). Neither `trajectories` nor `stats`: planned only, it is generated again."""

    group_id: int
    prompt_index: int
    begun_step: int | None
    trajectories: tuple[bytes, ...]
    size_bytes: int
    stats: GroupStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a journal holds. A new journal gives the empty state."""

    next_group_id: int
    attempt: int
    """Newest attempt, 0 if none yet."""
    instance: str
    """Trainer instance of that attempt."""
    checkpoint_step: int
    step: int
    """Steps taken in the effective history (steps of older attempts behind a rollback do not count): the newest
    `AttemptStarted.step`, plus the steps that this attempt has taken since."""
    groups: tuple[RecoveredGroup, ...]
    """Live groups and the groups of steps not yet covered by a checkpoint."""
    compositions: Mapping[int, tuple[int, ...]]
    """step -> groups, newest record of every step >= `checkpoint_step`. Steps >= `step` were undone by a rollback:
    the attempt takes them again with exactly these groups."""
    evaluated_steps: frozenset[int]
    prompt_lengths: Mapping[int, float]
    """EMA of completion tokens by prompt key, for length prediction."""
    ended: bool
