"""Trajectory balance with asynchrony (TBA, arXiv 2503.18929), its partition function estimated in the group (VarGrad).

Of the K samples y_j of a prompt, with log pi(y) the sum over all tokens that the model drew, r the reward, beta > 0:

    log Z = mean_j (log reference(y_j) - log pi(y_j) + r_j / beta)                       without gradient
    L = mean over samples of (log Z + log pi(y_j) - log reference(y_j) - r_j / beta)^2

L is least where pi is proportional to reference exp(r / beta), whichever policy drew the samples. So there are no ratios, no clip and
no correction, and samples may be trained again. The loss is beta / 2 L: its gradient, where a step's updates begin, is

    - mean of A_j grad log pi(y_j),      A_j = R_j - mean_j R_j,      R = r - beta (log pi - log reference)

so learning rates mean what they do in other algorithms. With pi_0 the policy of that start, the bracket is
log pi - log pi_0 - A / beta. Later updates of the step move pi; log Z stays. Where a sample has several contexts, each of them has a
bracket, with the sample's A: the gradient where updates begin is the same.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from streamrl.spec.algorithm import TbaSpec
from streamrl_workers.trainer.algorithms.algorithm import (
    AlgorithmSetup,
    BatchAlgorithm,
    TokenBatch,
    TokenLoss,
    TokenValues,
    TokenView,
)
from streamrl_workers.trainer.algorithms.corrections import sequence_sums


class Tba(BatchAlgorithm):
    """The algorithm with the job's constants."""

    aggregation = "SequenceSum"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        spec: TbaSpec = setup.spec
        self._beta = spec.beta

    def values(self, views: Sequence[TokenView]) -> list[TokenValues]:
        """A_j, at each token of sample j."""
        rewards = [self._pulled(view) for view in views]
        groups: defaultdict[int, list[float]] = defaultdict(list)
        for view, reward in zip(views, rewards, strict=True):
            groups[view.group_id].append(reward)
        means = {group_id: math.fsum(members) / len(members) for group_id, members in groups.items()}
        return [
            TokenValues(advantages_N=[reward - means[view.group_id]] * sum(turn.tokens for turn in view.turns))
            for view, reward in zip(views, rewards, strict=True)
        ]

    def _pulled(self, view: TokenView) -> float:
        """R of the sample."""
        assert view.proximal_N is not None, "trajectory balance needs the policy's log-probs"
        assert view.reference_N is not None, "trajectory balance needs the reference's log-probs"
        return view.reward - self._beta * (math.fsum(view.proximal_N) - math.fsum(view.reference_N))

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """Of each token an equal share of its sequence's."""
        moved_N = sequence_sums(batch.logprobs_N - batch.proximal_N, sequences_N=batch.sequences_N)
        tokens_N = sequence_sums(torch.ones_like(batch.proximal_N), sequences_N=batch.sequences_N)
        error_N = moved_N - batch.advantages_N / self._beta
        return TokenLoss.unclipped(self._beta / 2.0 * error_N.square() / tokens_N)
