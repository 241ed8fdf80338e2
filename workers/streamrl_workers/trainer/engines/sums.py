"""What a step measures on its forward passes: sums on the device, brought over once.

Owns: which sums, how they become metrics (sums and counts, no mean of means). A ratio without tokens is 0 and
`forward_tokens` says that nothing was measured.
"""

import torch

from streamrl_workers.trainer.algorithms.rule import TokenLoss
from streamrl_workers.trainer.engines.forward import MicroBatch

_SUMS = ("loss", "ratio", "clipped", "kl", "entropy", "mismatch", "fresh", "tokens")


class StepSums:
    """Sums over the completion tokens of a step's forward passes."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._ratio_max = torch.zeros((), device=device)

    @torch.no_grad()
    def add(self, batch: MicroBatch, *, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, loss: TokenLoss) -> None:
        """Count one forward pass."""
        log_ratio_N = logprobs_N.detach() - batch.behaviour_N
        ratio_N = loss.ratio_N
        parts = (
            (loss.loss_N.detach() * batch.weights_N).sum(),
            ratio_N.sum(),
            loss.clipped_N.sum(),
            (
                ratio_N - 1.0 - log_ratio_N
            ).sum(),  # k3 (Schulman, "Approximating KL Divergence"): tokens are the behaviour's
            entropy_N.sum(),
            (log_ratio_N.abs() * batch.fresh_N).sum(),
            batch.fresh_N.sum(),
            torch.tensor(len(ratio_N), device=ratio_N.device),
        )
        self._sums += torch.stack([part.double() for part in parts])
        self._ratio_max = torch.maximum(self._ratio_max, ratio_N.max())

    def metrics(self, *, scale: float) -> dict[str, float]:
        """The step's numbers; `scale` is that of loss and gradient."""
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        tokens = max(1.0, sums["tokens"])
        return {
            "loss": sums["loss"] * scale,
            "ratio_mean": sums["ratio"] / tokens,
            "ratio_max": float(self._ratio_max),
            "clip_fraction": sums["clipped"] / tokens,
            "behaviour_kl": sums["kl"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "mismatch": sums["mismatch"] / max(1.0, sums["fresh"]),
            "forward_tokens": sums["tokens"],
        }
