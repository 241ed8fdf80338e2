"""Group relative policy optimisation on streamed, possibly stale samples.

Advantage of sample i of a group (DeepSeekMath, arXiv 2402.03300, section 4.1.2), over the samples with a reward:

    A_i = (R_i - mean(R)) / (std(R) + 1e-6)        std over the group, not the sample estimate; without it: A_i = R_i - mean(R)

Loss of token t of sample i, with the ratio against the *behaviour* policy (the generator's own log-prob of the
token under whatever version drew it), which makes it the importance correction for stale and mismatched samples:

    r = exp(log pi(t) - log mu(t))
    L = -min(min(r, cap) A_i, clip(r, 1 - low, 1 + high) A_i)

The clip is PPO's (arXiv 1707.06347, eq. 7). It leaves r unbounded where A_i < 0; `cap` bounds it there, the dual
clip of arXiv 1912.09729 stated on the ratio (a cap below 1 + high is without effect there). There is no KL term and no reference model.
"""

import statistics
from collections.abc import Sequence
from typing import Literal

import torch

from streamrl.spec.training import Grpo
from streamrl_workers.trainer.algorithms.rule import TokenBatch, TokenLoss

_STD_FLOOR = 1e-6
"""Keeps the division finite; a group of equal rewards has advantages of exactly zero."""


class GroupRelative:
    """The rule with the job's constants."""

    def __init__(self, spec: Grpo) -> None:
        self._spec = spec

    @property
    def aggregation(self) -> Literal["SequenceMean", "TokenMean"]:
        """As the job says."""
        return self._spec.aggregation

    def advantages(self, rewards: Sequence[float | None]) -> list[float | None]:
        """A_i of each sample; None where there is no reward."""
        known = [reward for reward in rewards if reward is not None]
        if not known or min(known) == max(known):  # equal rewards: exact zeros, whatever the mean rounds to
            return [None if reward is None else 0.0 for reward in rewards]
        mean = statistics.fmean(known)
        scale = statistics.pstdev(known, mean) + _STD_FLOOR if self._spec.normalize_std else 1.0
        return [None if reward is None else (reward - mean) / scale for reward in rewards]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        low, high, cap = 1.0 - self._spec.clip_low, 1.0 + self._spec.clip_high, self._spec.importance_cap
        advantages_N = batch.advantages_N
        ratio_N = torch.exp(batch.logprobs_N - batch.behaviour_N)
        capped_N = ratio_N.clamp(max=cap) * advantages_N
        clipped_N = ratio_N.clamp(low, high) * advantages_N
        loss_N = -torch.minimum(capped_N, clipped_N)
        with torch.no_grad():
            above_N = (advantages_N > 0) & (ratio_N > min(high, cap))
            below_N = (advantages_N < 0) & ((ratio_N < low) | (ratio_N > max(high, cap)))
        return TokenLoss(loss_N=loss_N, ratio_N=ratio_N.detach(), clipped_N=above_N | below_N)
