"""Implicit Q-learning (IQL, arXiv 2110.06169) of whole utterances: ArCHer's critic (`archer.py`) on a log, and a policy that imitates it.

Nobody asks what an utterance would be worth that the log has not. So V of a state is no mean over a policy's utterances but an upper
expectile over those of the log that follow such a state: nearly the best of them, as `expectile` goes to 1.

    L_Q = (Q(s_k, a_k) - r_k - discount V'(s_{k+1}))^2 / 2                V' = 0 behind the last
    L_V = |expectile - 1(u < 0)| u^2            u = Q'(s_k, a_k) - V(s_k), each of the pair by its own
    w_k = min(exp((min Q(s_k, a_k) - min V(s_k)) / beta), most)           of the critic that has learnt from the step's rows
    L = - sum_k w_k log pi(a_k | s_k) / tokens

With w = 1 this is `supervised.py`. In a log of one utterance each, V is a baseline that is learnt.
"""

from collections.abc import Sequence
from dataclasses import replace

from streamrl.spec.algorithm import CriticWeights
from streamrl_workers.trainer.algorithms.algorithm import (
    AlgorithmSetup,
    BatchAlgorithm,
    TokenBatch,
    TokenLoss,
    TokenValues,
    TokenView,
)
from streamrl_workers.trainer.algorithms.archer import utterance_values
from streamrl_workers.trainer.algorithms.objective import weighed_cross_entropy


class Iql(BatchAlgorithm):
    """The algorithm with the job's constants."""

    aggregation = "TokenMean"
    compares = False
    critic_first = True

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._spec: CriticWeights = setup.spec
        self.critic = self._spec
        self.expectile = self._spec.expectile

    def values(self, views: Sequence[TokenView]) -> list[TokenValues]:
        """w_k at each token of its utterance; what V is to learn at its first token, and Q at its last."""
        found = [utterance_values(view, kl=None, discount=self._spec.discount) for view in views]
        return [
            replace(one, advantages_N=[self._spec.weight(advantage) for advantage in one.advantages_N]) for one in found
        ]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        return weighed_cross_entropy(batch)
