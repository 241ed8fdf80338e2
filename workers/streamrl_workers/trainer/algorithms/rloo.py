"""REINFORCE leave-one-out (arXiv 2402.14740, section 2.2; Kool et al. 2019).

Of the k samples of a group that have a reward, each has the mean of the others as its baseline:

    A_i = R_i - (1 / (k - 1)) sum_{j != i} R_j = k / (k - 1) (R_i - mean(R))

A lone sample has no baseline and an advantage of zero. The paper's unit is the whole completion, so the loss of a
sequence is the *sum* over its tokens (its gradient is A_i grad log pi(completion)); the ratio, clip and correction of
GRPO make it hold for stale samples too.
"""

from collections.abc import Sequence

from streamrl_workers.trainer.algorithms.algorithm import RewardedSample
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate


class Rloo(GroupSurrogate):
    """The algorithm with the job's constants."""

    aggregation = "SequenceSum"

    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """A_i of each sample."""
        relative = super().advantages(samples)
        known = sum(advantage is not None for advantage in relative)
        scale = known / (known - 1) if known > 1 else 0.0
        return [None if advantage is None else scale * advantage for advantage in relative]
