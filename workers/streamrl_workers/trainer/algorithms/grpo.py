"""Group relative policy optimisation on streamed, possibly stale samples.

Advantage of sample i of a group (DeepSeekMath, arXiv 2402.03300, section 4.1.2), over the samples with a reward:

    A_i = (R_i - mean(R)) / (std(R) + 1e-6)        std over the group, not the sample estimate; without it: A_i = R_i - mean(R)

The loss of a token is the clipped surrogate (`surrogate.py`), by default on the ratio to the *behaviour* policy (the
generator's own log-prob of the token under whatever version drew it), which makes it the importance correction for
stale and mismatched samples; plus beta times the divergence from the initial model where the job asks for it (eq. 3).
"""

import statistics
from collections.abc import Sequence

from streamrl.spec.training import Clip, Grpo
from streamrl_workers.trainer.algorithms.corrections import Corrector
from streamrl_workers.trainer.algorithms.rule import Aggregation, GroupRule, Outcome, TokenBatch, TokenLoss
from streamrl_workers.trainer.algorithms.surrogate import clipped_surrogate, with_divergence

_STD_FLOOR = 1e-6
"""Keeps the division finite; a group of equal rewards has advantages of exactly zero."""


class GroupSurrogate(GroupRule):
    """What the rules of groups share: clipped surrogate, divergence in the loss, advantages relative to the group."""

    def __init__(
        self, clip: Clip, *, correction: Corrector, aggregation: Aggregation, normalize_std: bool = False
    ) -> None:
        self.aggregation = aggregation
        self.reference_kl = clip.reference_kl
        self._clip = clip
        self._correction = correction
        self._normalize_std = normalize_std

    def advantages(self, outcomes: Sequence[Outcome]) -> list[float | None]:
        """A_i of each sample."""
        return group_relative([outcome.reward for outcome in outcomes], normalize_std=self._normalize_std)

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """L of each token."""
        loss = clipped_surrogate(batch, clip=self._clip, correction=self._correction)
        return with_divergence(loss, batch=batch, kl=self.reference_kl)


class GroupRelative(GroupSurrogate):
    """The rule with the job's constants."""

    def __init__(self, spec: Grpo, *, correction: Corrector) -> None:
        super().__init__(spec, correction=correction, aggregation=spec.aggregation, normalize_std=spec.normalize_std)


def group_relative(rewards: Sequence[float | None], *, normalize_std: bool) -> list[float | None]:
    """Rewards relative to their group's mean, in its standard deviations if asked for; None where there is no reward."""
    known = [reward for reward in rewards if reward is not None]
    if not known or min(known) == max(known):  # equal rewards: exact zeros, whatever the mean rounds to
        return [None if reward is None else 0.0 for reward in rewards]
    mean = statistics.fmean(known)
    scale = statistics.pstdev(known, mean) + _STD_FLOOR if normalize_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
