"""Decoupled clip and dynamic sampling policy optimisation (arXiv 2503.14476).

GRPO's advantages and surrogate with four changes: a higher upper bound of the clip (eq. 10), the mean over all tokens of
the step instead of over sequences (eq. 12), no groups of equal rewards (dynamic sampling: done by the scheduler, before
groups arrive here), and a soft punishment of overlong completions, added to the reward (eq. 13). With L = `maxTokens`, B =
`bufferTokens` and y the tokens of the sample's longest turn:

    R'(y) = R + penalty * min(0, max(-1, (L - B - y) / B))
"""

from collections.abc import Sequence
from dataclasses import replace

from streamrl.spec.algorithm import Overlong
from streamrl_workers.trainer.algorithms.algorithm import AlgorithmSetup, RewardedSample
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate


class Dapo(GroupSurrogate):
    """The algorithm with the job's constants."""

    aggregation = "TokenMean"
    normalize_std = True

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._overlong: Overlong | None = setup.spec.overlong
        self._max_tokens = setup.max_tokens

    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """A_i of each sample, from the punished rewards."""
        overlong = self._overlong
        if overlong is not None:
            samples = [_punished(s, overlong=overlong, max_tokens=self._max_tokens) for s in samples]
        return super().advantages(samples)


def _punished(sample: RewardedSample, *, overlong: Overlong, max_tokens: int) -> RewardedSample:
    if sample.reward is None:
        return sample
    longest = max((turn.tokens for turn in sample.turns), default=0)
    share = (max_tokens - overlong.buffer_tokens - longest) / overlong.buffer_tokens
    return replace(sample, reward=sample.reward + overlong.penalty * min(0.0, max(-1.0, share)))
