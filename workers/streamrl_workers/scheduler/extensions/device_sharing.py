"""Generators on the trainer's devices: they generate while the trainer waits, and are paused while it computes.

    the trainer reports that it waits ──▶ they continue ──▶ a group is delivered, or the trainer is gone ──▶ they are paused

The trainer does not ask: it computes as soon as it has a group. A generator stops between two of its steps, so both compute at once for at most
one such step and one message. A paused generator keeps what it holds. Once all of its tokens must have been reported, its samples move to free
slots of others, unless a sample that moves would be computed otherwise.

No wait is forever: a trainer that lacks a group sooner or later has nothing to compute, and then the generators that make that group continue.

Owns which generators are paused. Does not own what a move does (`rollout.py`).
"""

from collections.abc import Callable, Collection

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.evaluation import Evaluator
from streamrl_workers.scheduler.generators import Fleet, Lease
from streamrl_workers.scheduler.model import GroupTable
from streamrl_workers.scheduler.rollout import SampleLifecycle

TAKE_OVER_S = 2.0
"""Seconds of a pause after which a move loses no token: twice the interval between reports about running samples."""
LOOK_INTERVAL_S = 1.0
"""Interval between looks for free slots, in seconds."""


class DeviceSharing:
    """Pauses generators while the trainer computes on their devices: an `Extension`."""

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        outbox: Outbox,
        *,
        pools: Collection[str],
        groups: GroupTable,
        fleet: Fleet,
        lifecycle: SampleLifecycle,
        evaluator: Evaluator,
        trainer_waits: Callable[[], bool],
        moves: bool,
    ) -> None:
        """Make it.

        Args:
            outbox: takes the effects.
            pools: pools on the trainer's devices.
            groups: all groups.
            fleet: all generators.
            lifecycle: moves samples.
            evaluator: has samples that go first.
            trainer_waits: returns whether the trainer has nothing to compute.
            moves: whether samples may move to another generator.
        """
        self._pools = pools
        self._moves = moves
        self._outbox = outbox
        self._fleet = fleet
        self._groups = groups
        self._lifecycle = lifecycle
        self._evaluator = evaluator
        self._trainer_waits = trainer_waits
        self._seen: tuple[bool, int] | None = None
        """Whether they were paused, and changes of the fleet, at the last call."""
        self._next_s = 0.0
        """When samples may be taken over."""

    def settle(self) -> None:
        """Pause them or let them continue, by what the trainer does now."""
        paused = not self._trainer_waits()
        if self._seen is None or self._seen[0] is not paused:
            self._next_s = self._fleet.now_s + TAKE_OVER_S
        if self._seen != (paused, self._fleet.changes):
            self._seen = (paused, self._fleet.changes)
            self._pause(paused=paused)
        if paused and self._moves and self._fleet.now_s >= self._next_s:
            self._next_s = self._fleet.now_s + LOOK_INTERVAL_S
            self._take_over()

    def _pause(self, *, paused: bool) -> None:
        for generator in self._fleet:
            if generator.pool in self._pools and generator.paused is not paused:
                generator.paused = paused
                self._fleet.settle(generator)
                command = pb.GeneratorCommand(pause=pb.Pause(paused=paused))
                self._outbox.to_generator(generator.generator_id, command)

    def _take_over(self) -> None:
        """Move what paused ones hold, while slots are free: it is older than what waits."""
        if self._evaluator.queue:
            return
        leases = [lease for one in self._fleet if one.paused for lease in one.leases.values()]
        for lease in (lease for lease in leases if lease.source is self._lifecycle):
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
