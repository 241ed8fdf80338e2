"""ArCHer (arXiv 2402.19446): an off-policy critic of whole utterances, and an actor of tokens.

A sample is an episode of utterances a_1 .. a_T, the model's turns; s_k is all that stands before a_k, r_k what it earned (`objective.py`,
summed over its tokens), and the last one is done. The critic has two values Q(s, a) of an utterance and two V(s) of a state; Q' and V'
are those of its copy, which follows it by `targetRate` with each update (section 3.3, and the paper's code):

    L_Q = (Q(s_k, a_k) - r_k - discount V'(s_{k+1}))^2 / 2      V' = 0 behind the last
    L_V = (V(s_k) - Q'(s_k, a))^2 / 2                           each of the pair by its own

L_Q holds for whoever drew a_k: samples of the replay buffer teach it. L_V and the actor need an utterance `a` of the policy in training
at s_k: those of the step's own samples, and with `resample` turns drawn anew at states of the buffer, which have no r. The advantage of each of its tokens is that of the whole utterance:

    A_k = min Q(s_k, a) - min V(s_k)                            of the critic where the step's updates begin

The actor's loss is the clipped surrogate, summed over the tokens of a sample; its gradient, where updates begin, is
- A grad log pi(a | s).
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from streamrl.spec.algorithm import ArcherSpec, ReferenceKl
from streamrl_workers.trainer.algorithms.algorithm import (
    AlgorithmSetup,
    BatchAlgorithm,
    TokenBatch,
    TokenLoss,
    TokenValues,
    TokenView,
)
from streamrl_workers.trainer.algorithms.objective import clipped_surrogate, token_rewards

_HEADS = 4
"""Of each token: V, V of the text before it; Q, Q of the text that ends with it."""


class Archer(BatchAlgorithm):
    """The algorithm with the job's constants."""

    aggregation = "SequenceSum"
    critic_first = True

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        spec: ArcherSpec = setup.spec
        self.critic = spec.critic
        self._discount = spec.discount

    def values(self, views: Sequence[TokenView]) -> list[TokenValues]:
        """A_k at each token of its utterance; what V is to learn at its first token, and Q at its last."""
        return [utterance_values(view, kl=self.reference_kl, discount=self._discount) for view in views]

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token; the divergence is in the rewards."""
        return clipped_surrogate(batch, clip=self._clip, correction=self._correction)


def utterance_values(view: TokenView, *, kl: ReferenceKl | None, discount: float) -> TokenValues:
    """Of one sample."""
    assert view.values_N is not None, "advantages of utterances need values"
    assert view.target_values_N is not None, "a critic of utterances needs its copy's values"
    values, targets = _by_token(view.values_N), _by_token(view.target_values_N)
    rewards = token_rewards(view, kl=kl)
    ends = accumulate((turn.tokens for turn in view.turns if turn.tokens), initial=0)
    advantages_N: list[float] = []
    returns_NH = [[math.nan] * _HEADS for _ in rewards]
    for begin, end in pairwise(ends):
        state, utterance = values[begin][:2], values[end - 1][2:]
        advantages_N += [min(utterance) - min(state)] * (end - begin)
        following = targets[end][:2] if end < len(targets) else (0.0, 0.0)
        earned = math.fsum(rewards[begin:end])
        if not view.resampled:
            returns_NH[end - 1][2:] = [earned + discount * value for value in following]
        if not view.replayed:
            returns_NH[begin][:2] = targets[end - 1][2:]
    return TokenValues(advantages_N=advantages_N, returns_N=[number for row in returns_NH for number in row])


def _by_token(numbers: Sequence[float]) -> list[Sequence[float]]:
    return [numbers[begin : begin + _HEADS] for begin in range(0, len(numbers), _HEADS)]
