"""Supervised fine-tuning: the model imitates the data set's own answers.

The loss of a token is its cross-entropy, times the weight w of its answer; that of a step the mean over all tokens of all its answers.
Prompts and observations are read, never imitated:

    L = - sum_t w log pi(t) / tokens

With w = 1 this is behaviour cloning: the policy that the data set's answers are most likely under. Which answers are trained, and how
much each weighs, is the data set's business (`minReward`, `weights`: `tasks/supervised/row_rewards.py`).
"""

from collections.abc import Sequence

import torch

from streamrl_workers.trainer.algorithms.algorithm import (
    GroupAlgorithm,
    RewardedSample,
    TokenBatch,
    TokenLoss,
)


class Supervised(GroupAlgorithm):
    """The algorithm; it has no constants."""

    aggregation = "TokenMean"
    compares = False

    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """The weight of each that has a reward: every row has one."""
        return [None if sample.reward is None else sample.weight for sample in samples]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token; nothing is clipped or corrected."""
        none_N = torch.zeros_like(batch.logprobs_N, dtype=torch.bool)
        weight_N = torch.ones_like(batch.logprobs_N)
        return TokenLoss(
            loss_N=-batch.advantages_N * batch.logprobs_N, clipped_N=none_N, outside_N=none_N, weight_N=weight_N
        )
