"""Maximum likelihood reinforcement learning (MaxRL, arXiv 2602.02710): advantages in units of the group's mean reward.

With M the mean reward of the group's samples that have one:

    A_i = (R_i - M) / M        0 where M is not positive: nothing was solved

The paper's rewards are 0 or 1. The loss is GRPO's clipped surrogate, the mean over the step's samples of their token means.
"""

from collections.abc import Sequence
from typing import ClassVar

from streamrl.spec.algorithm import Clip
from streamrl.spec.base import PluginOptions
from streamrl_workers.trainer.algorithms.algorithm import RewardedSample
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate


class MaxRl(GroupSurrogate):
    """MaxRL with the hyper-parameters of the job."""

    protocol: ClassVar[int] = 1
    aggregation = "SequenceMean"

    class Options(PluginOptions, Clip):
        """Bounds of the clip, and a pull towards the initial model."""

    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """A_i of each sample."""
        known = [sample.reward for sample in samples if sample.reward is not None]
        mean = sum(known) / len(known) if known else 0.0
        return [None if a is None else a / mean if mean > 0 else 0.0 for a in super().advantages(samples)]
