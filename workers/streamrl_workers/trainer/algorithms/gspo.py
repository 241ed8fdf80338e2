"""Group sequence policy optimisation (arXiv 2507.18071, eq. 5 to 7).

GRPO's advantages, and one ratio for a whole sequence of n tokens, the geometric mean of its tokens' ratios:

    s_i = (pi(y_i) / anchor(y_i))^(1 / n) = exp(mean_t (log pi(t) - anchor(t)))
    loss_i = -w_i min(min(s_i, cap) A_i, clip(s_i, 1 - low, 1 + high) A_i)

Every token carries loss_i, so that the sequence mean of them is loss_i. It is formed by giving GRPO's surrogate each
sequence's mean log-probs in place of its tokens' own: anchors and weights of the correction are then of sequences, too. A weight
of level Token is the geometric mean of the sequence's, one of level Sequence their product.
"""

from dataclasses import replace

import torch

from streamrl_workers.trainer.algorithms.algorithm import AlgorithmSetup, TokenBatch, TokenLoss
from streamrl_workers.trainer.algorithms.corrections import sequence_sums
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate
from streamrl_workers.trainer.algorithms.objective import clipped_surrogate, with_divergence


class Gspo(GroupSurrogate):
    """The algorithm with the job's constants."""

    aggregation = "SequenceMean"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.normalize_std = setup.spec.normalize_std

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """loss_i at each token of sequence i; the divergence stays one of tokens."""
        of_sequences = replace(
            batch,
            logprobs_N=_means(batch.logprobs_N, sequences_N=batch.sequences_N),
            behaviour_N=_means(batch.behaviour_N, sequences_N=batch.sequences_N),
            proximal_N=_means(batch.proximal_N, sequences_N=batch.sequences_N),
        )
        loss = clipped_surrogate(of_sequences, clip=self._clip, correction=self._correction)
        return with_divergence(loss, batch=batch, kl=self.reference_kl)


def _means(values_N: torch.Tensor, *, sequences_N: torch.Tensor) -> torch.Tensor:
    """Each token's value replaced by the mean over its sequence."""
    tokens_N = sequence_sums(torch.ones_like(values_N), sequences_N=sequences_N)
    return sequence_sums(values_N, sequences_N=sequences_N) / tokens_N
