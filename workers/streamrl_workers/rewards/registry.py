"""The rewards by the key that users write, and the parts of one job's reward."""

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import shorten
from streamrl.spec.task import Reward
from streamrl_workers.rewards import (
    endpoint,
    environment,
    equal_mathematics,
    exact_match,
    python_function,
    regex,
    verifier,
)
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, Verify

REWARDS: dict[str, Callable[..., Scorer]] = {
    "verifier": verifier.create,
    "exactMatch": exact_match.create,
    "regex": regex.create,
    "mathVerify": equal_mathematics.create,
    "python": python_function.create,
    "http": endpoint.create,
    "environment": environment.create,
}


class BadValueError(ValueError):
    """A scorer returned something other than a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One named part of the reward."""

    name: str
    weight: float
    """Share of the whole, 0 to 1; the weights of all parts sum to 1."""
    timeout_s: float
    scorer: Scorer

    def value(self, completion: str, item: Item) -> float:
        """Score `completion`; raises `BadValueError` or whatever the scorer raises."""
        value = self.scorer(completion, item)
        if isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
        raise BadValueError(f"must return a finite number, got {shorten(value)} ({type(value).__name__})")


def make_parts(rewards: Sequence[Reward], *, verify: Verify, base_dir: Path) -> tuple[Part, ...]:
    """Make the scorers of a job. Raises `UserError` for a bad pattern or function."""
    return tuple(_part(reward, number, verify=verify, base_dir=base_dir) for number, reward in enumerate(rewards))


def weighted_sum(parts: Sequence[Part], values: Sequence[float]) -> float:
    """The sample's reward."""
    return sum(part.weight * value for part, value in zip(parts, values, strict=True))


def _part(reward: Reward, number: int, *, verify: Verify, base_dir: Path) -> Part:
    context = RewardContext(
        field=f"spec.task.rewards.{number}.{reward.key}",
        base_dir=base_dir,
        verify=verify,
        timeout_s=reward.timeout_seconds,
    )
    return Part(
        name=reward.name,
        weight=reward.weight_percent / 100,
        timeout_s=reward.timeout_seconds,
        scorer=REWARDS[reward.key](reward.value, context=context),
    )
