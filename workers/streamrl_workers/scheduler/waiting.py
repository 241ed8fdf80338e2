"""The central queue: groups with samples that wait for a slot.

Owns the order. Two heaps: `open` groups have begun (or a sample of theirs is out), their other
samples go first, the oldest version first, since the staleness rule waits for them; `fresh` groups
go in the order of the dispatch policy. Entries that are out of date are left in the heaps and
skipped, so that every operation is O(log n).
"""

from heapq import heappop, heappush

from streamrl_workers.scheduler.dispatch import Candidate, Key, Policy
from streamrl_workers.scheduler.groups import Group, GroupTable
from streamrl_workers.scheduler.lengths import Lengths

_Heap = list[tuple[Key, int]]


class WaitingGroups:
    """All groups that wait, by policy."""

    def __init__(self, groups: GroupTable, *, policy: Policy, lengths: Lengths, batch_groups: int) -> None:
        self._groups = groups
        self._policy = policy
        self._lengths = lengths
        self._batch_groups = batch_groups
        self._open: _Heap = []
        self._fresh: _Heap = []
        self.samples = 0
        """Samples that wait."""
        self.revision = 0
        """Rises when a group gets a place in the queue."""

    def put(self, group: Group, indices: list[int]) -> None:
        """These samples of the group wait (again); its place follows from its state now."""
        self.samples += len(indices)
        group.waiting.extend(indices)
        self._place(group)

    def replace(self, group: Group) -> None:
        """The group's version has changed: put it where it belongs now."""
        if group.waiting:
            self._place(group)

    def _place(self, group: Group) -> None:
        self.revision += 1
        if group.begun is not None:
            group.entry = ((group.begun,), group.group_id)
            heappush(self._open, group.entry)
        else:
            group.entry = (self._fresh_key(group), group.group_id)
            heappush(self._fresh, group.entry)

    def take(self, group: Group) -> int:
        """The next waiting sample of the group leaves the queue."""
        self.samples -= 1
        return group.waiting.pop()

    def discard(self, group: Group) -> None:
        """The group is dropped."""
        self.samples -= len(group.waiting)
        group.waiting.clear()

    def first_open(self) -> Group | None:
        """The begun group whose sample is next."""
        return self._first(self._open)

    def first_fresh(self) -> Group | None:
        """The group that begins next."""
        return self._first(self._fresh)

    def _first(self, heap: _Heap) -> Group | None:
        while heap:
            group = self._groups.get(heap[0][1])
            if group is not None and group.waiting and group.entry is heap[0]:
                return group
            heappop(heap)
        return None

    def _fresh_key(self, group: Group) -> Key:
        predicted = self._lengths.predict(group.prompt_key).tokens
        return self._policy(
            Candidate(group_id=group.group_id, wave=group.group_id // self._batch_groups, predicted_tokens=predicted)
        )
