"""REINFORCE++ (arXiv 2501.03262): no critic, advantages normalised over all tokens of the batch.

    r_t = [rewards at the ends of turns] - beta D(t)        (`token_rewards.py`)
    G_t = r_t + discount G_{t+1}
    A_t = (G_t - mean(G)) / std(G)                           mean and std over all tokens of the batch

The loss is PPO's clipped surrogate, the mean over the tokens of the update (section 3).
"""

from collections.abc import Sequence

from streamrl.spec.training import ReinforcePP
from streamrl_workers.trainer.algorithms.corrections import Corrector
from streamrl_workers.trainer.algorithms.rule import BatchRule, Estimate, TokenBatch, TokenLoss, Track
from streamrl_workers.trainer.algorithms.surrogate import clipped_surrogate
from streamrl_workers.trainer.algorithms.token_rewards import normalised, token_rewards


class BatchNormalised(BatchRule):
    """The rule with the job's constants."""

    aggregation = "TokenMean"

    def __init__(self, spec: ReinforcePP, *, correction: Corrector) -> None:
        self.reference_kl = spec.reference_kl
        self.epochs, self.mini_batches = spec.epochs, spec.mini_batches
        self._spec = spec
        self._correction = correction

    def estimates(self, tracks: Sequence[Track]) -> list[Estimate]:
        """A_t of every token."""
        returns = [
            discounted(token_rewards(track, kl=self.reference_kl), discount=self._spec.discount) for track in tracks
        ]
        return [Estimate(advantages_N=row) for row in normalised(returns)]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token; the divergence is in the rewards."""
        return clipped_surrogate(batch, clip=self._spec, correction=self._correction)


def discounted(rewards: Sequence[float], *, discount: float) -> list[float]:
    """G_t of each token."""
    returns: list[float] = []
    total = 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
        returns.append(total)
    return returns[::-1]
