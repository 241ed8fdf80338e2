"""What a reward sees and what it is. Owns the types alone.

A scorer is called as `scorer(completion, item)` and returns a number. It may raise or hang: the
process that calls it is watched from outside, so a scorer needs no time limit of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One task item: what is asked and what is expected."""

    prompt: str
    target: str
    """Text of the supervised warm-up; "" if the data set gives no reference answer and no format function gives one."""
    question: str
    """The question as the data set puts it, before `spec.task.format`."""
    answer: str | None
    """Reference answer; None where many answers are right and only the verifier can tell."""
    metadata: Mapping[str, Any]
    source_index: int
    """Where the data set holds it: the generator's index, or the line number counted from 0."""
    environment_reward: float = 0.0
    """Of the sample that is scored: sum of what the environment gave for its turns; 0 without one."""


Scorer = Callable[[str, Item], object]
"""(completion, item) -> number. Anything but a finite number counts as a failure of the sample."""

Verify = Callable[[str, Item], float]
"""(answer, item) -> number: the data set's own verdict on an extracted answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What a reward is made from, beside its own options."""

    field: str
    """Path of the reward's options in the job file, for errors."""
    base_dir: Path
    """Where the user's modules lie."""
    verify: Verify
    timeout_s: float
    """The reward's time limit for one sample, held by the pool."""
