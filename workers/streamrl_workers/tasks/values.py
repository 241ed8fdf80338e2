"""Values that go in and out of the task pool. Owns no behaviour; imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]

FailureKind = Literal["raised", "timeout", "died", "bad_value", "memory"]
"""Why a sample has no reward: its function raised, overran, ended its process, gave no finite number, ran out of memory."""


class TaskPoolError(RuntimeError):
    """The pool cannot work: its processes do not start, or it is closed. Says what was awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptItem:
    """Prompt `index` of a split; (split, index) and the job's seed make it again."""

    split: Split
    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One completion to score."""

    group_id: int
    sample_index: int
    split: Split
    prompt_index: int
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """What a completion earned. `reward` None: scoring failed, `kind` and `error` say why."""

    group_id: int
    sample_index: int
    reward: float | None
    parts: Mapping[str, float]
    """Value of each part by the reward's name, before its weight; empty if scoring failed."""
    error: str = ""
    kind: FailureKind | None = None
