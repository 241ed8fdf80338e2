"""What a step measures on its forward passes: sums on the device, brought over once, added up over the ranks.

Owns: which sums, how they become metrics (sums and counts, no mean of means). A ratio without tokens is 0 and
`forward_tokens` says that nothing was measured. The key set is the same for every rule.
"""

from collections.abc import Sequence

import torch

from streamrl_workers.trainer.algorithms.divergence import Estimator, divergence
from streamrl_workers.trainer.algorithms.rule import TokenBatch, TokenLoss

_SUMS = (
    "ratio",
    "clipped",
    "kl",
    "entropy",
    "mismatch",
    "fresh",
    "tokens",
    "weight",
    "masked",
    "reference_kl",
)
_LOSSES = ("loss", "value_loss")
"""Sums of an update until it ends, then scaled as its gradient."""


class StepSums:
    """Sums over the trained tokens of this rank's forward passes; a token that several updates see counts each time."""

    def __init__(self, device: torch.device, *, estimator: Estimator) -> None:
        self._estimator = estimator
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._ratio_max = torch.zeros((), device=device)
        self._open = torch.zeros(len(_LOSSES), dtype=torch.float64, device=device)
        self._closed = torch.zeros_like(self._open)

    @torch.no_grad()
    def add(self, tokens: TokenBatch, *, loss: TokenLoss, entropy_N: torch.Tensor, fresh_N: torch.Tensor) -> None:
        """Count one forward pass."""
        if not len(tokens.logprobs_N):
            return
        log_ratio_N = tokens.logprobs_N.detach() - tokens.behaviour_N
        ratio_N = log_ratio_N.exp()
        reference_kl = torch.zeros((), device=ratio_N.device)
        if tokens.reference_N is not None:
            reference_kl = divergence(tokens.logprobs_N - tokens.reference_N, estimator=self._estimator).sum()
        parts = (
            ratio_N.sum(),
            loss.clipped_N.sum(),
            (ratio_N - 1.0 - log_ratio_N).sum(),  # K3 the other way round: tokens are the behaviour's
            entropy_N.sum(),
            ((tokens.proximal_N - tokens.behaviour_N).abs() * fresh_N).sum(),  # later updates move the policy, not this
            fresh_N.sum(),
            torch.tensor(len(ratio_N), device=ratio_N.device),
            loss.weight_N.sum(),
            (loss.weight_N == 0).sum(),
            reference_kl,
        )
        self._sums += torch.stack([part.double() for part in parts])
        self._ratio_max = torch.maximum(self._ratio_max, ratio_N.max())

    @torch.no_grad()
    def add_losses(self, *, loss: torch.Tensor, value_loss: torch.Tensor) -> None:
        """Weighed sums of one forward pass."""
        self._open += torch.stack([loss.double(), value_loss.double()])

    def end_update(self, *, scale: float, critic_scale: float) -> None:
        """The losses so far were one update's."""
        scales = torch.tensor([scale, critic_scale], dtype=torch.float64, device=self._open.device)
        self._closed += self._open * scales
        self._open.zero_()

    def raw(self) -> list[float]:
        """The numbers that `metrics` takes."""
        return [*self._sums.tolist(), *self._closed.tolist(), float(self._ratio_max)]


def metrics(ranks: Sequence[Sequence[float]], *, updates: int) -> dict[str, float]:
    """The step's numbers from every rank's sums; losses are means over the updates."""
    *columns, maxima = zip(*ranks, strict=True)
    sums = dict(zip((*_SUMS, *_LOSSES), map(sum, columns), strict=True))
    tokens = max(1.0, sums["tokens"])
    return {
        "loss": sums["loss"] / updates,
        "value_loss": sums["value_loss"] / updates,
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": max(maxima),
        "clip_fraction": sums["clipped"] / tokens,
        "behaviour_kl": sums["kl"] / tokens,
        "reference_kl": sums["reference_kl"] / tokens,
        "correction_weight_mean": sums["weight"] / tokens,
        "masked_fraction": sums["masked"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "mismatch": sums["mismatch"] / max(1.0, sums["fresh"]),
        "forward_tokens": sums["tokens"],
    }
