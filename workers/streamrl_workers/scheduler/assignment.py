"""Who takes what: fills free slots from the evaluation and the central queue.

Owns the binding of samples to generators, late: nothing is bound before a slot is free. The generator
on which a sample would run fastest is served first (by its pool's curve, with one more active; of equal
ones the emptier), one group at a time, so that a group's samples share a prefill and the load stays even.
Tells generators without work why there is none.

    1. samples of the evaluation, at its version
    2. samples of begun groups, oldest version first
    3. the next group by the plan, if the staleness window and the buffer let one begin

Generators that still load the version that others have loaded get their share kept for them: of the number where all that waits has
room at once, and of the order, of their side, where the longest go first.

A plan may have two sides, each with generators of its own. What is left of one side, begun groups as well, goes to a
generator of the other when nobody of its own could take it: under a strict plan nobody who serves and may begin a
group (go on with it), else nobody with a free slot. So no group waits for ever for generators that are gone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.fleet import Generator
from streamrl_workers.scheduler.groups import Group
from streamrl_workers.scheduler.parts import Parts

MOST_KEPT = 4096
"""Samples of an order that are kept for those that load: each look passes over their groups. With sides, where there are more of them,
nothing begins before all have loaded: `Fleet.coming` is bounded in time."""

MUCH_FASTER = 3.0
"""Times. Sides are worth less than this: who is so much slower than an idle generator of the other side gets nothing."""

_Sides = tuple[tuple[bool, bool], ...]


class Assignment:
    """Fills slots."""

    def __init__(self, parts: Parts) -> None:
        self._settings = parts.settings
        self._outbox = parts.outbox
        self._groups = parts.groups
        self._window = parts.window
        self._fleet = parts.fleet
        self._waiting = parts.waiting
        self._production = parts.production
        self._evaluator = parts.evaluator
        self._planner = parts.planner
        self._last: tuple[object, ...] = ()
        self._coming: dict[str, Generator] = {}
        self._keeps_groups = False
        """Whether what is kept is the next groups of the order; else a number of samples."""
        self._holds = False
        """Whether nothing begins before those that are coming are there."""
        self.open = False
        """False until the trainer has said what it holds: before that the room in its step is not known."""
        self.ended = False

    def fill(self) -> None:
        """Give every free slot what it can take; not while a batch is planned in portions, whose longest come last as often as first."""
        if (
            self._planner.in_portions
            and self._waiting.samples < self._settings.batch_groups * self._settings.group_size
        ):
            return
        self._coming = self._expected()
        candidates = self._candidates()
        left = self._serve(candidates, self._coming, crossing=False)
        if left and self._waiting.plan.tail_generators:
            left = self._cross(left)
        waiting = self._waits(self._sides(), self._begun_sides())
        for generator in left:
            self._tell_idle(generator, waiting=waiting[self._of_tail(generator)])
        for generator in candidates:
            self._tell_waiting(generator, waiting=waiting[self._of_tail(generator)])

    def _candidates(self) -> list[Generator]:
        """Generators to look at: all with free slots if anything changed that bears on them, else those whose slots did."""
        sides, begun = self._sides(), self._begun_sides()
        situation = (
            self._waiting.revision,
            self._waiting.samples > 0,
            sides,
            begun,
            self._waits(sides, begun),
            self._evaluator.version,
            self._evaluator.waiting,
            self._window.situation(),
            self._pressed(),
            self._planner.may_plan(),
            self._planner.all_planned(),
            self._production.answering > 0,
            self.open,
            self.ended,
            len(self._coming),
            self._holds,
        )
        names = self._fleet.take_touched()
        if situation == self._last:
            return [self._fleet.free[name] for name in names if name in self._fleet.free]
        self._last = situation
        return list(self._fleet.free.values())

    # ---- inside

    def _serve(
        self, generators: Iterable[Generator], coming: Mapping[str, Generator], *, crossing: bool
    ) -> list[Generator]:
        """Fill slots until they are full or nothing is left for them but what is kept for `coming`; those with free slots at the end."""
        here = {generator.generator_id: generator for generator in generators}
        heap = [self._fleet.offer(generator) for generator in {**here, **coming}.values()]
        heapify(heap)
        left: dict[bool, list[Generator]] = {False: [], True: []}
        """By side."""
        kept: Counter[str] = Counter()
        """Samples that wait for a generator that is coming, by its name."""
        plan = self._waiting.plan
        gives_way = bool(plan.tail_generators) and not (plan.strict or crossing)
        while heap:
            generator = self._fleet.free[name := heappop(heap)[2]]
            comes = name in coming
            begins = not comes and self._begins(kept)
            idle = left[not self._of_tail(generator)] if gives_way and not comes else []
            if (
                idle
                and self._is_much_faster(idle[0], than=generator)
                and self._give(idle[0], crossing=True, begins=begins)
            ):
                for one in (idle.pop(0), generator):
                    if one.free:
                        heappush(heap, self._fleet.offer(one))
            elif name in here and self._give(generator, crossing=crossing, begins=begins):
                if generator.free > kept[name]:
                    heappush(heap, self._fleet.offer(generator, more=kept[name]))
            elif comes and generator.free > kept[name] and self._keep(kept, tail=self._of_tail(generator) != crossing):
                kept[name] += min(self._settings.group_size, generator.free - kept[name])
                heappush(heap, self._fleet.offer(generator, more=kept[name]))
            elif name in here:
                left[self._of_tail(generator)].append(generator)
        self._waiting.put_back()
        return left[False] + left[True]

    def _is_much_faster(self, idle: Generator, *, than: Generator) -> bool:
        """Whether the next sample would run so much faster on the idle one of the other side that it goes there."""
        return MUCH_FASTER * self._fleet.offer(idle)[0] <= self._fleet.offer(than)[0]

    def _begins(self, kept: Counter[str]) -> bool:
        """Whether there may be a group to begin besides what is kept."""
        return not self._holds and (self._keeps_groups or self._waiting.samples > kept.total())

    def _keep(self, kept: Counter[str], *, tail: bool) -> bool:
        """Whether there is one more group to keep for who is coming; where the longest go first it is the next one of the side."""
        if not self._keeps_groups:
            return self._waiting.samples > kept.total()
        group = self._waiting.first_fresh(tail=tail)
        if group is not None:
            self._waiting.set_aside(group)
        return group is not None

    def _expected(self) -> dict[str, Generator]:
        """Generators that will be there soon and for which something is to be kept.

        With S = 0 generators load each step's version one after the other: who is first would else be filled to the brim, and
        as slow as that makes it, while others have nothing; or get all of the longest, and be the one that ends last. Where
        more waits than there is room for, and in the order of planning, it makes no difference.
        """
        self._keeps_groups = self._holds = False
        coming = self._fleet.coming() if self._waiting.samples else {}
        coming = {name: generator for name, generator in coming.items() if self._will_begin(generator)}
        if not coming:
            return {}
        plan, waiting = self._waiting.plan, self._waiting.samples
        are_few = min(sum(one.free for one in coming.values()), waiting) <= MOST_KEPT
        self._keeps_groups = plan.longest_first and are_few
        self._holds = bool(plan.tail_generators) and not self._keeps_groups
        fits = sum(one.free for one in self._fleet.free.values()) > waiting
        return coming if self._keeps_groups or (fits and not self._holds) else {}

    def _will_begin(self, generator: Generator) -> bool:
        """Whether groups may begin with it under the version that it loads, and not under the one that it has."""
        now = generator.step is not None and self._may_begin(generator.step)
        return not now and generator.told is not None and self._may_begin(generator.told[1])

    def _give(self, generator: Generator, *, crossing: bool, begins: bool) -> bool:
        """One portion for the generator, if there is any; `crossing`: from the other side; `begins`: also of a group that begins with it."""
        version = generator.step
        if version is None or version > self._window.step or self.ended:
            return False
        if self._evaluator.wants(generator):
            self._evaluator.issue(generator)
            return True
        if not self.open or self._is_held(generator):
            return False
        tail = self._of_tail(generator)
        group = self._open_for(tail=tail, version=version)
        if group is None and not begins:
            return False
        if group is None:
            group = self._waiting.first_fresh(tail=tail != crossing)
            if group is None or not self._may_begin(version):
                return False
        self._give_group(group, generator)
        return True

    def _is_held(self, generator: Generator) -> bool:
        """Whether it gets nothing more before it has loaded what it was told of: what runs ends under the version that it began with."""
        return not self._settings.partial_rollouts and generator.is_loading

    def _open_for(self, *, tail: bool, version: int) -> Group | None:
        """The begun group that a generator of this side and version takes: the oldest of those that nobody nearer could take."""
        own, other = (self._waiting.first_open(tail=side) for side in (tail, not tail))
        if other is not None and (not self._may_go_on(other, version=version) or self._goes_on(other, tail=not tail)):
            other = None
        if own is not None and not self._may_go_on(own, version=version):
            own = None
        return min((group for group in (own, other) if group is not None), key=_age, default=None)

    def _give_group(self, group: Group, generator: Generator) -> None:
        for _ in range(min(generator.free, len(group.waiting))):
            self._production.issue(group, generator)
        self._waiting.replace(group)

    def _may_go_on(self, group: Group, *, version: int) -> bool:
        assert group.begun is not None
        return self._window.may_go_on(group.begun, at=version)

    def _may_begin(self, version: int) -> bool:
        return self._window.may_begin(version) and not self._pressed()

    def _pressed(self) -> bool:
        """Whether the buffer is full. What the current step needs may always begin: else it would never be done."""
        full = self._groups.buffered_bytes > self._settings.max_buffer_bytes
        return full and self._window.live >= self._window.room

    # ---- sides

    def _of_tail(self, generator: Generator) -> bool:
        return generator.generator_id in self._waiting.plan.tail_generators

    def _cross(self, generators: list[Generator]) -> list[Generator]:
        """Let generators take from the other side what nobody of that side takes; those with free slots at the end."""
        rest, tail = ((waits and not served) for waits, served in self._sides())
        deserted = {True: rest, False: tail}
        """By the side that may take it: whether nobody serves the other."""
        takers: list[Generator] = []
        others: list[Generator] = []
        for generator in generators:
            (takers if deserted[self._of_tail(generator)] else others).append(generator)
        coming = {name: one for name, one in self._coming.items() if deserted[self._of_tail(one)]}
        # others: begun groups for which there was room on their side before
        left = self._serve(others, self._coming, crossing=False)
        return left + self._serve(takers, coming, crossing=True)

    def _sides(self) -> _Sides:
        """Of the rest and of the tail: whether groups wait, and are served. () without sides."""
        if not self._waiting.plan.tail_generators:
            return ()
        waits = [self._waiting.first_fresh(tail=tail) is not None for tail in (False, True)]
        return tuple((waits[tail], waits[tail] and self._served(tail=tail)) for tail in (False, True))

    def _served(self, *, tail: bool) -> bool:
        """Whether a generator of the side takes its groups: with a free slot now, or under a strict plan later.

        One that is loading a version under which a group may begin counts: with S = 0 all do so at each step's begin.
        """
        window = self._window
        known = range(max(window.oldest, 0), window.step + 1)
        usable = {version for version in known if window.may_begin(version)}
        return bool(usable) and any(
            generator.serves and (generator.step in usable or generator.highest_told in usable)
            for generator in self._of_side(tail=tail)
        )

    def _of_side(self, *, tail: bool) -> Iterable[Generator]:
        """Generators of the side that count: under a strict plan all, else those with a free slot."""
        among = self._fleet.connected if self._waiting.plan.strict else self._fleet.free
        names = self._waiting.plan.tail_generators
        if tail:
            return (generator for name in names if (generator := among.get(name)) is not None)
        return (generator for name, generator in among.items() if name not in names)

    def _begun_sides(self) -> _Sides:
        """The same for the begun groups that are next."""
        if not self._waiting.plan.tail_generators:
            return ()
        return tuple(
            (group is not None, group is not None and self._goes_on(group, tail=tail))
            for tail in (False, True)
            for group in [self._waiting.first_open(tail=tail)]
        )

    def _goes_on(self, group: Group, *, tail: bool) -> bool:
        """Whether a generator of the side takes the begun group: as `_served`, at a version that it may go on with."""
        known = range(self._window.step + 1)
        return any(
            version is not None and version in known and self._may_go_on(group, version=version)
            for generator in self._of_side(tail=tail)
            if generator.serves
            for version in (generator.step, generator.highest_told)
        )

    def _waits(self, *kinds: _Sides) -> tuple[bool, bool]:
        """Whether samples wait that a generator of the rest, and one of the tail, may take: of its side, or by crossing."""
        if self._evaluator.waiting or not all(kinds):
            waits = self._waiting.samples + self._evaluator.waiting > 0
            return waits, waits
        rest = any(own[0] or (other[0] and not other[1]) for own, other in kinds)
        tail = any(own[0] or (other[0] and not other[1]) for other, own in kinds)
        return rest, tail

    # ---- why nothing

    def _tell_idle(self, generator: Generator, *, waiting: bool) -> None:
        cause = self._cause(generator, waiting=waiting)
        if generator.idle_cause != cause:
            generator.idle_cause = cause
            self._outbox.idle(generator.generator_id, cause)

    def _cause(self, generator: Generator, *, waiting: bool) -> str:
        """`waiting`: whether samples wait that it may take."""
        if self._production.answering and not (self.ended or self._waiting.samples):
            return "no_prompts"  # what the model reads next is not there yet
        if self.ended or (self._planner.all_planned() and not self._waiting.samples and not self._evaluator.waiting):
            return "ended"
        if generator.step is None or not self.open or self._is_held(generator):
            return "no_weights"
        if self._waiting.samples and not waiting:
            return "no_prompts"  # what waits is for the other side's generators
        if self._waiting.samples:
            if not self._window.may_begin(generator.step):
                return self._not_yet
            return "back_pressure" if self._pressed() else "no_prompts"  # the rest is kept for others that load
        return "no_prompts" if self._planner.may_plan() else self._not_yet

    @property
    def _not_yet(self) -> str:
        """Why nothing more may begin before the trainer has done its step."""
        return "turn" if self._settings.waits_are_turns else "staleness"

    def _tell_waiting(self, generator: Generator, *, waiting: bool) -> None:
        if generator.told_waiting != waiting:
            generator.told_waiting = waiting
            self._outbox.to_generator(generator.generator_id, pb.GeneratorCommand(queue=pb.QueueState(waiting=waiting)))


def _age(group: Group) -> tuple[int, int]:
    """Smaller for those that began earlier."""
    assert group.begun is not None
    return group.begun, group.group_id
