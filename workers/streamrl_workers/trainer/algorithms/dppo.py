"""Divergence proximal policy optimisation (DPPO, arXiv 2602.04879): a mask by divergence in place of the clip by ratio.

With p = pi of the token that was drawn, q = exp(anchor), r = p / q, anchor and weight w of the correction, GRPO's advantages A:

    TotalVariation    D = |p - q|
    KullbackLeibler   D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))     of the token against all others together
    M = 0 where D > threshold and r moves away from 1: A > 0 and r > 1, or A < 0 and r < 1;  else 1
    L = -w M r A

The loss of a step is the mean over all its tokens. These are the paper's Binary divergences; its Top-K ones need more than
the drawn token's log-prob.
"""

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from pydantic import Field

from streamrl.spec.algorithm import ReferenceKlField
from streamrl.spec.base import PluginOptions
from streamrl_workers.trainer.algorithms.algorithm import AlgorithmSetup, TokenBatch, TokenLoss
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate
from streamrl_workers.trainer.algorithms.objective import with_divergence

_LEAST_REST = 1e-12
"""Smallest probability of all other tokens together: the logarithm stays finite where the drawn one is certain."""


class Dppo(GroupSurrogate):
    """DPPO with the hyper-parameters of the job."""

    protocol: ClassVar[int] = 1
    aggregation = "TokenMean"
    normalize_std = True

    class Options(PluginOptions):
        """The trust region, and a pull towards the initial model."""

        divergence: Literal["TotalVariation", "KullbackLeibler"] = Field(
            default="TotalVariation", description="Divergence of the policy from the one that drew the token."
        )
        threshold: float = Field(default=0.15, gt=0, le=100, description="Largest divergence before tokens are masked.")
        reference_kl: ReferenceKlField = None

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._threshold: float = setup.spec.threshold
        self._divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = (
            _total_variation if setup.spec.divergence == "TotalVariation" else _kullback_leibler
        )

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        found, advantages_N = self.corrected(batch), batch.advantages_N
        ratio_N = torch.exp(batch.logprobs_N - found.anchor_N)
        with torch.no_grad():
            outside_N = self._divergence(batch.logprobs_N.exp(), found.anchor_N.exp()) > self._threshold
            moves_away_N = ((advantages_N > 0) & (ratio_N > 1)) | ((advantages_N < 0) & (ratio_N < 1))
        masked_N = outside_N & moves_away_N
        loss = TokenLoss(
            loss_N=(-found.weight_N * ratio_N * advantages_N).masked_fill(masked_N, 0.0),
            clipped_N=masked_N,
            outside_N=outside_N,
            weight_N=found.weight_N,
        )
        return with_divergence(loss, batch=batch, kl=self.reference_kl)


def _total_variation(policy_N: torch.Tensor, anchor_N: torch.Tensor) -> torch.Tensor:
    return (policy_N - anchor_N).abs()


def _kullback_leibler(policy_N: torch.Tensor, anchor_N: torch.Tensor) -> torch.Tensor:
    """Of two events: the drawn token, and any other."""
    rest_N, anchor_rest_N = ((1.0 - p_N).clamp(min=_LEAST_REST) for p_N in (policy_N, anchor_N))
    return anchor_N * (anchor_N / policy_N).log() + anchor_rest_N * (anchor_rest_N / rest_N).log()
