"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): another group takes the place of one whose rewards are all equal.

Such a group has advantages of zero and teaches nothing. With n = maxDrawsPerStep and B groups a step, at most (n - 1) * B groups are dropped
while one step is filled; with the B that it takes, n batches are scored for a step. After that every group is taken, so every step gets its B
groups, and the run plans at most n * B * steps. The count starts with the scheduler's process: each restart may add (n - 1) * B drops, and
restarts are bounded.
"""

from collections.abc import Iterable, Sequence

from streamrl_workers.scheduler.model import GroupEvent


class ZeroVarianceFilter:
    """Drops groups with equal rewards: a `GroupFilter`."""

    reason = GroupEvent.ZERO_VARIANCE

    def __init__(self, *, draws_per_step: int, batch_groups: int) -> None:
        """`draws_per_step`: maximum batches scored for one step; 1 drops nothing."""
        self._limit = (draws_per_step - 1) * batch_groups
        self._step = 0
        self._dropped = 0

    def drops(self, rewards: Sequence[float | None], *, step: int) -> bool:
        """Return whether to drop a group with these rewards (None: no reward) while `step` is filled, and count the drop."""
        if step != self._step:
            self._step, self._dropped = step, 0
        if self._dropped >= self._limit or not all_equal(rewards):
            return False
        self._dropped += 1
        return True


def all_equal(rewards: Iterable[float | None]) -> bool:
    """Return whether all samples that have a reward have the same one."""
    return len({reward for reward in rewards if reward is not None}) <= 1
