"""Dynamic sampling: whether a scored group is used, or dropped because its rewards are all equal.

A group whose rewards are all equal has advantages of zero and teaches nothing (DAPO, arXiv 2503.14476,
section 3.2): another one takes its place. Owns this decision and the count of drops of the step that is
being filled. Does not own dropping (`production.py`).

With n = maxDrawsPerStep and B groups a step, at most (n - 1) * B groups are dropped while one step is
filled; with the B that it takes, n batches are scored for a step. After that every group is taken: so every
step gets its B groups, and the whole run plans at most n * B * steps. The count begins anew with the
scheduler's process: each restart may add (n - 1) * B drops, and restarts are bounded.
"""

from collections.abc import Iterable


class DynamicSampling:
    """The draws of the step that is being filled."""

    def __init__(self, *, draws_per_step: int, batch_groups: int) -> None:
        """`draws_per_step`: batches that may be scored for one step; 1 drops nothing."""
        self._limit = (draws_per_step - 1) * batch_groups
        self._step = 0
        self._dropped = 0

    def drops(self, rewards: Iterable[float | None], *, step: int) -> bool:
        """Whether to drop a group with these rewards (None: no reward) while `step` is filled; counts the drop."""
        if step != self._step:
            self._step, self._dropped = step, 0
        if self._dropped >= self._limit or not all_equal(rewards):
            return False
        self._dropped += 1
        return True


def all_equal(rewards: Iterable[float | None]) -> bool:
    """Whether all samples that have a reward have the same one."""
    return len({reward for reward in rewards if reward is not None}) <= 1
