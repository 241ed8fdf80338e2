"""The parts of an objective that algorithms share. Pure.

**Clipped surrogate.** Of a token with advantage A and ratio r = exp(log pi - anchor); the anchor, the weight w and the cap are the
correction's (`corrections.py`):

    L = -w min(min(r, cap) A, clip(r, 1 - low, 1 + high) A)

This is PPO's clip (arXiv 1707.06347, eq. 7). It leaves r unbounded where A < 0: `cap` bounds it there (a cap below
1 + high is without effect there).

**Weighed cross-entropy** of tokens that nobody drew whose log-probs are known, so nothing is clipped or corrected:

    L = -A log pi

**Divergence** KL(policy || reference), estimated from drawn tokens (Schulman, "Approximating KL Divergence", 2020), with
d = log policy(t) - log reference(t):

    K1 = d                   unbiased; as a loss its gradient is zero in expectation, so it belongs into rewards
    K2 = d^2 / 2             biased; as a loss its gradient is that of the divergence
    K3 = exp(-d) - 1 + d     unbiased, never negative

**Rewards of tokens**, for algorithms that look at the whole batch. A turn's reward is on the turn's last token; what the sample's
reward holds beyond its turns' is on the sample's last token; beta D(t) is taken off each token's reward.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from streamrl.spec.algorithm import ClipBounds, ReferenceKl
from streamrl_workers.trainer.algorithms.algorithm import TokenBatch, TokenLoss, TokenView, corrected
from streamrl_workers.trainer.algorithms.corrections import Corrector

_STD_FLOOR = 1e-8
"""Keeps the division finite where all advantages are equal."""

Estimator = Literal["K1", "K2", "K3"]
ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "K1": lambda d: d,
    "K2": lambda d: d.square() / 2.0,
    "K3": lambda d: torch.expm1(-d) + d,
}


def clipped_surrogate(batch: TokenBatch, *, clip: ClipBounds, correction: Corrector) -> TokenLoss:
    """L of each token."""
    found = corrected(batch, correction=correction)
    weight_N = found.weight_N
    low, high, cap = 1.0 - clip.clip_low, 1.0 + clip.clip_high, found.cap
    advantages_N = batch.advantages_N
    ratio_N = torch.exp(batch.logprobs_N - found.anchor_N)
    bounded_N = torch.minimum(ratio_N.clamp(max=cap) * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    with torch.no_grad():
        above_N = (advantages_N > 0) & (ratio_N > min(high, cap))
        below_N = (advantages_N < 0) & ((ratio_N < low) | (ratio_N > max(high, cap)))
        outside_N = (ratio_N < low) | (ratio_N > high)
    return TokenLoss(
        loss_N=-weight_N * bounded_N,
        clipped_N=above_N | below_N,
        outside_N=outside_N,
        weight_N=weight_N,
    )


def weighed_cross_entropy(batch: TokenBatch) -> TokenLoss:
    """L of each token."""
    return TokenLoss.unclipped(-batch.advantages_N * batch.logprobs_N)


def kl_divergence(log_ratio_N: torch.Tensor, *, estimator: Estimator) -> torch.Tensor:
    """The estimate for each token; carries the gradient of `log_ratio_N`."""
    return ESTIMATORS[estimator](log_ratio_N)


def with_divergence(loss: TokenLoss, *, batch: TokenBatch, kl: ReferenceKl | None) -> TokenLoss:
    """The loss with beta D(t) added, unweighed; as it is where there is no reference or its coefficient only measures."""
    if kl is None or kl.coefficient == 0:
        return loss
    assert batch.reference_N is not None, "the algorithm asked for a reference, the batch has none"
    divergence_N = kl_divergence(batch.logprobs_N - batch.reference_N, estimator=kl.estimator)
    return replace(loss, loss_N=loss.loss_N + kl.coefficient * divergence_N)


def token_rewards(view: TokenView, *, kl: ReferenceKl | None) -> list[float]:
    """Reward of each token of the sample; D is of the policy at the batch's start."""
    rewards = [0.0] * sum(turn.tokens for turn in view.turns)
    rest, end = view.reward, 0
    for turn in view.turns:
        end += turn.tokens
        if turn.reward is not None:
            rewards[max(end - 1, 0)] += turn.reward
            rest -= turn.reward
    rewards[-1] += rest
    if kl is None or kl.coefficient == 0:
        return rewards
    assert view.proximal_N is not None, "the divergence needs the policy's log-probs"
    assert view.reference_N is not None, "the divergence needs the reference's log-probs"
    proximal_N, reference_N = (torch.tensor(row, dtype=torch.float64) for row in (view.proximal_N, view.reference_N))
    divergences: list[float] = kl_divergence(proximal_N - reference_N, estimator=kl.estimator).tolist()
    return [reward - kl.coefficient * divergence for reward, divergence in zip(rewards, divergences, strict=True)]


def normalised(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """All numbers with mean 0 and standard deviation 1 over all of them together."""
    flat = [number for row in rows for number in row]
    if not flat:
        return [[] for _ in rows]
    mean = statistics.fmean(flat)
    scale = statistics.fmean((number - mean) ** 2 for number in flat) ** 0.5 + _STD_FLOOR
    return [[(number - mean) / scale for number in row] for row in rows]
