"""How much a row of a log counts, by what it earned beside the other answers to its prompt.

Owns rewards and weights of rows. Does not own the rows (`dataset.py`), nor the loss (`trainer/algorithms/supervised.py`). The K answers
of a prompt are those rows that ask the same question, in one split. A weight follows from rewards alone, so equal rewards weigh the same:

- no weights: 1. As with `critic`, whose weights are of turns, and the trainer's (`trainer/algorithms/iql.py`).
- `dualGenerator` (arXiv 2211.01471). A policy pi and a second generator mu make up the log between them, with s the policy's share:
  s pi + (1 - s) mu = 1 / K on each answer. That holds if and only if pi <= 1 / (s K), and pi earns most where it takes the best s K
  answers. The weight is the part of a row that pi takes, mu has the rest:

      w = clip((s K - better) / equal, 0, 1)        better, equal: answers that earned more, and as much

- `advantage` (arXiv 1910.00177): w = min(exp((r - mean r) / beta), most).
"""

import bisect
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from streamrl.errors import UserError
from streamrl.spec.algorithm import LARGEST_REWARD, AdvantageWeights, DualGenerator, SupervisedSpec

FIELD = "spec.algorithm.supervised"
_WHOLE_PERCENT = 100
REWARDS = f"from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"


def is_reward(value: object) -> TypeGuard[int | float]:
    """Whether a log may say that a row or a turn earned this."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_REWARD


class Row(Protocol):
    """What is read of a row."""

    @property
    def question(self) -> str:
        """Rows with one question are answers to one prompt."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The row's other fields."""

    @property
    def source_index(self) -> int:
        """Where the data set holds it."""


class RowRewards:
    """Of the rows of one data set."""

    def __init__(self, spec: SupervisedSpec, *, place: Callable[[int], str], key: Callable[[str], int]) -> None:
        """`place`: where a person finds a row; `key`: a number by which questions are told apart."""
        self._spec = spec
        self._place = place
        self._key = key
        self._rewards: Mapping[int, Sequence[float]] = {}
        """Of the answers to each prompt, ascending."""

    def reward(self, row: Row) -> float:
        """What it earned; 0 where rows have none. Raises `UserError` if that is no number."""
        name = self._spec.reward_field
        reward = 0.0 if name is None else row.metadata.get(name)
        if not is_reward(reward):
            rule = f"{self._place(row.source_index)}: {name} must be a number {REWARDS}"
            raise UserError(field=f"{FIELD}.rewardField", rule=rule, got=reward)
        return float(reward)

    def compare(self, rows: Iterable[Row]) -> None:
        """These are all. Raises `UserError` if there is nothing to weigh."""
        found: defaultdict[int, array[float]] = defaultdict(lambda: array("d"))
        for row in rows:
            found[self._key(row.question)].append(self.reward(row))
        self._rewards = {key: array("d", sorted(rewards)) for key, rewards in found.items()}
        if all(rewards[0] == rewards[-1] for rewards in self._rewards.values()):
            rule = "needs a prompt with answers that earned differently, and there is none"
            fix = "take a log with several answers to each prompt, or leave weights out"
            raise UserError(field=f"{FIELD}.weights", rule=rule, fix=fix)

    def weight(self, row: Row) -> float:
        """How much it counts, of those that were compared."""
        weights = self._spec.weights
        if weights is None or weights.critic is not None:
            return 1.0
        reward, rewards = self.reward(row), self._rewards[self._key(row.question)]
        if weights.dual_generator is not None:
            return dual_generator_weight(reward, rewards, spec=weights.dual_generator)
        assert weights.advantage is not None
        return advantage_weight(reward, rewards, spec=weights.advantage)


def dual_generator_weight(reward: float, rewards: Sequence[float], *, spec: DualGenerator) -> float:
    """Of an answer among all to its prompt, whose rewards ascend."""
    better = len(rewards) - bisect.bisect_right(rewards, reward)
    equal = len(rewards) - better - bisect.bisect_left(rewards, reward)
    taken = spec.share_percent * len(rewards) / _WHOLE_PERCENT
    return min(max((taken - better) / equal, 0.0), 1.0)


def advantage_weight(reward: float, rewards: Sequence[float], *, spec: AdvantageWeights) -> float:
    """Of an answer among all to its prompt."""
    return spec.weight(reward - statistics.fmean(rewards))
