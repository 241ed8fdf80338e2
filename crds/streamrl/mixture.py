"""Which task a prompt is of, where a job trains on several: exact shares from the prompt's index alone.

A period has as many prompts as the weights add up to, W. Prompt i goes, of the tasks that it would not put a whole prompt
ahead of their share, to the one whose next prompt is due first: prompt n + 1 of weight w is due by (n + 1) * W / w.

Invariants: behind W prompts each task has had exactly its weight, and before it is never a whole prompt ahead of its share nor
behind: these are unit jobs, each with a release and a deadline, on one machine, for which earliest-deadline-first is exact. Pure.
"""

from collections.abc import Sequence
from fractions import Fraction


class Mixture:
    """Tasks by their place, prompts by their index in the mixture."""

    def __init__(self, weights: Sequence[int]) -> None:
        """`weights`: of each task, at least 1."""
        self._weights = tuple(weights)
        self.period = sum(weights)
        """W: prompts until the shares are exact."""
        counts = [0] * len(weights)
        self._places: list[tuple[int, int]] = []
        for index in range(self.period):
            may = [task for task, weight in enumerate(weights) if counts[task] * self.period < (index + 1) * weight]
            task = min(may, key=lambda one: Fraction(counts[one] + 1, weights[one]))
            self._places.append((task, counts[task]))
            counts[task] += 1

    def task_of(self, index: int) -> int:
        """Place of the task that prompt `index` is of."""
        return self._places[index % self.period][0]

    def place(self, index: int) -> tuple[int, int]:
        """Place of the task, and index of the prompt among the task's own."""
        number, position = divmod(index, self.period)
        task, before = self._places[position]
        return task, number * self._weights[task] + before

    def size(self, sizes: Sequence[int | None]) -> int | None:
        """Prompts until the first task has no more; `sizes`: of each, None = endless."""
        ends = [self._index(task, size) for task, size in enumerate(sizes) if size is not None]
        return min(ends, default=None)

    def _index(self, task: int, own: int) -> int:
        """In the mixture, of a task's own prompt."""
        number, before = divmod(own, self._weights[task])
        return number * self.period + self._places.index((task, before))
