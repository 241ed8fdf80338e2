"""Proximal policy optimisation (arXiv 1707.06347) with a critic and generalised advantages (arXiv 1506.02438, eq. 16).

With r_t as in `token_rewards.py` and V(t) the critic's value of the text before token t (0 behind the last):

    delta_t = r_t + discount V(t + 1) - V(t)
    A_t = delta_t + discount lambda A_{t+1}         then normalised over all tokens of the batch
    return_t = A_t + V(t)                            of the A_t before they are normalised

The policy's loss is the clipped surrogate, the mean over the tokens of the update. The critic's loss is in
`engines/critic.py`; it learns alone in the first `warmUpSteps` steps.
"""

from collections.abc import Sequence

from streamrl.spec.training import Ppo
from streamrl_workers.trainer.algorithms.corrections import Corrector
from streamrl_workers.trainer.algorithms.rule import BatchRule, Estimate, TokenBatch, TokenLoss, Track
from streamrl_workers.trainer.algorithms.surrogate import clipped_surrogate
from streamrl_workers.trainer.algorithms.token_rewards import normalised, token_rewards


class Proximal(BatchRule):
    """The rule with the job's constants."""

    aggregation = "TokenMean"

    def __init__(self, spec: Ppo, *, correction: Corrector) -> None:
        self.reference_kl = spec.reference_kl
        self.critic = spec.critic
        self.epochs, self.mini_batches = spec.epochs, spec.mini_batches
        self._spec = spec
        self._correction = correction

    def estimates(self, tracks: Sequence[Track]) -> list[Estimate]:
        """A_t and return_t of every token."""
        raw, returns = [], []
        for track in tracks:
            assert track.values_N is not None, "generalised advantages need values"
            rewards = token_rewards(track, kl=self.reference_kl)
            row = generalised(
                rewards, values=track.values_N, discount=self._spec.discount, gae_lambda=self._spec.gae_lambda
            )
            raw.append(row)
            returns.append([advantage + value for advantage, value in zip(row, track.values_N, strict=True)])
        return [Estimate(advantages_N=a, returns_N=r) for a, r in zip(normalised(raw), returns, strict=True)]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token; the divergence is in the rewards."""
        return clipped_surrogate(batch, clip=self._spec, correction=self._correction)


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
