"""Who takes what: fills free slots from the evaluation and the central queue.

Owns the binding of samples to generators, late: nothing is bound before a slot is free. The generator
on which a sample would run fastest is served first (by its pool's curve, with one more active; of equal
ones the emptier), one group at a time, so that a group's samples share a prefill and the load stays even.
Tells generators without work why there is none.

    1. samples of the evaluation, at its version
    2. samples of begun groups of its length pool, oldest version first
    3. the next group of its pool by the order, if the staleness window and the buffer let one begin
    4. who holds nothing steals: 2 and 3 of the other pool

So no group waits for ever for generators that are gone: leases end, and then their generators steal.
A generator gets nothing that would not fit its memory for keys and values beside what it holds (`kv_memory.py`): it waits for the
end of one of its samples, in its place in the order.
Groups are kept for generators that still load the version that others have loaded.
The pool of the frozen model has its own: its slots take finished samples alone (`groups/frozen_stage.py`).
"""

from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.components import SchedulerComponents
from streamrl_workers.scheduler.fleet import Generator
from streamrl_workers.scheduler.groups.table import Group

MOST_KEPT = 4096
"""Samples that are kept for those that load: each look passes over their groups."""
PORTION_BYTES = 4 * 2**20
"""Of prompts and tokens, issued in one event: a thousand long prompts at once would hold up everything else for a quarter of a second."""


class Assignment:
    """Fills slots."""

    def __init__(self, parts: SchedulerComponents) -> None:
        self._settings = parts.settings
        self._outbox = parts.outbox
        self._groups = parts.groups
        self._window = parts.window
        self._fleet = parts.fleet
        self._waiting = parts.waiting
        self._lifecycle = parts.lifecycle
        self._evaluator = parts.evaluator
        self._stage = parts.stage
        self._planner = parts.planner
        self._last: tuple[object, ...] = ()
        self.open = False
        """False until the trainer has said what it holds: before that the room in its step is not known."""
        self.ended = False
        self.in_portions = False
        """Whether more can be issued now: `fill` is to be called again."""
        self._left_bytes = 0

    def fill(self) -> None:
        """Give every free slot what it can take; not while a batch is planned in portions, whose longest come last as often as first."""
        self.in_portions = False
        if self._stage is not None:
            self._stage.fill()
        if (
            self._planner.in_portions
            and self._waiting.samples < self._settings.batch_groups * self._settings.group_size
        ):
            return
        self._left_bytes = PORTION_BYTES
        coming = self._expected()
        candidates = self._candidates(coming)
        left = self._serve(candidates, coming)
        self.in_portions = self._left_bytes <= 0
        if self.in_portions:
            self._last = ()
        waiting = self._pools_waiting()
        for generator in left:
            if not generator.held_back:
                self._tell_idle(generator, waiting=waiting[self._is_long(generator)])
        for generator in candidates:
            self._tell_waiting(generator, waiting=waiting[self._is_long(generator)])

    # ---- who is looked at

    def _candidates(self, coming: dict[str, Generator]) -> list[Generator]:
        """Generators to look at: all with free slots if anything changed that bears on them, else those whose slots did."""
        situation = (
            self._waiting.revision,
            self._waiting.samples > 0,
            self._pools_waiting(),
            self._evaluator.version,
            self._evaluator.waiting,
            self._window.situation(),
            self._pressed(),
            self._not_yet,
            self._planner.may_plan(),
            self._planner.all_planned(),
            self._lifecycle.answering > 0,
            self.open,
            self.ended,
            len(coming),
        )
        names = self._fleet.take_touched()
        if situation == self._last:
            return [self._fleet.free[name] for name in names if name in self._fleet.free]
        self._last = situation
        return list(self._fleet.free.values())

    def _expected(self) -> dict[str, Generator]:
        """Generators that will be there soon and for which groups are kept.

        With S = 0 generators load each step's version one after the other: who is first would else be filled to the brim,
        or get all of the longest, and be the one that ends last. Where more waits than there is room for, and in the
        order of planning, it makes no difference.
        """
        if not self._waiting.samples:
            return {}
        coming = {name: one for name, one in self._fleet.coming().items() if self._will_begin(one)}
        waiting = self._waiting.samples
        if not coming or min(sum(one.free for one in coming.values()), waiting) > MOST_KEPT:
            return {}
        fits = sum(one.free for one in self._fleet.free.values()) > waiting
        return coming if fits or self._waiting.order.reorders else {}

    def _will_begin(self, generator: Generator) -> bool:
        """Whether groups may begin with it under the version that it loads, and not under the one that it has."""
        now = generator.step is not None and self._may_begin(generator.step)
        return not now and generator.told is not None and self._may_begin(generator.told[1])

    # ---- who gets what

    def _serve(self, generators: Iterable[Generator], coming: dict[str, Generator]) -> list[Generator]:
        """Fill slots until they are full or nothing is left for them but what is kept for `coming`; those with free slots at the end."""
        here = {generator.generator_id: generator for generator in generators}
        heap = [self._fleet.offer(generator) for generator in {**here, **coming}.values()]
        heapify(heap)
        left: list[Generator] = []
        kept: Counter[str] = Counter()
        """Samples that wait for a generator that is coming, by its name."""
        while heap and self._left_bytes > 0:
            name = heappop(heap)[2]
            generator = self._fleet.free[name]
            if name in here and self._give(generator, begins=name not in coming):
                if generator.free > kept[name]:
                    heappush(heap, self._fleet.offer(generator, more=kept[name]))
            elif name in coming and generator.free > kept[name] and self._keep(generator):
                kept[name] += min(self._settings.group_size, generator.free - kept[name])
                heappush(heap, self._fleet.offer(generator, more=kept[name]))
            elif name in here:
                left.append(generator)
        self._waiting.put_back()
        return left

    def _keep(self, generator: Generator) -> bool:
        """Set the next group of its pool aside for it, if there is one."""
        group = self._waiting.first_fresh(long=self._is_long(generator))
        if group is not None:
            self._waiting.set_aside(group)
        return group is not None

    def _give(self, generator: Generator, *, begins: bool) -> bool:
        """One portion for the generator, if there is any; `begins`: also of a group that begins with it."""
        version = generator.step
        generator.held_back = False
        if version is None or version > self._window.step or self.ended:
            return False
        if self._evaluator.wants(generator):
            generator.held_back = not self._evaluator.fits(generator)
            if not generator.held_back:
                self._left_bytes -= self._evaluator.issue(generator)
            return not generator.held_back
        if not self.open or self._is_held(generator):
            return False
        own = self._is_long(generator)
        pools = (own,) if generator.leases else (own, not own)
        begins = begins and self._may_begin(version)
        group = next((found for long in pools if (found := self._next(version, long=long, begins=begins))), None)
        if group is None:
            return False
        before = len(group.waiting)
        while group.waiting and generator.free and self._left_bytes > 0 and not generator.held_back:
            if self._lifecycle.fits(group, generator):
                self._left_bytes -= self._lifecycle.issue(group, generator)
            else:
                generator.held_back = True
        self._waiting.replace(group)
        return len(group.waiting) < before

    def _next(self, version: int, *, long: bool, begins: bool) -> Group | None:
        """The group of this pool that a generator of this version takes."""
        group = self._waiting.first_open(long=long)
        if (
            group is not None
            and group.start_version is not None
            and self._window.may_go_on(group.start_version, at=version)
        ):
            return group
        return self._waiting.first_fresh(long=long) if begins else None

    def _is_held(self, generator: Generator) -> bool:
        """Whether it gets nothing more before it has loaded what it was told of: what runs ends under the version that it began with."""
        return not self._settings.partial_rollouts and generator.is_loading

    def _is_long(self, generator: Generator) -> bool:
        return generator.generator_id in self._waiting.order.long_generators

    def _may_begin(self, version: int) -> bool:
        return self._window.may_begin(version) and not self._pressed()

    def _pressed(self) -> bool:
        """Whether the buffer is full. What the current step needs may always begin: else it would never be done."""
        full = self._groups.buffered_bytes > self._settings.max_buffer_bytes
        return full and self._window.live >= self._window.room

    # ---- why nothing

    def _pools_waiting(self) -> tuple[bool, bool]:
        """Whether samples wait for generators of the short pool, and of the long one."""
        if self._evaluator.waiting or not self._waiting.order.long_generators:
            waits = self._waiting.samples + self._evaluator.waiting > 0
            return waits, waits
        first = (self._waiting.first_open, self._waiting.first_fresh)
        short, long = (any(find(long=pool) is not None for find in first) for pool in (False, True))
        return short, long

    def _tell_idle(self, generator: Generator, *, waiting: bool) -> None:
        cause = self._cause(generator, waiting=waiting)
        if generator.idle_cause != cause:
            generator.idle_cause = cause
            self._outbox.idle(generator.generator_id, cause)

    def _cause(self, generator: Generator, *, waiting: bool) -> str:
        """`waiting`: whether samples wait for its pool."""
        if self._lifecycle.answering and not (self.ended or self._waiting.samples):
            return "no_prompts"  # what the model reads next is not there yet
        if self.ended or (self._planner.all_planned() and not self._waiting.samples and not self._evaluator.waiting):
            return "ended"
        if generator.step is None or not self.open or self._is_held(generator):
            return "no_weights"
        if self._waiting.samples and not waiting and generator.leases:
            return "no_prompts"  # what waits is for the other pool
        if self._waiting.samples:
            if not self._window.may_begin(generator.step):
                return self._not_yet
            return "back_pressure" if self._pressed() else "no_prompts"  # the rest is kept for others that load
        return "no_prompts" if self._planner.may_plan() else self._not_yet

    @property
    def _not_yet(self) -> str:
        """Why nothing more may begin before the trainer has done its step."""
        if self._settings.waits_are_phases:
            return "phase"
        lacks_scores = not self._settings.frozen_pool and self._groups.awaits_scores(self._window.room)
        return "scoring" if lacks_scores else "staleness"

    def _tell_waiting(self, generator: Generator, *, waiting: bool) -> None:
        if generator.told_waiting != waiting:
            generator.told_waiting = waiting
            self._outbox.to_generator(generator.generator_id, pb.GeneratorCommand(queue=pb.QueueState(waiting=waiting)))
