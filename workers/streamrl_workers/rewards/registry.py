"""The rewards by the key that users write, and the parts of one job's reward."""

import contextlib
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import shorten
from streamrl.spec.tasks.rewards import Reward
from streamrl_workers.rewards import asked, endpoint, texts
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, Verify
from streamrl_workers.rewards.endpoint import HttpEndpoint

SCORERS: dict[str, Callable[..., Scorer]] = {
    "verifier": asked.verifier,
    "exactMatch": texts.exact_match,
    "regex": texts.regex,
    "mathVerify": texts.math_verify,
    "python": asked.python,
    "environment": asked.environment,
}
ENDPOINTS: dict[str, Callable[..., HttpEndpoint]] = {"http": endpoint.create}
REWARDS = frozenset({*SCORERS, *ENDPOINTS})


class BadValueError(ValueError):
    """A scorer returned something other than a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One named part of the reward: exactly one of `scorer` and `endpoint` is set."""

    name: str
    scorer: Scorer | None = None
    endpoint: HttpEndpoint | None = None

    def value(self, completion: str, item: Item) -> float:
        """Score `completion` here; raises `BadValueError` or whatever the scorer raises."""
        assert self.scorer is not None
        return _number(self.scorer(completion, item))

    async def ask(self, body: str) -> float:
        """Have the endpoint judge; raises `BadValueError` or whatever keeps it from that."""
        assert self.endpoint is not None
        return _number(await self.endpoint.ask(body))


def _number(value: object) -> float:
    with contextlib.suppress(OverflowError):  # an integer that no float holds
        if isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
    raise BadValueError(f"must return a finite number, got {shorten(value)} ({type(value).__name__})")


def make_parts(rewards: Sequence[Reward], *, verify: Verify, base_dir: Path) -> tuple[Part, ...]:
    """Make the scorers of a job. Raises `UserError` for a bad pattern or function."""
    return tuple(_part(reward, number, verify=verify, base_dir=base_dir) for number, reward in enumerate(rewards))


def _part(reward: Reward, number: int, *, verify: Verify, base_dir: Path) -> Part:
    context = RewardContext(
        field=f"spec.task.rewards.{number}.{reward.key}",
        base_dir=base_dir,
        verify=verify,
        timeout_s=reward.timeout_seconds,
    )
    if reward.key in ENDPOINTS:
        return Part(name=reward.name, endpoint=ENDPOINTS[reward.key](reward.value, context=context))
    return Part(name=reward.name, scorer=SCORERS[reward.key](reward.value, context=context))
