"""Soft adaptive policy optimisation (SAPO, arXiv 2511.20347): a smooth gate in place of the clip.

With r = exp(log pi - anchor), anchor and weight w of the correction, GRPO's advantages A, and tau = `tauPositive` where A > 0, else
`tauNegative`:

    f(r) = 4 / tau sigmoid(tau (r - 1))        its slope is 1 at r = 1, and falls on both sides
    L = -w f(r) A

The loss of a step is the mean over its samples of their token means.
"""

from typing import ClassVar

import torch
from pydantic import Field

from streamrl.spec.algorithm import ReferenceKlField
from streamrl.spec.base import PluginOptions
from streamrl_workers.trainer.algorithms.algorithm import AlgorithmSetup, TokenBatch, TokenLoss
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate
from streamrl_workers.trainer.algorithms.objective import with_divergence


class Sapo(GroupSurrogate):
    """SAPO with the hyper-parameters of the job."""

    protocol: ClassVar[int] = 1
    aggregation = "SequenceMean"
    normalize_std = True

    class Options(PluginOptions):
        """Temperatures of the gate, and a pull towards the initial model."""

        tau_positive: float = Field(default=1.0, gt=0, le=1000, description="Of tokens with a positive advantage.")
        tau_negative: float = Field(default=1.05, gt=0, le=1000, description="Of the others; higher = a narrower gate.")
        reference_kl: ReferenceKlField = None

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._positive, self._negative = setup.spec.tau_positive, setup.spec.tau_negative

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        found = self.corrected(batch)
        ratio_N = torch.exp(batch.logprobs_N - found.anchor_N)
        tau_N = torch.full_like(ratio_N, self._negative).masked_fill(batch.advantages_N > 0, self._positive)
        gate_N = 4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0))
        loss = TokenLoss.unclipped(-found.weight_N * gate_N * batch.advantages_N, weight_N=found.weight_N)
        return with_divergence(loss, batch=batch, kl=self.reference_kl)
