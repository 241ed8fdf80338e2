"""On-policy distillation: the policy draws, a teacher says of each token how likely it is.

The loss is the reverse divergence KL(policy || teacher) of the next token, on texts that the policy itself draws (GKD, arXiv 2306.13649,
section 3, with reverse KL and only own samples: no gradient goes through the drawing). Its gradient, from drawn tokens, is that of a
policy gradient (MiniLLM, arXiv 2306.08543, section 2.2, the part of the single step) with the advantage of token t

    A_t = log teacher(t) - log policy(t) + w A_i

log policy is that of the policy in training, without gradient; A_i is GRPO's advantage of the sample's rewards, w `rewardWeight`. In
expectation over the policy's own tokens the gradient of - A_t log policy is that of the divergence, at w = 0. Tokens of older policies are
weighed as in other algorithms: the loss is the clipped surrogate (`objective.py`), the mean over all tokens.

Log-probs are at the sampling temperature, of teacher and policy. The advantages that the journal records are the rewards' part, w A_i.
"""

from collections.abc import Sequence
from dataclasses import replace

from streamrl_workers.trainer.algorithms.algorithm import (
    AlgorithmSetup,
    GroupAlgorithm,
    RewardedSample,
    TokenBatch,
    TokenLoss,
)
from streamrl_workers.trainer.algorithms.grpo import group_relative
from streamrl_workers.trainer.algorithms.objective import clipped_surrogate


class Distillation(GroupAlgorithm):
    """The algorithm with the job's constants; its frozen model is the teacher."""

    aggregation = "TokenMean"
    skips_equal = False

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._reward_weight: float = setup.spec.reward_weight

    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """w A_i of each sample."""
        relative = group_relative([sample.reward for sample in samples], normalize_std=True)
        return [None if advantage is None else self._reward_weight * advantage for advantage in relative]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        assert batch.reference_N is not None, "distillation needs the teacher's log-probs"
        log_ratio_N = batch.reference_N - batch.logprobs_N.detach()
        guided = replace(batch, advantages_N=batch.advantages_N + log_ratio_N)
        return clipped_surrogate(guided, clip=self._clip, correction=self._correction)
