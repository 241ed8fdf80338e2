"""Proximal policy optimisation (arXiv 1707.06347) with a critic and generalised advantages (arXiv 1506.02438, eq. 16).

With r_t as in `objective.py` and V(t) the critic's value of the text before token t (0 behind the last):

    delta_t = r_t + discount V(t + 1) - V(t)
    A_t = delta_t + discount lambda A_{t+1}         then normalised over all tokens of the batch
    return_t = A_t + V(t)                            of the A_t before they are normalised

The policy's loss is the clipped surrogate, the mean over the tokens of the update. The critic's loss is in
`engines/forward.py`; it learns alone in the first `warmUpSteps` steps.
"""

from collections.abc import Sequence

from streamrl.spec.algorithm import PpoSpec
from streamrl_workers.trainer.algorithms.algorithm import (
    AlgorithmSetup,
    BatchAlgorithm,
    TokenBatch,
    TokenLoss,
    TokenValues,
    TokenView,
)
from streamrl_workers.trainer.algorithms.objective import clipped_surrogate, normalised, token_rewards


class Ppo(BatchAlgorithm):
    """The algorithm with the job's constants."""

    aggregation = "TokenMean"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._spec: PpoSpec = setup.spec
        self.critic = self._spec.critic

    def values(self, views: Sequence[TokenView]) -> list[TokenValues]:
        """A_t and return_t of every token."""
        raw, returns = [], []
        for view in views:
            assert view.values_N is not None, "generalised advantages need values"
            rewards = token_rewards(view, kl=self.reference_kl)
            row = generalised(
                rewards, values=view.values_N, discount=self._spec.discount, gae_lambda=self._spec.gae_lambda
            )
            raw.append(row)
            returns.append([advantage + value for advantage, value in zip(row, view.values_N, strict=True)])
        return [TokenValues(advantages_N=a, returns_N=r) for a, r in zip(normalised(raw), returns, strict=True)]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token; the divergence is in the rewards."""
        return clipped_surrogate(batch, clip=self._clip, correction=self._correction)


def generalised(
    rewards: Sequence[float], *, values: Sequence[float], discount: float, gae_lambda: float
) -> list[float]:
    """A_t of each token."""
    advantages: list[float] = []
    next_advantage = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        next_advantage = reward + discount * next_value - value + discount * gae_lambda * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return advantages[::-1]
