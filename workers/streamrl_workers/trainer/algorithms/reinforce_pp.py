"""REINFORCE++ (arXiv 2501.03262): no critic, advantages normalised over all tokens of the batch.

    r_t = [rewards at the ends of turns] - beta D(t)        (`objective.py`)
    G_t = r_t + discount G_{t+1}
    A_t = (G_t - mean(G)) / std(G)                           mean and std over all tokens of the batch

The loss is PPO's clipped surrogate, the mean over the tokens of the update (section 3).
"""

from collections.abc import Sequence

from streamrl_workers.trainer.algorithms.algorithm import (
    AlgorithmSetup,
    BatchAlgorithm,
    TokenBatch,
    TokenLoss,
    TokenValues,
    TokenView,
)
from streamrl_workers.trainer.algorithms.objective import clipped_surrogate, normalised, token_rewards


class ReinforcePlusPlus(BatchAlgorithm):
    """The algorithm with the job's constants."""

    aggregation = "TokenMean"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._discount: float = setup.spec.discount

    def values(self, views: Sequence[TokenView]) -> list[TokenValues]:
        """A_t of every token."""
        returns = [discounted(token_rewards(view, kl=self.reference_kl), discount=self._discount) for view in views]
        return [TokenValues(advantages_N=row) for row in normalised(returns)]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token; the divergence is in the rewards."""
        return clipped_surrogate(batch, clip=self._clip, correction=self._correction)


def discounted(rewards: Sequence[float], *, discount: float) -> list[float]:
    """G_t of each token."""
    returns: list[float] = []
    total = 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
        returns.append(total)
    return returns[::-1]
