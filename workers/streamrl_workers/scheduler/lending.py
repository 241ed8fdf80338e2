"""Generators on the trainer's devices: they generate while the trainer waits, and are paused while it computes.

    the trainer says that it waits ──▶ they go on ──▶ a group is delivered, or the trainer is gone ──▶ they are paused

The trainer asks nobody: it computes as soon as it has a group. A generator stops between two of its steps, so both compute at once for one such
step and one message at most. What a paused generator holds it keeps. Once all of its tokens must have been told, its samples move to the slots of
others that are free or get free. Not in order (`delivery: Logical`), where a sample that moves is computed otherwise.

No wait is for ever: a trainer that lacks a group has nothing to compute sooner or later, and then those who make that group go on.

Owns who is paused. What a move does is `groups/lifecycle.py`'s.
"""

from collections.abc import Callable

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.components import SchedulerComponents
from streamrl_workers.scheduler.fleet import Lease

TAKE_OVER_S = 2.0
"""Twice as long as tokens of running samples take to be told: behind so long a pause a move loses none."""
LOOK_INTERVAL_S = 1.0
"""Between two looks for free slots."""


class Lending:
    """Pauses lent generators."""

    def __init__(self, parts: SchedulerComponents, *, trainer_waits: Callable[[], bool]) -> None:
        """`trainer_waits`: whether the trainer has nothing to compute."""
        self._pools = parts.settings.lent_pools
        self._moves = not parts.settings.in_order
        self._outbox = parts.outbox
        self._fleet = parts.fleet
        self._groups = parts.groups
        self._lifecycle = parts.lifecycle
        self._evaluator = parts.evaluator
        self._trainer_waits = trainer_waits
        self._seen: tuple[bool, int] | None = None
        """Whether they were paused, and changes of the fleet, at the last look."""
        self._next_s = 0.0
        """When samples may be taken over."""

    def look(self) -> None:
        """Pause them or let them go on, by what the trainer does now."""
        if not self._pools:
            return
        paused = not self._trainer_waits()
        if self._seen is None or self._seen[0] is not paused:
            self._next_s = self._fleet.now_s + TAKE_OVER_S
        if self._seen != (paused, self._fleet.changes):
            self._seen = (paused, self._fleet.changes)
            self._tell(paused=paused)
        if paused and self._moves and self._fleet.now_s >= self._next_s:
            self._next_s = self._fleet.now_s + LOOK_INTERVAL_S
            self._take_over()

    def _tell(self, *, paused: bool) -> None:
        for generator in self._fleet:
            if generator.pool in self._pools and generator.paused is not paused:
                generator.paused = paused
                self._fleet.settle(generator)
                command = pb.GeneratorCommand(pause=pb.Pause(paused=paused))
                self._outbox.to_generator(generator.generator_id, command)

    def _take_over(self) -> None:
        """Move what paused ones hold, while slots are free: it is older than what waits."""
        if self._evaluator.waiting:
            return
        held = [lease for one in self._fleet if one.paused for lease in one.leases.values() if not lease.evaluation]
        for lease in held:
            if not self._fleet.free:
                return
            self._move(lease)

    def _move(self, lease: Lease) -> None:
        group = self._groups[lease.group_id]
        for generator in sorted(self._fleet.free.values(), key=self._fleet.offer):
            fits = self._lifecycle.fits(group, generator, index=lease.sample_index)
            if fits and self._lifecycle.may_move(lease, to=generator):
                self._lifecycle.move(lease, to=generator)
                return
