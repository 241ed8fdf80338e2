"""REINFORCE leave-one-out (arXiv 2402.14740, section 2.2; Kool et al. 2019).

Of the k samples of a group that have a reward, each has the mean of the others as its baseline:

    A_i = R_i - (1 / (k - 1)) sum_{j != i} R_j = k / (k - 1) (R_i - mean(R))

A lone sample has no baseline and an advantage of zero. The paper's unit is the whole completion, so the loss of a
sequence is the *sum* over its tokens (its gradient is A_i grad log pi(completion)); the ratio, clip and correction of
GRPO make it hold for stale samples too.
"""

from collections.abc import Sequence

from streamrl.spec.training import Rloo
from streamrl_workers.trainer.algorithms.corrections import Corrector
from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate
from streamrl_workers.trainer.algorithms.rule import Outcome


class LeaveOneOut(GroupSurrogate):
    """The rule with the job's constants."""

    def __init__(self, spec: Rloo, *, correction: Corrector) -> None:
        super().__init__(spec, correction=correction, aggregation="SequenceSum")

    def advantages(self, outcomes: Sequence[Outcome]) -> list[float | None]:
        """A_i of each sample."""
        relative = super().advantages(outcomes)
        known = sum(advantage is not None for advantage in relative)
        scale = known / (known - 1) if known > 1 else 0.0
        return [None if advantage is None else scale * advantage for advantage in relative]
