"""Group relative policy optimisation on streamed, possibly stale samples.

Advantage of sample i of a group (DeepSeekMath, arXiv 2402.03300, section 4.1.2), over the samples with a reward:

    A_i = (R_i - mean(R)) / (std(R) + 1e-6)        std over the group, not the sample estimate; without it: A_i = R_i - mean(R)

The loss of a token is the clipped surrogate (`objective.py`), by default on the ratio to the *behaviour* policy (the
generator's own log-prob of the token under whatever version drew it), which makes it the importance correction for
stale and mismatched samples; plus beta times the divergence from the initial model where the job asks for it (eq. 3).
"""

import statistics
from collections.abc import Sequence

from streamrl_workers.trainer.algorithms.algorithm import (
    AlgorithmSetup,
    GroupAlgorithm,
    RewardedSample,
    TokenBatch,
    TokenLoss,
)
from streamrl_workers.trainer.algorithms.objective import clipped_surrogate, with_divergence

_STD_FLOOR = 1e-6
"""Keeps the division finite; a group of equal rewards has advantages of exactly zero."""


class GroupSurrogate(GroupAlgorithm):
    """What the algorithms of groups share: clipped surrogate, divergence in the loss, advantages relative to the group."""

    normalize_std = False

    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """A_i of each sample."""
        return group_relative([sample.reward for sample in samples], normalize_std=self.normalize_std)

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        loss = clipped_surrogate(batch, clip=self._clip, correction=self._correction)
        return with_divergence(loss, batch=batch, kl=self.reference_kl)


class Grpo(GroupSurrogate):
    """The algorithm with the job's constants."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.aggregation = setup.spec.aggregation
        self.normalize_std = setup.spec.normalize_std


class DrGrpo(GroupSurrogate):
    """GRPO done right (arXiv 2503.20783, section 3.2): without the length and difficulty biases.

        A_i = R_i - mean(R)                                    no division by the group's deviation
        loss = (1 / (samples x maxTokens)) sum_i sum_t L_it    no division by a sequence's length

    The constant is that of the paper's code (`masked_sum` over the generation budget): groupSize x batchGroups x `maxTokens`
    of the sampling, whatever lengths came out. L is GRPO's.
    """

    aggregation = "FixedLength"


def group_relative(rewards: Sequence[float | None], *, normalize_std: bool) -> list[float | None]:
    """Rewards relative to their group's mean, in its standard deviations if asked for; None where there is no reward."""
    known = [reward for reward in rewards if reward is not None]
    if not known or min(known) == max(known):  # equal rewards: exact zeros, whatever the mean rounds to
        return [None if reward is None else 0.0 for reward in rewards]
    mean = statistics.fmean(known)
    scale = statistics.pstdev(known, mean) + _STD_FLOOR if normalize_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
