"""What the trainer gets: attempts, delivery of scored groups, steps, rollback.

Owns which step the trainer fills, which groups it holds, its credit, and the recorded compositions that a
new attempt repeats. Two steps matter: `step` is the one that the trainer fills now; `window.step` (the
frontier) is the first that has no record. They differ only while a new attempt repeats recorded steps: those
get exactly their recorded groups; the staleness window speaks of the frontier alone.

    trainer_joined -> AttemptStarted durable -> Welcome -> groups ... StepDone -> StepTaken durable -> StepRecorded -> groups of the next step
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.components import SchedulerComponents, StepSummary, TaskSummary
from streamrl_workers.scheduler.effects import DeliverGroup
from streamrl_workers.scheduler.groups.life import GroupEvent, GroupState
from streamrl_workers.scheduler.groups.staleness import batch_complete
from streamrl_workers.scheduler.groups.supervised import HeldOutSamples
from streamrl_workers.scheduler.groups.table import Group
from streamrl_workers.scheduler.records import (
    AttemptStarted,
    Checkpointed,
    Recovered,
    SampleStats,
    StepTaken,
    add_up,
)


class MismatchError(Exception):
    """The trainer's history and the journal do not fit; it is to go back to its checkpoint."""


class HistoryError(Exception):
    """The trainer's checkpoint and the journal can never fit: the run cannot go on."""


class TrainerFeed:
    """The link to the trainer."""

    def __init__(self, parts: SchedulerComponents, recovered: Recovered, *, held_out: HeldOutSamples) -> None:
        """`held_out`: rows that the trainer gets over each connection."""
        self._settings = parts.settings
        self._outbox = parts.outbox
        self._groups = parts.groups
        self._window = parts.window
        self._lifecycle = parts.lifecycle
        self._fleet = parts.fleet
        self._planner = parts.planner
        self.attempt = recovered.attempt
        self._instance = recovered.instance
        self.step = recovered.step
        self.checkpoint_step = recovered.checkpoint_step
        self._compositions = dict(recovered.compositions)
        self._durable = True
        """The current attempt is in the journal."""
        self._recording = False
        """StepDone has come, its record is not durable yet."""
        self._connected = False
        self._credit = 0
        self._largest_credit = 0
        self._delivered: dict[int, None] = {}
        """Groups of the current step that the trainer holds, in order."""
        self._held_out = held_out
        self._held_out_told = False
        """Over this connection."""
        self.is_held_by: Callable[[int], bool] = lambda step: False
        """Whether a supervised job's trainer waits with this step: generators are to evaluate the weights that it begins with."""
        self._ready = ReadyGroups()
        self._first_undelivered: int | None = None
        """No group of a lower number is to be delivered in the step that has no record yet. None: not looked for yet."""
        self._idle_cause = ""
        self._waits_with: tuple[int, int] | None = None
        """Step, and groups of it, with which the trainer last said that it has nothing to compute."""
        self._counted: tuple[int, Counter[str], Counter[str], Counter[str]] = 0, Counter(), Counter(), Counter()
        """Reissued samples, dropped groups by reason and by task, samples without a reward, as the step before found them."""
        self.last_step: StepSummary | None = None
        self.newest_checkpoint: tuple[int, str] | None = None
        """Step and path of the newest checkpoint that the trainer has told of."""

    # ---- what others ask

    @property
    def delivered(self) -> int:
        """Groups of the current step that the trainer holds."""
        return len(self._delivered)

    @property
    def buffered(self) -> int:
        """Groups that are scored and in no step's record."""
        return self._ready.total + (0 if self.repeating else len(self._delivered))

    @property
    def trainer_waits(self) -> bool:
        """Whether the trainer has nothing to compute: it says so, and nothing that it may not know of has been sent or recorded since."""
        return self._waits_with == (self.step, len(self._delivered))

    def waits(self, waits: pb.TrainerWaits) -> None:
        """The trainer has nothing more to compute."""
        self._waits_with = waits.step, waits.groups

    @property
    def repeating(self) -> bool:
        """Whether recorded steps are being taken again."""
        return self.step < self._window.step

    # ---- groups

    def scored(self, group: Group) -> None:
        """The group's record is durable: it may be delivered."""
        self._ready.put(group)

    def deliver(self) -> None:
        """Send what may be sent: in the order of scoring as far as the staleness rule allows, or in the order of the groups' numbers."""
        if not (self._connected and self._durable):
            return
        self._tell_held_out()
        if self._recording or self.step >= self._settings.steps:
            return
        if self._is_held:
            self._tell_idle()
            return
        while (group := self._next()) is not None:
            if not self._affords(group):
                return
            self._send(group)
        self._tell_idle()

    @property
    def _is_held(self) -> bool:
        return self._settings.supervised and self.is_held_by(self.step)

    def _next(self) -> Group | None:
        if self.repeating:
            missing = (group_id for group_id in self._compositions[self.step] if group_id not in self._delivered)
            return next((self._groups[group_id] for group_id in missing), None)
        if not (self._window.room and self._barrier_open()):
            return None
        return self._next_number() if self._settings.in_order else self._ready.first(self._window.may_deliver)

    def _next_number(self) -> Group | None:
        """The group of the lowest number of all that are to be delivered, if it is ready: those behind it wait. Only at staleness 0,
        where the next step's groups are not there yet."""
        if not self._ready.total:
            return None
        number = self._first_undelivered
        if number is None:
            number = min(group.group_id for group in self._groups)
        while (group := self._groups.get(number)) is None or group.recorded or number in self._delivered:
            number += 1  # it ends at a group that is ready
        self._first_undelivered = number
        return group if group.serial is not None else None

    def _barrier_open(self) -> bool:
        if not self._settings.whole_batches or self._delivered:
            return True
        return batch_complete(self._ready.counts, room=self._window.room, due=self._window.due())

    def _affords(self, group: Group) -> bool:
        """Within the credit; a group larger than all of the credit goes when nothing else is unpaid."""
        return group.size_bytes <= self._credit or 0 < self._credit == self._largest_credit

    def _send(self, group: Group) -> None:
        trajectories = group.trajectories
        self._mark_delivered(group)
        self._credit -= group.size_bytes
        self._idle_cause = ""
        self._outbox.add(
            DeliverGroup(
                group_id=group.group_id,
                step=self.step,
                trajectories=trajectories,
                size_bytes=group.size_bytes,
            )
        )

    def _mark_delivered(self, group: Group) -> None:
        """The trainer has the group, in the current step; its samples leave the memory."""
        self._groups.follow(group, GroupEvent.DELIVER)
        self._groups.release(group)
        self._ready.take(group)
        self._delivered[group.group_id] = None
        if not self.repeating:
            assert group.start_version is not None
            self._window.deliver(group.start_version)

    def _take_back(self, group: Group) -> None:
        """The trainer does not have the group after all."""
        self._groups.follow(group, GroupEvent.ROLL_BACK)
        del self._delivered[group.group_id]
        if not self.repeating:
            assert group.start_version is not None
            self._window.take_back(group.start_version)
            self.scored(group)
            if self._first_undelivered is not None:
                self._first_undelivered = min(self._first_undelivered, group.group_id)

    def _tell_held_out(self) -> None:
        if not self._held_out_told and (message := self._held_out.message()) is not None:
            self._held_out_told = True
            self._outbox.to_trainer(pb.TrainerCommand(held_out=message))

    def _tell_idle(self) -> None:
        if self.repeating or not self._window.room:
            return
        cause = self._waits_for()
        if cause != self._idle_cause:
            self._idle_cause = cause
            self._outbox.to_trainer(pb.TrainerCommand(idle=pb.Idle(cause=cause)))

    def _waits_for(self) -> str:
        if self._settings.waits_are_phases or self._is_held:
            return "phase"
        enough = self._window.room if self._settings.whole_batches else 1
        if self._ready.total >= enough:
            return "due_group"
        lacks_scores = not self._settings.frozen_pool and self._groups.awaits_scores(enough)
        return "scoring" if lacks_scores else "no_samples"

    # ---- steps

    def step_done(self, done: pb.StepDone) -> None:
        """The trainer has taken the step with the groups that it holds."""
        if done.step < self.step:
            self._outbox.to_trainer(pb.TrainerCommand(step_recorded=pb.StepRecorded(step=done.step)))
            return
        self._check(done)
        if not self.repeating:
            self._planner.take_states(done.states)
        self._outbox.write(
            StepTaken(
                attempt=self.attempt,
                step=done.step,
                group_ids=tuple(done.group_ids),
                metrics=dict(done.metrics),
                advantages=done.advantages,
                version_hash=done.version_hash,
                micro_steps=tuple(done.micro_steps),
            ),
            then=partial(self._recorded, self._consume(done)),
        )
        self._recording = True

    def _check(self, done: pb.StepDone) -> None:
        expected = len(self._compositions[self.step]) if self.repeating else self._settings.batch_groups
        if self._recording or done.step != self.step:
            raise MismatchError(f"step {done.step} is done, step {self.step} was expected")
        if not len(done.group_ids) == len(self._delivered) == expected or set(done.group_ids) != set(self._delivered):
            raise MismatchError(
                f"step {done.step} took {len(done.group_ids)} groups, not the {expected} that it was given"
            )
        if len(done.advantages) not in (0, 4 * expected * self._settings.group_size):
            raise MismatchError(f"step {done.step} has {len(done.advantages)} bytes of advantages")
        if not all(map(self._planner.knows, done.states)):
            raise MismatchError(f"step {done.step} names a state that no group had")
        if not all(before < behind for before, behind in pairwise((0, *done.micro_steps, expected))):
            raise MismatchError(f"step {done.step} of {expected} groups had micro-steps behind {[*done.micro_steps]}")

    def _consume(self, done: pb.StepDone) -> StepSummary:
        groups = [self._groups[group_id] for group_id in done.group_ids]
        summary = self._summarize(done, groups)
        for group in groups:
            self._groups.follow(group, GroupEvent.CONSUME)
            self._groups.record(group)
        if not self.repeating:
            self._compositions[self.step] = tuple(done.group_ids)
            self._window.advance()
        return summary

    def _summarize(self, done: pb.StepDone, groups: Sequence[Group]) -> StepSummary:
        reissued, dropped, dropped_of, failures = self._counted
        dropped_now = self._groups.dropped.copy(), self._groups.dropped_of.copy()
        self._counted = self._fleet.reissued, *dropped_now, self._lifecycle.failures.copy()
        stats = [group.stats for group in groups if group.stats is not None]
        assert len(stats) == len(groups), "a group that was not scored is in a step"
        staleness = Counter(done.step - group.start_version for group in groups if group.start_version is not None)
        return StepSummary(
            attempt=self.attempt,
            step=done.step,
            stats=add_up(stats),
            tasks=self._tasks(groups, dropped=self._counted[2] - dropped_of),
            staleness_histogram=dict(sorted(staleness.items())),
            trainer_metrics=dict(done.metrics),
            reissued_samples=self._counted[0] - reissued,
            dropped_groups=self._counted[1] - dropped,
            score_failures=self._counted[3] - failures,
        )

    def _tasks(self, groups: Sequence[Group], *, dropped: Mapping[str, int]) -> dict[str, TaskSummary]:
        """What each task of a mixture had in a step."""
        of: dict[str, list[SampleStats]] = {task.name: [] for task in self._settings.mixture}
        for group in groups if of else ():
            assert group.stats is not None
            of[self._settings.task_name(group.prompt_index)].append(group.stats)
        return {
            name: TaskSummary(groups=len(stats), stats=add_up(stats), dropped_groups=dropped.get(name, 0))
            for name, stats in of.items()
        }

    def _recorded(self, summary: StepSummary) -> None:
        self.last_step = summary
        if summary.attempt != self.attempt:
            return  # a new attempt began meanwhile; it repeats the step
        self._recording = False
        self._delivered.clear()
        self._idle_cause = ""
        self.step = summary.step + 1
        if self._connected:
            self._outbox.to_trainer(pb.TrainerCommand(step_recorded=pb.StepRecorded(step=summary.step)))

    def checkpointed(self, checkpointed: pb.Checkpointed) -> None:
        """A checkpoint is on disk: the groups of steps before the oldest one kept can go."""
        if checkpointed.step > self.step:
            raise MismatchError(f"checkpoint of step {checkpointed.step}, but only {self.step} steps are recorded")
        if checkpointed.path:
            self.newest_checkpoint = (checkpointed.step, checkpointed.path)
        if checkpointed.oldest_step <= self.checkpoint_step:
            return
        self.checkpoint_step = checkpointed.oldest_step
        for step in [step for step in self._compositions if step < self.checkpoint_step]:
            for group_id in self._compositions.pop(step):
                self._groups.forget(group_id)
        self._outbox.write(Checkpointed(step=self.checkpoint_step, path=checkpointed.path))

    # ---- the trainer comes and goes

    def give(self, size_bytes: int) -> None:
        """The trainer can take so many more bytes."""
        self._credit += size_bytes
        self._largest_credit = max(self._largest_credit, self._credit)

    def left(self) -> None:
        """The link is broken; what the trainer held it may still hold."""
        self._connected = self._held_out_told = False
        self._credit = self._largest_credit = 0
        self._idle_cause = ""
        self._waits_with = None

    def knows(self, hello: pb.TrainerHello) -> bool:
        """Whether this is the process of the current attempt."""
        return self.attempt > 0 and hello.instance == self._instance

    def begin(self, hello: pb.TrainerHello) -> None:
        """A new process: a new attempt, from its checkpoint."""
        self.left()
        if hello.step != hello.checkpoint_step:
            raise MismatchError(
                f"a new trainer begins at its checkpoint {hello.checkpoint_step}, not at step {hello.step}"
            )
        if not self.checkpoint_step <= hello.step <= self._window.step:
            raise HistoryError(
                f"the trainer's checkpoint is of step {hello.step}, but the journal can go on from steps "
                f"{self.checkpoint_step} to {self._window.step} only{self._cause(hello.step)}"
            )
        self._roll_back(hello.step)
        self.newest_checkpoint = None
        self.attempt += 1
        self._instance = hello.instance
        self._durable = False
        self._connected = True
        attempt = self.attempt
        self._outbox.write(
            AttemptStarted(attempt=attempt, instance=hello.instance, step=hello.step),
            then=lambda: self._attempt_durable(attempt),
        )

    def _cause(self, step: int) -> str:
        url = self._settings.copies_url
        if step < self.checkpoint_step:
            places = "on its disk" if url is None else f"on its disk and in {url}"
            return f": later ones are not {places}; put one back from a copy, or start a new run"
        if url is None:
            return ""
        fix = "start anew in a folder of another name, or delete those copies and this folder first"
        return f": the copies in {url} may be of an earlier run whose folder had the same name; {fix}"

    def _attempt_durable(self, attempt: int) -> None:
        if attempt == self.attempt:
            self._durable = True
            if self._connected:
                self._welcome()

    def _roll_back(self, step: int) -> None:
        """Everything since `step` is taken again."""
        for group_id in [] if self._recording else list(self._delivered):
            self._take_back(self._groups[group_id])
        self._delivered.clear()
        self._recording = False
        for undone, group_ids in self._compositions.items():
            for group in (self._groups[group_id] for group_id in group_ids if undone >= step):
                if group.state is GroupState.CONSUMED:
                    self._groups.follow(group, GroupEvent.ROLL_BACK)
        self.step = step

    def resume(self, hello: pb.TrainerHello) -> None:
        """The same process again: agree on what it holds."""
        self.left()
        self._connected = True
        if not self._durable:
            return  # welcomed when the attempt is durable
        unrecorded = hello.unrecorded_step if hello.HasField("unrecorded_step") else None
        done_now = unrecorded is not None and unrecorded.step == self.step
        if hello.step != self.step + (1 if done_now else 0):
            raise MismatchError(f"the trainer goes on with step {hello.step}, the journal with step {self.step}")
        if not self._recording:
            self._agree(unrecorded.group_ids if done_now and unrecorded is not None else hello.held_groups)
        self._welcome()
        if unrecorded is not None and not self._recording:
            self.step_done(unrecorded)

    def _agree(self, told: Sequence[int]) -> None:
        """Make the trainer's word true. If the end is feasible, so is every state on the way (docs/staleness.md)."""
        held = dict.fromkeys(told)
        for group_id in [group_id for group_id in self._delivered if group_id not in held]:
            self._take_back(self._groups[group_id])
        missing = [self._groups.get(group_id) for group_id in held if group_id not in self._delivered]
        for group in self._known(missing):
            if not self.repeating and not self._window.may_deliver(group.start_version or 0):
                raise MismatchError(f"group {group.group_id} cannot be in step {self.step}")
            self._mark_delivered(group)

    def _known(self, groups: Iterable[Group | None]) -> list[Group]:
        reserved = set(self._compositions[self.step]) if self.repeating else None
        known = []
        for group in groups:
            if group is None or group.state is not GroupState.SCORED:
                raise MismatchError("the trainer holds a group that the journal does not have as scored")
            if (group.serial is None) if reserved is None else (group.group_id not in reserved):
                raise MismatchError(f"group {group.group_id} does not belong to step {self.step}")
            known.append(group)
        return known

    def _welcome(self) -> None:
        welcome = pb.TrainerWelcome(
            attempt=self.attempt,
            batch_groups=self._settings.batch_groups,
            lease_seconds=self._settings.lease_s,
            held_out_samples=self._held_out.wanted,
        )
        self._outbox.to_trainer(pb.TrainerCommand(welcome=welcome))


class ReadyGroups:
    """Groups that may be delivered as far as their own state goes."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, Group]] = {}
        """Version -> its groups by serial, rising; versions without a group are left out."""
        self._serial = 0

    @property
    def counts(self) -> dict[int, int]:
        """Version -> groups; versions without a group are left out."""
        return {version: len(groups) for version, groups in self._groups.items()}

    @property
    def total(self) -> int:
        """All of them."""
        return sum(map(len, self._groups.values()))

    def put(self, group: Group) -> None:
        """The group goes to the end."""
        assert group.start_version is not None, f"group {group.group_id} has not begun"
        assert group.serial is None, f"group {group.group_id} is ready already"
        group.serial = self._serial
        self._serial += 1
        self._groups.setdefault(group.start_version, {})[group.serial] = group

    def take(self, group: Group) -> None:
        """The group goes to the trainer; one that is not in here (a recorded step's) is left alone."""
        if group.serial is None:
            return
        assert group.start_version is not None, f"group {group.group_id} has not begun"
        groups = self._groups[group.start_version]
        del groups[group.serial]
        group.serial = None
        if not groups:
            del self._groups[group.start_version]

    def first(self, may_deliver: Callable[[int], bool]) -> Group | None:
        """The group that came first among those of versions which `may_deliver` accepts."""
        heads = [next(iter(groups.items())) for version, groups in self._groups.items() if may_deliver(version)]
        return min(heads)[1] if heads else None
