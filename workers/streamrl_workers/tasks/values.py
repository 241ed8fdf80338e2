"""Values that go in and out of the task pool, also as effects and events of the scheduler's core. Owns no behaviour; imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Split = Literal["train", "held_out"]

FailureKind = Literal["raised", "timeout", "died", "bad_value", "memory", "verifier_raised"]
"""What failed while a sample was scored or played. The sample has no reward if a function raised, overran its limit, ended its process, gave no finite
number, or ran out of memory.
`verifier_raised` alone has a reward: the data set's verifier raised on the answer, which scores 0."""


class TaskPoolError(RuntimeError):
    """The pool cannot work: its processes do not start, or it is closed. Says what was awaited."""


class OpenedData(NamedTuple):
    """What the job's data is found to be when it is opened."""

    held_out_size: int | None
    """None = endless."""
    fingerprint: Mapping[str, str]
    """Field of the job -> what it names, in a line: the same fingerprint, the same prompts by their indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedPrompts:
    """Ask the task pool for prompts `first_index` .. `first_index + count - 1`; each comes as soon as it is made."""

    split: Split
    first_index: int
    count: int


SegmentKind = Literal["turn", "observation", "context"]
"""What the model said; what it read; the prompt of a new context."""


class ShownSegment(NamedTuple):
    """Consecutive tokens of a demonstration."""

    text: str
    tokens: int
    kind: SegmentKind
    reward: float | None = None  # the log's for this turn, a part of the row's


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """What the data set answers to a prompt, as a sample."""

    prompt_tokens: bytes  # int32 little-endian, as the others
    tokens: bytes  # the end-of-sequence token included, unless it is truncated
    segments: tuple[ShownSegment, ...]  # they cover the tokens; most often one turn
    truncated: bool
    reward: float = 0.0  # where rows have none
    weight: float = 1.0  # of its tokens in the loss


class Reference(NamedTuple):
    """What a reward sees of an item beside the prompt. Very long texts are cut."""

    answer: str | None
    metadata: str  # JSON; empty: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt `index` of a split; (split, index) and the job's seed make it again."""

    split: Split
    index: int
    text: str
    demonstration: Demonstration | None = None  # of algorithm `supervised` alone
    reference: Reference | None = None  # for people who look at its samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSample:
    """One completion to score."""

    group_id: int
    sample_index: int
    split: Split
    prompt_index: int
    completion: str
    """The whole completion; with an environment that of the last turn."""
    environment_reward: float = 0.0
    """Sum of what the environment gave for the turns; 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a completion earned. `reward` None: scoring failed, `kind` and `error` say why, as they do of a verifier that raised."""

    group_id: int
    sample_index: int
    reward: float | None
    parts: Mapping[str, float]
    """Value of each part by the reward's name, before its weight; empty if scoring failed."""
    error: str = ""
    kind: FailureKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayTurn:
    """A turn of the model that the environment is to answer."""

    group_id: int
    sample_index: int
    lease: int
    """Names the turn: the lease under which it ended."""
    split: Split
    prompt_index: int
    completions: tuple[str, ...]
    """Text of every turn so far, this one last."""
    last_token: int
    """Token with which the turn ended."""
    prompt: str = ""
    """Text of the sample's prompt. This and what follows is for agents alone."""
    observations: tuple[str, ...] = ()
    """Text that followed each turn but the last."""
    contexts: tuple[int, ...] = ()
    """Places of those that are the prompt of a new context."""
    finish_reasons: tuple[str, ...] = ()
    """Of each turn: `stop` or `length`."""
    token_counts: tuple[tuple[int, int], ...] = ()
    """Of each turn: tokens before it, the prompt's included, and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    """What the environment (or the agent) answered. `kind` set: it failed, `error` says how."""

    group_id: int
    sample_index: int
    lease: int
    observation: str = ""
    """Text that follows the turn, the chat template's part included."""
    context: bool = False
    """That text is the prompt of a new context: the model sees nothing of what was before."""
    reward: float = 0.0
    done: bool = False
    error: str = ""
    kind: FailureKind | None = None


Request = NeedPrompts | ScoreSample | PlayTurn
Result = Prompt | Score | TurnAnswer


def index_of(request: Request) -> int:
    """Of the prompt that it is about; the first, where it is about several."""
    return request.first_index if isinstance(request, NeedPrompts) else request.prompt_index
