"""Sums of the trainer's against the generator's log-probs, by pool and version lag (`metrics/logprob_diff.py`), over a rank's forward passes.

With d = log proximal(t) - log mu(t), where mu is what the generator said of the token when it drew it and proximal the trainer's own
policy at the start of the step's updates (later updates move the policy, not this), over the tokens t:

    mean    sum |d| / tokens        max    max |d|        kl    sum (exp(d) - 1 - d) / tokens    (K3 of KL(mu || proximal))

A token that several updates see counts each time.
"""

from collections.abc import Sequence

import torch

from streamrl_workers.metrics.logprob_diff import CLIPPED, PoolLag, key, pool_lag, pool_lags
from streamrl_workers.trainer.algorithms.algorithm import TokenBatch, TokenLoss
from streamrl_workers.trainer.engines.packing import PackedSample

_TOKEN_SUMS, _SEQUENCE_SUMS = 4, 2
"""Columns: tokens, |d|, K3, clipped tokens; then sequences, sequences outside the clip; then the largest |d|."""


class LogprobDiff:
    """One row for each pair of pool and lag."""

    def __init__(self, device: torch.device, *, pools: Sequence[str]) -> None:
        self._pools = pools
        self._rows = {at: row for row, at in enumerate(pool_lags(pools))}
        self._sums = torch.zeros(len(self._rows), _TOKEN_SUMS + _SEQUENCE_SUMS, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(self._rows), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, tokens: TokenBatch, *, loss: TokenLoss, samples: Sequence[PackedSample]) -> None:
        """Count one forward pass of `samples`."""
        if not len(tokens.logprobs_N):
            return
        d_N = (tokens.proximal_N - tokens.behaviour_N).double()
        ones_N = torch.ones_like(d_N)
        rows_B = torch.tensor([self._row(sample) for sample in samples], device=d_N.device)
        rows_N = rows_B[tokens.sequences_N]
        columns = torch.stack([ones_N, d_N.abs(), torch.expm1(d_N) - d_N, loss.clipped_N.double()], dim=1)
        self._sums[:, :_TOKEN_SUMS].index_add_(0, rows_N, columns)
        self._maxima.scatter_reduce_(0, rows_N, d_N.abs(), "amax")
        counts_B = d_N.new_zeros(len(samples)).index_add(0, tokens.sequences_N, ones_N)
        outside_B = d_N.new_zeros(len(samples)).index_add(0, tokens.sequences_N, loss.outside_N.double())
        trained_B = counts_B > 0
        sequences = torch.stack([trained_B, trained_B & (outside_B == counts_B)], dim=1).double()
        self._sums[:, _TOKEN_SUMS:].index_add_(0, rows_B, sequences)

    def _row(self, sample: PackedSample) -> int:
        return self._rows[pool_lag(sample.generator_id, lag=sample.version_lag, pools=self._pools)]

    def raw(self) -> list[list[float]]:
        """The numbers that `logprob_diff_metrics` takes."""
        return [[*sums, largest] for sums, largest in zip(self._sums.tolist(), self._maxima.tolist(), strict=True)]


def logprob_diff_metrics(ranks: Sequence[Sequence[Sequence[float]]], *, pools: Sequence[str]) -> dict[str, float]:
    """The step's numbers from every rank's; `sequence_clip_fraction` over all samples too."""
    found: dict[str, float] = {}
    sequences = outside = 0.0
    for at, *rows in zip(pool_lags(pools), *ranks, strict=True):
        *sums, maxima = zip(*rows, strict=True)
        row = [sum(column) for column in sums]
        sequences, outside = sequences + row[4], outside + row[5]
        if row[0]:
            found |= _of(at, row, largest=max(maxima))
    return {CLIPPED: outside / max(1.0, sequences)} | found


def _of(at: PoolLag, sums: Sequence[float], *, largest: float) -> dict[str, float]:
    tokens, diff, kl, clipped, sequences, outside = sums
    return {
        key("train_infer_logprob_diff_mean", at): diff / tokens,
        key("train_infer_logprob_diff_max", at): largest,
        key("train_infer_logprob_diff_kl", at): kl / tokens,
        key("train_infer_logprob_diff_tokens", at): tokens,
        key("clip_fraction", at): clipped / tokens,
        key("sequence_clip_fraction", at): outside / sequences,
    }
