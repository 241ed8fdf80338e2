"""Which groups are planned, and in which order their samples wait.

`Planner` owns the look-ahead and the admission of groups (`docs/reference/staleness.md`). Train prompts are requested in order, a bounded number
ahead. Group n is made from train prompt n, also after a recovery, unless another source claims the number.

    recorded + live <= (step + 1 + S) * B, and never more than the run needs

`WaitingGroups` is the central queue. `open` groups have begun, or one of their samples is with a generator: their other samples go first, the
oldest version first, because the staleness rule waits for them. `fresh` groups follow the order. Both are kept apart by length pool. Entries
that are out of date stay in the heaps and are skipped, so every operation is O(log n); a new order sorts what waits.

`Dispatcher` makes an order when a batch has been planned whole, when signals win or lose trust, when a pool's speed becomes known, and when
generators come or go: at once while they are few, else with every sixteenth of them. A new order moves no sample that is with a generator,
and a batch that has begun keeps its length pools while each has a generator.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from streamrl_workers.scheduler.dispatch import Candidate, Key, Order
from streamrl_workers.scheduler.dispatch.makespan import Instance, fastest_first
from streamrl_workers.scheduler.dispatch.order import PlannedBatch, Policy
from streamrl_workers.scheduler.dispatch.speeds import Guess
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.generators import Fleet
from streamrl_workers.scheduler.lengths import Lengths, prompt_key
from streamrl_workers.scheduler.model import Group, GroupPrompt, GroupSource, GroupTable
from streamrl_workers.scheduler.records import Planned
from streamrl_workers.scheduler.sample import Sample, Turns
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.tasks.values import NeedPrompts, Prompt

PORTION = 64
"""Groups planned in one event: thousands at once would delay all other events for a tenth of a second."""
FLEET_SHARE = 16
"""A new order needs one in this number of generators to come or go."""

_Heap = list[tuple[Key, int]]


class PromptGroups:
    """The source of groups that are generated from a prompt."""

    is_rewarded = True

    def __init__(self, *, group_size: int, waiting: "WaitingGroups") -> None:
        self._group_size = group_size
        self._waiting = waiting

    def claim(self, number: int) -> int | None:
        """Take every group."""
        return number

    def start(self, group: Group, prompt: Prompt) -> None:
        """Let all samples wait."""
        has_turns = group.task.max_turns is not None
        samples = [Sample(index, turns=Turns() if has_turns else None) for index in range(self._group_size)]
        self._waiting.begin(group, samples)


class Planner:
    """Turns prompts into planned groups as admission allows."""

    def __init__(
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        groups: GroupTable,
        sources: Sequence[GroupSource],
        first: int,
    ) -> None:
        """`sources`: each group is of the first source that claims its number; the last one claims all. `first`: number of the next group."""
        self._settings = settings
        self._outbox = outbox
        self._groups = groups
        self._window = groups.window
        self._sources = sources
        self.ready: dict[int, Prompt] = {}
        """Prompts that can become groups."""
        self._unprompted: defaultdict[int, list[Group]] = defaultdict(list)
        """Groups that wait for the text of a prompt, by its index."""
        self._next_group = first
        self._next_prompt = first
        self.has_more = False
        """Whether the last portion was a full one and more can be planned at once: the commit of its records brings the next."""
        self.may_plan = False
        """Whether admission leaves room for one more group, as of the last `plan`."""
        self.all_planned = False
        """Whether the run needs no more groups than it has, as of the last `plan`."""

    def restore(self, groups: Sequence[Group]) -> None:
        """Request the texts of groups of the journal that are generated again."""
        for group in groups:
            self._unprompted[group.prompt.index].append(group)
        for first, count in _runs(sorted(self._unprompted)):
            self._outbox.add(NeedPrompts(split="train", first_index=first, count=count))

    def arrived(self, prompt: Prompt) -> None:
        """Take a train prompt."""
        if prompt.index in self._unprompted:
            for group in self._unprompted.pop(prompt.index):
                self._start(group, prompt, key=prompt_key(prompt.text))
        elif self._next_group <= prompt.index < self._next_prompt:
            self.ready[prompt.index] = prompt

    def plan(self) -> None:
        """Plan what admission allows, a portion at most, and request prompts ahead."""
        planned = 0
        while planned < PORTION and self._can_plan():
            planned += 1
            self._plan(self._next_group, self.ready.pop(self._next_group))
            self._next_group += 1
        self.has_more = planned == PORTION and self._can_plan()
        self._look_ahead()
        self.may_plan = self._may_plan()
        self.all_planned = self._missing() <= 0 and not self._unprompted

    def _plan(self, number: int, prompt: Prompt) -> None:
        source, index = next((source, index) for source in self._sources if (index := source.claim(number)) is not None)
        key = prompt_key(prompt.text) if index == number else 0
        group = self.new_group(number, prompt_index=number, source=source, key=key)
        self._groups.add(group)
        self._outbox.write(Planned(group_id=number, prompt_index=number, prompt_key=key))
        if index == number:
            self._start(group, prompt, key=key)
            return
        if index not in self._unprompted:
            self._outbox.add(NeedPrompts(split="train", first_index=index, count=1))
        self._unprompted[index].append(group)

    def new_group(self, number: int, *, prompt_index: int, source: GroupSource | None = None, key: int = 0) -> Group:
        """Return a planned group; `source` None: the last one, which claims all."""
        return Group(
            group_id=number,
            prompt=GroupPrompt(index=prompt_index, key=key),
            source=source or self._sources[-1],
            task=self._settings.tasks.of(prompt_index),
        )

    def _can_plan(self) -> bool:
        return self._may_plan() and self._next_group in self.ready

    def _may_plan(self) -> bool:
        live = self._groups.live
        return live < (1 + self._settings.staleness) * self._settings.batch_groups and self._missing() > 0

    def _missing(self) -> int:
        """Return how many groups the run still needs beyond the live ones."""
        return (self._settings.steps - self._window.step) * self._settings.batch_groups - self._groups.live

    def _start(self, group: Group, prompt: Prompt, *, key: int) -> None:
        group.prompt.text, group.prompt.key, group.prompt.reference = prompt.text, key, prompt.reference
        group.source.start(group, prompt)

    def _look_ahead(self) -> None:
        coming = self._next_prompt - self._next_group
        if coming * 2 > self._settings.prompt_look_ahead:
            return
        count = min(self._settings.prompt_look_ahead, self._missing()) - coming
        if count > 0:
            self._outbox.add(NeedPrompts(split="train", first_index=self._next_prompt, count=count))
            self._next_prompt += count


class WaitingGroups:
    """All groups that wait, in order."""

    def __init__(self, groups: GroupTable, *, order: Order, lengths: Lengths, batch_groups: int) -> None:
        self._groups = groups
        self._lengths = lengths
        self._batch_groups = batch_groups
        self._open: dict[bool, _Heap] = {False: [], True: []}
        self._fresh: dict[bool, _Heap] = {False: [], True: []}
        """By whether they are of the long pool."""
        self._entries: dict[int, tuple[Key, int]] = {}
        """By group: its entry in a heap; any other entry is out of date."""
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

    def begin(self, group: Group, samples: list[Sample]) -> None:
        """Let all samples of a planned group wait, in their order."""
        group.begin_with(samples)
        self.put(group, list(reversed(range(len(samples)))))

    def put(self, group: Group, indices: list[int]) -> None:
        """Let these samples of the group wait; its place follows from its state now."""
        self.samples += len(indices)
        group.waiting.extend(indices)
        self._place(group)

    def replace(self, group: Group) -> None:
        """Put the group where it belongs now, because its version has changed."""
        if group.waiting:
            self._place(group)

    def take(self, group: Group) -> int:
        """Remove the next waiting sample of the group from the queue, and return its index."""
        self.samples -= 1
        index = group.waiting.pop()
        if not group.waiting:
            del self._entries[group.group_id]
        return index

    def discard(self, group: Group) -> None:
        """Remove a group that is dropped."""
        self.samples -= len(group.waiting)
        group.waiting.clear()
        self._entries.pop(group.group_id, None)

    # ---- the next group

    def first_open(self, *, long: bool) -> Group | None:
        """Return the begun group of this pool whose sample is next."""
        return self._first(self._open[long])

    def first_fresh(self, *, long: bool) -> Group | None:
        """Return the group of this pool that begins next."""
        return self._first(self._fresh[long])

    def set_aside(self, group: Group) -> None:
        """Pass a fresh group over, until `put_back`."""
        self._entries.pop(group.group_id, None)
        self._aside.append(group)

    def put_back(self) -> None:
        """Put groups that were passed over where they were."""
        for group in self._aside:
            heappush(self._heap_of(group), self._entry(group))
        self._aside.clear()

    # ---- orders

    def adopt(self, order: Order) -> None:
        """Sort what waits by this order, from now on."""
        heaps = [*self._open.values(), *self._fresh.values()]
        waiting = [self._groups[group_id] for heap in heaps for group_id in self._valid(heap)]
        self.order = order
        self.revision += 1
        self._open, self._fresh = {False: [], True: []}, {False: [], True: []}
        for group in waiting:
            self._heap_of(group).append(self._entry(group))
        for heap in [*self._open.values(), *self._fresh.values()]:
            heapify(heap)

    def repeat_predictions(self) -> None:
        """Predict groups that have not begun by the signals that are trusted now."""
        for group_id in [group_id for heap in self._fresh.values() for group_id in self._valid(heap)]:
            group = self._groups[group_id]
            known = self._candidate(group)
            self._candidates[group_id] = self._predicted(known, group)

    def batch(self) -> list[Candidate]:
        """Return what an order is made for: the newest batch that was planned whole, as it was planned, and what waits before it.

        If no batch is whole yet, all groups that are known. In the order of planning.
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
        """Return the heap to which the group belongs now."""
        heaps = self._fresh if group.start_version is None else self._open
        candidate = self._candidate(group)
        return heaps[bool(self.order.long_generators) and self.order.is_long(candidate)]

    def _entry(self, group: Group) -> tuple[Key, int]:
        """Return its new place there; an older one is out of date from now on."""
        key = self.order.key(self._candidate(group)) if group.start_version is None else (group.start_version,)
        entry = self._entries[group.group_id] = (key, group.group_id)
        return entry

    def _first(self, heap: _Heap) -> Group | None:
        while heap:
            group = self._current(heap[0])
            if group is not None:
                return group
            heappop(heap)
        return None

    def _current(self, entry: tuple[Key, int]) -> Group | None:
        """Return the group of an entry; None: the entry is out of date."""
        group = self._groups.by_id.get(entry[1])
        return group if group is not None and group.waiting and self._entries.get(entry[1]) is entry else None

    def _valid(self, heap: _Heap) -> list[int]:
        return [entry[1] for entry in heap if self._current(entry) is not None]

    def _candidate(self, group: Group) -> Candidate:
        """Return what was predicted when the group first waited, so that its place in the queue stays."""
        known = self._candidates.get(group.group_id)
        if known is not None:
            return known
        batch, place = divmod(group.group_id, self._batch_groups)
        self._lengths.began(group.group_id, key=group.prompt.key)
        candidate = Candidate(group_id=group.group_id, batch=batch, place=place, predicted_tokens=0.0)
        candidate = self._candidates[group.group_id] = self._predicted(candidate, group)
        self._count(batch)
        return candidate

    def _predicted(self, candidate: Candidate, group: Group) -> Candidate:
        """Return the candidate with what is predicted of the group now."""
        found = self._lengths.predict(group.prompt.key)
        return replace(candidate, predicted_tokens=max(0.0, found.tokens), is_known=found.source != "Nothing")

    def _count(self, batch: int) -> None:
        """Count one more group of the batch that has waited."""
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
        group = self._groups.by_id.get(group_id)
        return group is not None and not group.recorded


class Dispatcher:
    """Keeps the order in force up to date."""

    def __init__(
        self,
        policy: Policy,
        *,
        waiting: WaitingGroups,
        fleet: Fleet,
        groups: GroupTable,
        group_size: int,
        overlaps: bool,
        lengths: Lengths,
    ) -> None:
        """`overlaps`: whether a batch may begin before the one before it is done. `lengths`: knows which signals are trusted."""
        self._policy = policy
        self._waiting = waiting
        self._fleet = fleet
        self._groups = groups
        self._group_size = group_size
        self._overlaps = overlaps
        self._lengths = lengths
        self._seen: tuple[bool, int, int] | None = None
        """Trust, and with it batches and measured curves, at the last order."""
        self._signals: frozenset[str] = frozenset()
        """Trusted at the last order."""
        self._fleet_changes = 0

    def refresh(self) -> None:
        """Make an order if something that bears on it has changed."""
        trusted = self._lengths.trusted
        # Without trust a policy is given nothing but that.
        seen = (trusted, self._waiting.batches, self._fleet.curves.kinds) if trusted else (trusted, 0, 0)
        signals, changes = self._lengths.trusted_signals, self._fleet.changes - self._fleet_changes
        other_fleet = changes > 0 and changes > len(self._fleet) // FLEET_SHARE
        if seen == self._seen and signals == self._signals and not other_fleet:
            return
        other_signals = signals != self._signals
        if other_signals:
            self._waiting.repeat_predictions()
        self._seen, self._signals, self._fleet_changes = seen, signals, self._fleet.changes
        before = self._waiting.order
        batch = self._batch()
        order = before if self._keeps_pools(batch) else self._policy.order(batch)
        if other_signals or order != before:
            self._waiting.adopt(order)

    # ---- inside

    def _batch(self) -> PlannedBatch:
        if not self._lengths.trusted:
            return PlannedBatch(trusted=False)
        groups = self._waiting.batch()
        serving = [one for one in self._fleet if one.serves and one.use == "any"]
        instances = [
            Instance(generator_id=one.generator_id, slots=one.slots, curve=self._fleet.curve(one)) for one in serving
        ]
        return PlannedBatch(
            trusted=True,
            groups=groups,
            samples=self._group_size,
            overlaps=self._overlaps,
            begun=any(self._has_begun(group.group_id) for group in groups),
            instances=fastest_first(instances),
            measured=not any(isinstance(one.curve, Guess) for one in instances),
            rank_correlation=self._lengths.rank_correlation,
        )

    def _has_begun(self, group_id: int) -> bool:
        group = self._groups.by_id.get(group_id)
        return group is None or group.start_version is not None

    def _keeps_pools(self, batch: PlannedBatch) -> bool:
        """Return whether the newest batch has begun in length pools that can still serve it."""
        long = self._waiting.order.long_generators
        served = {one.generator_id in long for one in batch.instances}
        return bool(long) and len(served) > 1 and batch.begun


def _runs(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Return rising numbers as (first, count) of each unbroken run."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
