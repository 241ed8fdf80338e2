"""Rewards of single tokens, for rules that look at the whole batch. Pure.

A turn's reward is on the turn's last token; what the sample's reward holds beyond its turns' is on the sample's last token.
The divergence from the initial model is taken off each token's reward: r_t -= beta D(t), D of the policy at the batch's start.
What an environment answered is no token here: returns and advantages pass over it.
"""

import statistics
from collections.abc import Sequence

import torch

from streamrl.spec.training import ReferenceKl
from streamrl_workers.trainer.algorithms.divergence import divergence
from streamrl_workers.trainer.algorithms.rule import Track

_STD_FLOOR = 1e-8
"""Keeps the division finite where all advantages are equal."""


def token_rewards(track: Track, *, kl: ReferenceKl | None) -> list[float]:
    """r_t of each token of the sample."""
    rewards: list[float] = []
    rest = track.reward
    for turn in track.turns:
        rewards += [0.0] * turn.tokens
        if turn.reward is not None and rewards:
            rewards[-1] += turn.reward
            rest -= turn.reward
    rewards[-1] += rest
    if kl is None or kl.coefficient == 0:
        return rewards
    return [reward - kl.coefficient * pull for reward, pull in zip(rewards, _divergences(track, kl=kl), strict=True)]


def normalised(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """All numbers with mean 0 and standard deviation 1 over all of them together."""
    flat = [value for row in values for value in row]
    if not flat:
        return [[] for _ in values]
    mean = statistics.fmean(flat)
    scale = statistics.fmean((value - mean) ** 2 for value in flat) ** 0.5 + _STD_FLOOR
    return [[(value - mean) / scale for value in row] for row in values]


def _divergences(track: Track, *, kl: ReferenceKl) -> list[float]:
    assert track.proximal_N is not None, "the divergence needs the policy's log-probs"
    assert track.reference_N is not None, "the divergence needs the reference's log-probs"
    log_ratio_N = torch.tensor(track.proximal_N, dtype=torch.float64) - torch.tensor(
        track.reference_N, dtype=torch.float64
    )
    pulls: list[float] = divergence(log_ratio_N, estimator=kl.estimator).tolist()
    return pulls
