"""Decoupled clip and dynamic sampling policy optimisation (arXiv 2503.14476).

GRPO's advantages and surrogate with four changes: a higher upper bound of the clip (eq. 10), the mean over all tokens of
the step instead of over sequences (eq. 12), no groups of equal rewards (dynamic sampling: done by the scheduler, before
groups arrive here), and a soft punishment of overlong completions, added to the reward (eq. 13). With L = `maxTokens`, B =
`bufferTokens` and y the tokens of the sample's longest turn:

    R'(y) = R + penalty * min(0, max(-1, (L - B - y) / B))
"""

from collections.abc import Sequence
from dataclasses import replace

from streamrl.spec.training import Dapo, Overlong
from streamrl_workers.trainer.algorithms.corrections import Corrector
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate
from streamrl_workers.trainer.algorithms.rule import Outcome


class DecoupledClip(GroupSurrogate):
    """The rule with the job's constants."""

    def __init__(self, spec: Dapo, *, correction: Corrector, max_tokens: int) -> None:
        super().__init__(spec, correction=correction, aggregation="TokenMean", normalize_std=True)
        self._overlong = spec.overlong
        self._max_tokens = max_tokens

    def advantages(self, outcomes: Sequence[Outcome]) -> list[float | None]:
        """A_i of each sample, from the punished rewards."""
        overlong = self._overlong
        if overlong is not None:
            outcomes = [_punished(o, overlong=overlong, max_tokens=self._max_tokens) for o in outcomes]
        return super().advantages(outcomes)


def _punished(outcome: Outcome, *, overlong: Overlong, max_tokens: int) -> Outcome:
    if outcome.reward is None:
        return outcome
    longest = max((turn.tokens for turn in outcome.turns), default=0)
    share = (max_tokens - overlong.buffer_tokens - longest) / overlong.buffer_tokens
    return replace(outcome, reward=outcome.reward + overlong.penalty * min(0.0, max(-1.0, share)))
