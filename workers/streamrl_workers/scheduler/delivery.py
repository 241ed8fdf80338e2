"""Scored groups on their way to the trainer: in which order, how many, and why not.

Owns the groups that are ready, those of the current step that the trainer holds, and its credit. Does not own attempts and recorded steps
(`history.py`). Two steps matter: `link.step` is the one that the trainer fills now; `window.step` is the first that has no record. They
differ only while a new attempt repeats recorded steps, which get exactly their recorded groups.

A `DeliveryOrder` returns the next group, or why no group is next. Orders are stacked, the outermost first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import DeliverGroup, Outbox
from streamrl_workers.scheduler.model import Group, GroupEvent, GroupTable, Window, batch_complete
from streamrl_workers.scheduler.settings import SchedulerSettings


class Why(Enum):
    """Why no group is delivered."""

    NO_TRAINER = "the trainer is not connected"
    NEW_ATTEMPT = "the trainer's new attempt is not in the journal yet"
    STEP_NOT_RECORDED = "the step that the trainer has done is not in the journal yet"
    ALL_STEPS_DONE = "all steps are done"
    EVALUATION = "the weights of this step are being evaluated"
    NO_CREDIT = "the trainer has no room for the next group"
    STEP_IS_FULL = "the trainer has all groups of this step"
    NOTHING_SCORED = "no group is scored"
    OLDER_FIRST = "staleness: groups that began under older weights must be in this step"
    BATCH_INCOMPLETE = "the batch is delivered as a whole, and some of its groups are not scored"
    LOWER_NUMBER_FIRST = "groups are delivered by their numbers, and one with a lower number is not scored"


@dataclass(slots=True, kw_only=True)
class TrainerLink:
    """What is known of the trainer and the step that it fills."""

    step: int
    """The step that the trainer fills."""
    compositions: dict[int, tuple[int, ...]]
    """Step -> groups of its record; steps >= `step` are repeated with exactly these groups."""
    cuts: dict[int, bytes] = field(default_factory=dict)
    """Step -> `pb.PassCuts` of its record, where passes were cut."""
    connected: bool = False
    connections: int = 0
    """How often a trainer has connected."""
    durable: bool = True
    """Whether the current attempt is in the journal."""
    recording: bool = False
    """Whether the trainer has done the step, and its record is not durable yet."""
    held: dict[int, None] = field(default_factory=dict)
    """Groups of the step that the trainer has, in order."""

    @property
    def is_open(self) -> bool:
        """Whether the trainer is connected and welcome."""
        return self.connected and self.durable


class DeliveryOrder(Protocol):
    """Which group is next."""

    def next(self) -> Group | Why:
        """Return the next group that may be delivered in the current step, or why there is none."""


class ReadyGroups:
    """Groups that may be delivered as far as their own state allows."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, Group]] = {}
        """Version -> its groups by serial, rising; versions without a group are left out."""
        self._serials: dict[int, int] = {}
        """Group -> its place in the order of scoring."""
        self._next_serial = 0

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._serials

    @property
    def counts(self) -> dict[int, int]:
        """Version -> groups; versions without a group are left out."""
        return {version: len(groups) for version, groups in self._groups.items()}

    @property
    def total(self) -> int:
        """Number of groups."""
        return len(self._serials)

    def put(self, group: Group) -> None:
        """Add the group after all others."""
        assert group.start_version is not None, f"group {group.group_id} has not begun"
        assert group not in self, f"group {group.group_id} is ready already"
        serial = self._serials[group.group_id] = self._next_serial
        self._next_serial += 1
        self._groups.setdefault(group.start_version, {})[serial] = group

    def take(self, group: Group) -> None:
        """Remove the group; ignore one that is not here, such as a group of a recorded step."""
        serial = self._serials.pop(group.group_id, None)
        if serial is None:
            return
        assert group.start_version is not None, f"group {group.group_id} has not begun"
        groups = self._groups[group.start_version]
        del groups[serial]
        if not groups:
            del self._groups[group.start_version]

    def first(self, may_deliver: Callable[[int], bool]) -> Group | None:
        """Return the group that came first among those of versions that `may_deliver` accepts."""
        heads = [next(iter(groups.items())) for version, groups in self._groups.items() if may_deliver(version)]
        return min(heads)[1] if heads else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InArrivalOrder:
    """The order of scoring, as far as the staleness rule allows."""

    window: Window
    ready: ReadyGroups

    def next(self) -> Group | Why:
        """Return the group that was scored first among those that may be delivered."""
        if (group := self.ready.first(self.window.may_deliver)) is not None:
            return group
        return Why.OLDER_FIRST if self.ready.total else Why.NOTHING_SCORED


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatches:
    """Delivers a step only when all of it can be delivered."""

    window: Window
    ready: ReadyGroups
    link: TrainerLink
    then: DeliveryOrder

    def next(self) -> Group | Why:
        """Return the next group once the batch is complete."""
        window = self.window
        if not self.link.held and not batch_complete(self.ready.counts, room=window.room, due=window.due()):
            return Why.BATCH_INCOMPLETE if self.ready.total else Why.NOTHING_SCORED
        return self.then.next()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """Repeats recorded steps with exactly their groups, and asks `then` only while a new step has room."""

    link: TrainerLink
    groups: GroupTable
    then: DeliveryOrder

    def next(self) -> Group | Why:
        """Return the next group of the recorded step; after the last of them, of the order."""
        window = self.groups.window
        if self.link.step >= window.step:
            return self.then.next() if window.room else Why.STEP_IS_FULL
        missing = (group_id for group_id in self.link.compositions[self.link.step] if group_id not in self.link.held)
        return next((self.groups[group_id] for group_id in missing), Why.STEP_IS_FULL)


class Delivery:
    """Gives groups to the trainer."""

    def __init__(
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        groups: GroupTable,
        link: TrainerLink,
        ready: ReadyGroups,
        order: DeliveryOrder,
        idle_cause: str = "",
    ) -> None:
        """`idle_cause`: why the trainer has nothing to compute; empty: found at the time."""
        self._settings = settings
        self._outbox = outbox
        self._groups = groups
        self._window = groups.window
        self._link = link
        self._ready = ready
        self._order = order
        self._fixed_cause = idle_cause
        self._credit = 0
        self._largest_credit = 0
        self._idle_cause = ""
        """The cause that was last reported to the trainer; empty: no cause."""
        self._waits_with: tuple[int, int] | None = None
        """Step, and groups of it, with which the trainer last reported that it has nothing to compute."""
        self.why: Why | None = None
        """Why the last call of `deliver` stopped."""

    @property
    def replaying(self) -> bool:
        """Whether recorded steps are being repeated."""
        return self._link.step < self._window.step

    @property
    def buffered(self) -> int:
        """Groups that are scored and in no step's record."""
        return self._ready.total + (0 if self.replaying else len(self._link.held))

    @property
    def trainer_waits(self) -> bool:
        """Whether the trainer has reported that it has nothing to compute, and nothing was sent or recorded since."""
        return self._waits_with == (self._link.step, len(self._link.held))

    def waits(self, waits: pb.TrainerWaits) -> None:
        """Note that the trainer has nothing more to compute."""
        self._waits_with = waits.step, waits.groups

    def add_credit(self, size_bytes: int) -> None:
        """Note that the trainer has room for this many more bytes."""
        self._credit += size_bytes
        self._largest_credit = max(self._largest_credit, self._credit)

    def disconnected(self) -> None:
        """Forget what belongs to one connection."""
        self._credit = self._largest_credit = 0
        self._idle_cause = ""
        self._waits_with = None

    # ---- groups

    def deliver(self) -> None:
        """Send what may be sent."""
        self.why = self._deliver()

    def _deliver(self) -> Why:
        link = self._link
        if not link.is_open:
            return Why.NEW_ATTEMPT if link.connected else Why.NO_TRAINER
        if link.recording:
            return Why.STEP_NOT_RECORDED
        if link.step >= self._settings.steps:
            return Why.ALL_STEPS_DONE
        while isinstance(found := self._order.next(), Group):
            if not self._fits_credit(found):
                return Why.NO_CREDIT
            self._send(found)
        self._report_idle(found)
        return found

    def _fits_credit(self, group: Group) -> bool:
        """Return whether the credit covers the group; one larger than all credit goes when nothing else is unpaid."""
        assert group.result is not None, f"group {group.group_id} is not scored"
        return group.result.size_bytes <= self._credit or 0 < self._credit == self._largest_credit

    def _send(self, group: Group) -> None:
        assert group.result is not None
        samples, size_bytes = group.result.samples, group.result.size_bytes
        self.mark_held(group)
        self._credit -= size_bytes
        self._idle_cause = ""
        self._outbox.add(
            DeliverGroup(group_id=group.group_id, step=self._link.step, trajectories=samples, size_bytes=size_bytes)
        )

    def mark_held(self, group: Group) -> None:
        """Note that the trainer has the group, in the current step; its samples leave the memory."""
        self._groups.deliver(group)
        self._ready.take(group)
        self._link.held[group.group_id] = None
        if not self.replaying:
            assert group.start_version is not None
            self._window.deliver(group.start_version)

    def take_back(self, group_ids: Sequence[int]) -> None:
        """Note that the trainer does not have these groups after all."""
        for group in [self._groups[group_id] for group_id in group_ids]:
            self._groups.follow(group, GroupEvent.ROLL_BACK)
            del self._link.held[group.group_id]
            if not self.replaying:
                assert group.start_version is not None
                self._window.take_back(group.start_version)
                self._ready.put(group)

    def next_step(self) -> None:
        """Begin the next step, of which the trainer has nothing."""
        self._link.held.clear()
        self._idle_cause = ""

    def is_ready(self, group: Group) -> bool:
        """Return whether the group is scored and may be in the step that has no record yet."""
        return group in self._ready

    # ---- why the trainer has nothing to compute

    def _report_idle(self, why: Why) -> None:
        if self.replaying or not self._window.room:
            return
        cause = self._cause(why)
        if cause != self._idle_cause:
            self._idle_cause = cause
            self._outbox.to_trainer(pb.TrainerCommand(idle=pb.Idle(cause=cause)))

    def _cause(self, why: Why) -> str:
        if self._fixed_cause or why is Why.EVALUATION:
            return self._fixed_cause or "phase"
        enough = self._window.room if self._settings.delivery.whole_batches else 1
        if self._ready.total >= enough:
            return "due_group"
        return "scoring" if self._groups.awaits_scores(enough) else "no_samples"
