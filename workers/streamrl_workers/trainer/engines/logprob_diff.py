"""Sums of the trainer's against the generator's log-probs, by pool and version lag (`metrics/logprob_diff.py`), over a rank's forward passes.

With d = log proximal(t) - log mu(t), where mu is what the generator said of the token when it drew it and proximal the trainer's own
policy at the start of the step's updates (later updates move the policy, not this), over the tokens t:

    mean    sum |d| / tokens        max    max |d|        kl    sum (exp(d) - 1 - d) / tokens    (K3 of KL(mu || proximal))

A token that several updates see counts each time.
"""

from collections.abc import Sequence

import torch

from streamrl_workers.metrics.logprob_diff import CLIPPED, LAGS, key, pool_lag, pool_lags
from streamrl_workers.trainer.algorithms.algorithm import TokenBatch, TokenLoss
from streamrl_workers.trainer.engines.packing import PackedSample

_TOKEN_SUMS, _SEQUENCE_SUMS = 4, 2
"""Columns: tokens, |d|, K3, clipped tokens; then sequences, sequences outside the clip; then the largest |d|."""

DIFFS = ("train_infer_logprob_diff_mean", "train_infer_logprob_diff_max", "train_infer_logprob_diff_kl")
"""What is said of all samples of lag 0 together."""


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
    """The step's numbers from every rank's.

    By pool and lag, where there were tokens; and, always, the differences of all samples of lag 0 together, and the sequences of all lags.
    """
    rows = {at: _added(row) for at, *row in zip(pool_lags(pools), *ranks, strict=True)}
    newest = _measures(_added([row for at, row in rows.items() if at.lag == LAGS[0]]))
    found = {name: value for name, value in newest.items() if name in DIFFS}
    found[CLIPPED] = _measures(_added(list(rows.values())))[CLIPPED]
    for at, row in rows.items():
        if row[0]:
            found |= {key(name, at): value for name, value in _measures(row).items()}
    return found


def _added(rows: Sequence[Sequence[float]]) -> list[float]:
    """One row for several; the last column is a maximum."""
    *sums, maxima = zip(*rows, strict=True)
    return [*map(sum, sums), max(maxima)]


def _measures(row: Sequence[float]) -> dict[str, float]:
    """Of nothing: zeros."""
    tokens, diff, kl, clipped, sequences, outside, largest = row
    return {
        "train_infer_logprob_diff_mean": diff / max(1.0, tokens),
        "train_infer_logprob_diff_max": largest,
        "train_infer_logprob_diff_kl": kl / max(1.0, tokens),
        "train_infer_logprob_diff_tokens": tokens,
        "clip_fraction": clipped / max(1.0, tokens),
        "sequence_clip_fraction": outside / max(1.0, sequences),
    }
