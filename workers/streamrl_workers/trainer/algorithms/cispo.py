"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): the importance weight is clipped, so every token keeps a gradient.

With r = exp(log pi - anchor), anchor and weight w of the correction, GRPO's advantages A, and sg = without gradient:

    L = -w sg(clip(r, 1 - low, 1 + high)) A log pi

The loss of a step is the mean over all its tokens. The paper bounds r from above alone: `clipLow` is 1, no lower bound.
"""

from typing import ClassVar

import torch
from pydantic import Field

from streamrl.spec.algorithm import ReferenceKlField
from streamrl.spec.base import PluginOptions
from streamrl_workers.trainer.algorithms.algorithm import AlgorithmSetup, TokenBatch, TokenLoss
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate
from streamrl_workers.trainer.algorithms.objective import with_divergence


class Cispo(GroupSurrogate):
    """CISPO with the hyper-parameters of the job."""

    protocol: ClassVar[int] = 1
    aggregation = "TokenMean"
    normalize_std = True

    class Options(PluginOptions):
        """Bounds of the weight, and a pull towards the initial model."""

        clip_low: float = Field(default=1.0, gt=0, le=1, description="The weight is at least 1 - clipLow.")
        clip_high: float = Field(default=0.28, gt=0, le=1000, description="The weight is at most 1 + clipHigh.")
        reference_kl: ReferenceKlField = None

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._low, self._high = 1.0 - setup.spec.clip_low, 1.0 + setup.spec.clip_high

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        found = self.corrected(batch)
        ratio_N = torch.exp(batch.logprobs_N.detach() - found.anchor_N)
        bounded_N = ratio_N.clamp(self._low, self._high)
        loss = TokenLoss(
            loss_N=-found.weight_N * bounded_N * batch.advantages_N * batch.logprobs_N,
            clipped_N=torch.zeros_like(ratio_N, dtype=torch.bool),
            outside_N=bounded_N != ratio_N,
            weight_N=found.weight_N,
        )
        return with_divergence(loss, batch=batch, kl=self.reference_kl)
