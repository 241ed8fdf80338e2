"""The central queue: groups with samples that wait for a slot.

Keeps the order in force. `open` groups have begun (or a sample of theirs is out), their other samples go first, the
oldest version first, since the staleness rule waits for them; `fresh` groups go by the order; of both, those of the two
length pools apart. Entries that are out of date are left in the heaps and skipped, so that every operation is O(log n);
a new order sorts again what waits.

Owns what was predicted of each group when it began to wait, and which batch was last planned whole.
"""

from dataclasses import replace
from heapq import heapify, heappop, heappush

from streamrl_workers.scheduler.dispatch import Candidate, Key, Order
from streamrl_workers.scheduler.groups.table import Group, GroupTable
from streamrl_workers.scheduler.lengths import Lengths

_Heap = list[tuple[Key, int]]


class WaitingGroups:
    """All groups that wait, in order."""

    def __init__(self, groups: GroupTable, *, order: Order, lengths: Lengths, batch_groups: int) -> None:
        self._groups = groups
        self._lengths = lengths
        self._batch_groups = batch_groups
        self._open: dict[bool, _Heap] = {False: [], True: []}
        self._fresh: dict[bool, _Heap] = {False: [], True: []}
        """By whether they are of the long pool."""
        self._candidates: dict[int, Candidate] = {}
        """By group: what was predicted when it first waited; until it is in a step's record or in an older batch."""
        self._aside: list[Group] = []
        self._batch_sizes: dict[int, int] = {}
        """Batch index -> groups of it that have waited, until it is whole."""
        self._whole_batch: int | None = None
        self.order = order
        self.samples = 0
        """Samples that wait."""
        self.revision = 0
        """Rises when a group gets a place in the queue."""
        self.batches = 0
        """Rises when the first group of all waits, and when a batch has been planned whole: moments for an order."""

    # ---- groups come and go

    def put(self, group: Group, indices: list[int]) -> None:
        """These samples of the group wait (again); its place follows from its state now."""
        self.samples += len(indices)
        group.waiting.extend(indices)
        self._place(group)

    def replace(self, group: Group) -> None:
        """The group's version has changed: put it where it belongs now."""
        if group.waiting:
            self._place(group)

    def take(self, group: Group) -> int:
        """The next waiting sample of the group leaves the queue."""
        self.samples -= 1
        return group.waiting.pop()

    def discard(self, group: Group) -> None:
        """The group is dropped."""
        self.samples -= len(group.waiting)
        group.waiting.clear()

    # ---- who is next

    def first_open(self, *, long: bool) -> Group | None:
        """The begun group of this pool whose sample is next."""
        return self._first(self._open[long])

    def first_fresh(self, *, long: bool) -> Group | None:
        """The group of this pool that begins next."""
        return self._first(self._fresh[long])

    def set_aside(self, group: Group) -> None:
        """Pass a fresh group over, until `put_back`."""
        group.entry = None
        self._aside.append(group)

    def put_back(self) -> None:
        """What was passed over is where it was."""
        for group in self._aside:
            heappush(self._heap_of(group), self._entry(group))
        self._aside.clear()

    # ---- orders

    def adopt(self, order: Order) -> None:
        """This order is in force now."""
        heaps = [*self._open.values(), *self._fresh.values()]
        waiting = [self._groups[group_id] for heap in heaps for group_id in self._valid(heap)]
        self.order = order
        self.revision += 1
        self._open, self._fresh = {False: [], True: []}, {False: [], True: []}
        for group in waiting:
            self._heap_of(group).append(self._entry(group))
        for heap in [*self._open.values(), *self._fresh.values()]:
            heapify(heap)

    def predict_again(self) -> None:
        """Signals have won or lost trust: groups of which nothing is out are predicted by those that are trusted now."""
        for group_id in [group_id for heap in self._fresh.values() for group_id in self._valid(heap)]:
            group = self._groups[group_id]
            known = self._candidate(group)
            self._candidates[group_id] = self._predicted(known, group)

    def batch(self) -> list[Candidate]:
        """What an order is made for: the newest batch that was planned whole, as it was planned, and what waits before it.

        As long as none is whole, all that is known. In the order of planning.
        """
        newest = self._whole_batch
        waiting = {group_id for heap in self._fresh.values() for group_id in self._valid(heap)}
        found = (
            candidate
            for group_id, candidate in self._candidates.items()
            if newest is None or candidate.batch == newest or (candidate.batch < newest and group_id in waiting)
        )
        return sorted(found, key=lambda candidate: candidate.group_id)

    # ---- inside

    def _place(self, group: Group) -> None:
        self.revision += 1
        heappush(self._heap_of(group), self._entry(group))

    def _heap_of(self, group: Group) -> _Heap:
        """Where it belongs now."""
        heaps = self._fresh if group.start_version is None else self._open
        return heaps[self.order.is_long(self._candidate(group))]

    def _entry(self, group: Group) -> tuple[Key, int]:
        """Its place there; an older one is out of date from now on."""
        key = self.order.key(self._candidate(group)) if group.start_version is None else (group.start_version,)
        group.entry = (key, group.group_id)
        return group.entry

    def _first(self, heap: _Heap) -> Group | None:
        while heap:
            group = self._current(heap[0])
            if group is not None:
                return group
            heappop(heap)
        return None

    def _current(self, entry: tuple[Key, int]) -> Group | None:
        """The group of an entry, unless the entry is out of date."""
        group = self._groups.get(entry[1])
        return group if group is not None and group.waiting and group.entry is entry else None

    def _valid(self, heap: _Heap) -> list[int]:
        return [entry[1] for entry in heap if self._current(entry) is not None]

    def _candidate(self, group: Group) -> Candidate:
        """What was predicted when it first waited: a place in the queue that wanders would be no order."""
        known = self._candidates.get(group.group_id)
        if known is not None:
            return known
        batch, place = divmod(group.group_id, self._batch_groups)
        self._lengths.began(group.group_id, key=group.prompt_key)
        candidate = Candidate(group_id=group.group_id, batch=batch, place=place, predicted_tokens=0.0)
        candidate = self._candidates[group.group_id] = self._predicted(candidate, group)
        self._count(batch)
        return candidate

    def _predicted(self, candidate: Candidate, group: Group) -> Candidate:
        """With what is predicted of the group now."""
        found = self._lengths.predict(group.prompt_key)
        return replace(candidate, predicted_tokens=max(0.0, found.tokens), is_known=found.source != "Nothing")

    def _count(self, batch: int) -> None:
        """One more group of the batch has waited."""
        self.batches += len(self._candidates) == 1
        self._batch_sizes[batch] = self._batch_sizes.get(batch, 0) + 1
        if self._batch_sizes[batch] == self._batch_groups:
            self.batches += 1
            self._whole_batch = batch if self._whole_batch is None else max(batch, self._whole_batch)
            self._batch_sizes = {other: size for other, size in self._batch_sizes.items() if other > self._whole_batch}
            self._candidates = {
                group_id: candidate
                for group_id, candidate in self._candidates.items()
                if candidate.batch >= self._whole_batch or self._is_live(group_id)
            }

    def _is_live(self, group_id: int) -> bool:
        group = self._groups.get(group_id)
        return group is not None and not group.recorded
