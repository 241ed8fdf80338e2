"""The clipped surrogate that most rules share.

With the correction's anchor, weight w and cap, of a token with advantage A and ratio r = exp(log pi - anchor):

    L = -w min(min(r, cap) A, clip(r, 1 - low, 1 + high) A)

This is PPO's clip (arXiv 1707.06347, eq. 7). It leaves r unbounded where A < 0: `cap` bounds it there (a cap below
1 + high is without effect there). Where a divergence is asked for, beta D(t) is added to the token's loss, unweighed.
"""

from dataclasses import replace

import torch

from streamrl.spec.training import Clip, ReferenceKl
from streamrl_workers.trainer.algorithms.corrections import Corrector
from streamrl_workers.trainer.algorithms.divergence import divergence
from streamrl_workers.trainer.algorithms.rule import TokenBatch, TokenLoss


def clipped_surrogate(batch: TokenBatch, *, clip: Clip, correction: Corrector) -> TokenLoss:
    """L of each token."""
    corrected = correction(proximal_N=batch.proximal_N, behaviour_N=batch.behaviour_N)
    low, high, cap = 1.0 - clip.clip_low, 1.0 + clip.clip_high, corrected.cap
    advantages_N = batch.advantages_N
    ratio_N = torch.exp(batch.logprobs_N - corrected.anchor_N)
    bounded_N = torch.minimum(ratio_N.clamp(max=cap) * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    with torch.no_grad():
        above_N = (advantages_N > 0) & (ratio_N > min(high, cap))
        below_N = (advantages_N < 0) & ((ratio_N < low) | (ratio_N > max(high, cap)))
    return TokenLoss(loss_N=-corrected.weight_N * bounded_N, clipped_N=above_N | below_N, weight_N=corrected.weight_N)


def with_divergence(loss: TokenLoss, *, batch: TokenBatch, kl: ReferenceKl | None) -> TokenLoss:
    """The loss with beta D(t) added; as it is where there is no reference or its coefficient only measures."""
    if kl is None or kl.coefficient == 0:
        return loss
    assert batch.reference_N is not None, "the rule asked for a reference, the batch has none"
    divergence_N = divergence(batch.logprobs_N - batch.reference_N, estimator=kl.estimator)
    return replace(loss, loss_N=loss.loss_N + kl.coefficient * divergence_N)
