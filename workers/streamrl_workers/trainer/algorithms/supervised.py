"""Supervised fine-tuning: the model imitates the data set's own answers.

The loss of a token is its cross-entropy, times the weight w of its answer; that of a step the mean over all tokens of all its answers.
Prompts and observations are read, never imitated:

    L = - sum_t w log pi(t) / tokens

With w = 1 this is behaviour cloning: the policy that the data set's answers are most likely under. Which answers are trained, and how
much each weighs, is the data set's business (`minReward`, `weights`: `tasks/supervised/row_rewards.py`). With `weights.critic` the
algorithm is `iql.py`.
"""

from collections.abc import Sequence

from streamrl_workers.trainer.algorithms.algorithm import (
    GroupAlgorithm,
    RewardedSample,
    TokenBatch,
    TokenLoss,
)
from streamrl_workers.trainer.algorithms.objective import weighed_cross_entropy


class Supervised(GroupAlgorithm):
    """The algorithm; it has no constants."""

    aggregation = "TokenMean"
    compares = False

    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """The weight of each that has a reward: every row has one."""
        return [None if sample.reward is None else sample.weight for sample in samples]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        return weighed_cross_entropy(batch)
