"""Weights of logged answers: the dual generator's are the best that its constraint allows, the advantage's are the formula's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.spec.algorithm import SupervisedSpec
from streamrl_workers.tasks.questions import hash_of
from streamrl_workers.tasks.supervised.row_rewards import RowRewards

REWARDS = st.lists(st.integers(-3, 3), min_size=1, max_size=5)


@dataclass(frozen=True, kw_only=True)
class Answer:
    question: str
    source_index: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)


def weights_of(rewards: Sequence[float], **weights: Any) -> list[float]:
    """Of the answers to one prompt, in a log with another prompt."""
    spec = SupervisedSpec.model_validate({"rewardField": "reward", "weights": weights})
    weigher = RowRewards(spec, place=str, key=hash_of)
    rows = [Answer(question="q", metadata={"reward": reward}) for reward in rewards]
    weigher.compare([*rows, *(Answer(question="other", metadata={"reward": reward}) for reward in (0, 1))])
    return [weigher.weight(row) for row in rows]


def best_earned(rewards: Sequence[int], *, most: Fraction) -> Fraction:
    """By the best distribution with no probability above `most`: that of a corner, where all but one are 0 or `most`."""
    found = []
    for free in range(len(rewards)):
        for others in product((Fraction(0), most), repeat=len(rewards) - 1):
            rest = 1 - sum(others)
            if 0 <= rest <= most:
                policy = [*others[:free], rest, *others[free:]]
                found.append(sum(p * reward for p, reward in zip(policy, rewards, strict=True)))
    return max(found)


@given(rewards=REWARDS, share=st.integers(1, 99))
def test_the_policy_of_the_dual_generator_earns_most_and_the_other_makes_up_the_log(
    rewards: list[int], share: int
) -> None:
    weights = weights_of(rewards, dualGenerator={"sharePercent": share})
    count, part = len(rewards), share / 100
    policy = [weight / (part * count) for weight in weights]
    other = [(1 / count - part * p) / (1 - part) for p in policy]
    assert sum(policy) == pytest.approx(1)
    assert sum(other) == pytest.approx(1)
    assert min(*policy, *other) >= -1e-9
    earned = sum(p * reward for p, reward in zip(policy, rewards, strict=True))
    assert earned == pytest.approx(float(best_earned(rewards, most=Fraction(100, share * count))))
    for reward in set(rewards):
        assert len({weight for weight, one in zip(weights, rewards, strict=True) if one == reward}) == 1


def test_by_default_the_better_half_counts_and_no_answer_twice_as_much_as_in_the_log() -> None:
    assert weights_of([3, 1, 0, 2], dualGenerator={}) == [1, 0, 0, 1]
    assert weights_of([1, 0, 0, 0], dualGenerator={}) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert weights_of([2, 1, 0], dualGenerator={}) == [1, 0.5, 0]
    assert weights_of([5, 5], dualGenerator={}) == [0.5, 0.5]


@given(rewards=REWARDS, beta=st.floats(0.01, 10), most=st.floats(1, 50))
def test_the_advantages_weights_are_the_formulas(rewards: list[int], beta: float, most: float) -> None:
    mean = Fraction(sum(rewards), len(rewards))
    expected = []
    for reward in rewards:
        exponent = float(reward - mean) / beta
        expected.append(most if exponent > math.log(most) else math.exp(exponent))
    assert weights_of(rewards, advantage={"beta": beta, "most": most}) == pytest.approx(expected)


@pytest.mark.parametrize("weights", [{"dualGenerator": {}}, {"advantage": {}}], ids=lambda weights: next(iter(weights)))
@given(rewards=REWARDS, shift=st.integers(-8, 8))
def test_what_a_prompt_adds_to_all_its_rewards_changes_nothing(
    weights: dict[str, Any], rewards: list[int], shift: int
) -> None:
    assert weights_of([reward + shift for reward in rewards], **weights) == pytest.approx(
        weights_of(rewards, **weights)
    )


def test_a_log_without_a_choice_is_refused() -> None:
    spec = SupervisedSpec.model_validate({"rewardField": "reward", "weights": {"dualGenerator": {}}})
    rows = [Answer(question=f"q{number}", metadata={"reward": number}) for number in range(4)]
    with pytest.raises(
        UserError, match="weights: needs a prompt with answers that earned differently, and there is none"
    ):
        RowRewards(spec, place=str, key=hash_of).compare([*rows, *rows])
