"""Supervised fine-tuning: the model imitates the data set's own answers.

The loss of a token is its cross-entropy, and that of a step the mean over all tokens of all its answers; prompts are read, never imitated:

    L = - sum_t log pi(t) / tokens

This is behaviour cloning: the policy that the data set's answers are most likely under. Every sample counts alike, whatever it earned;
which are trained is the data set's business (`minReward`).
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
        """1 for each that has a reward: every row has one."""
        return [None if sample.reward is None else 1.0 for sample in samples]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token; nothing is clipped or weighed."""
        none_N = torch.zeros_like(batch.logprobs_N, dtype=torch.bool)
        weight_N = torch.ones_like(batch.logprobs_N)
        return TokenLoss(loss_N=-batch.logprobs_N, clipped_N=none_N, outside_N=none_N, weight_N=weight_N)
