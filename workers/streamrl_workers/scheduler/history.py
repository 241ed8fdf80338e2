"""The trainer's attempts, the recorded steps, and the way back after a restart.

    trainer_joined -> AttemptStarted durable -> Welcome -> groups ... StepDone -> StepTaken durable -> StepRecorded -> groups of the next step

Owns the number of the attempt, which groups each recorded step took, and what the trainer may claim when it connects. Does not own which
group is sent next (`delivery.py`). A new attempt repeats the steps after its checkpoint with exactly the recorded groups; the staleness
window speaks of the first step without a record alone.

`restore` gives each group of the journal the state in which it starts:
    in the record of a step            consumed, or scored if the step is repeated
    scored, in no record               scored, ready for delivery
    only planned                       planned; its text is requested and it is generated again
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.delivery import Delivery, TrainerLink
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.generators import Fleet
from streamrl_workers.scheduler.model import Group, GroupEvent, GroupState, GroupTable, ScoredGroup, add_up
from streamrl_workers.scheduler.planning import Planner
from streamrl_workers.scheduler.records import (
    AttemptStarted,
    Checkpointed,
    Recovered,
    SampleStats,
    StepTaken,
)
from streamrl_workers.scheduler.sample import ScoreFailures
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.scheduler.views import StepSummary, TaskSummary


class StepStates(Protocol):
    """Takes the states that a step names, from which later groups may begin."""

    def check(self, done: pb.StepDone) -> str:
        """Return why the states cannot be; empty: they can."""

    def take(self, done: pb.StepDone) -> None:
        """Take the states."""


class MismatchError(Exception):
    """The trainer's history and the journal do not fit; the trainer must return to its checkpoint."""


class HistoryError(Exception):
    """The trainer's checkpoint and the journal can never fit: the run cannot continue."""


class History:
    """Attempts and recorded steps."""

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        recovered: Recovered,
        *,
        groups: GroupTable,
        fleet: Fleet,
        link: TrainerLink,
        delivery: Delivery,
        failures: ScoreFailures,
        states: StepStates | None,
        welcome: pb.TrainerWelcome,
    ) -> None:
        """Continue the history of the journal.

        Args:
            failures: scores that failed.
            states: takes the states of steps; None: steps have no states.
            welcome: fields that extensions set in the message that welcomes a trainer.
        """
        self._settings = settings
        self._outbox = outbox
        self._groups = groups
        self._window = groups.window
        self._fleet = fleet
        self._link = link
        self._delivery = delivery
        self._failures = failures
        self._states = states
        self._task_names = settings.tasks.names
        self._welcome_fields = welcome
        self.attempt = recovered.attempt
        self._instance = recovered.instance
        self._oldest_checkpoint = recovered.checkpoint_step
        self._counted: tuple[int, Counter[str], Counter[str], Counter[str]] = 0, Counter(), Counter(), Counter()
        """Reissued samples, dropped groups by reason and by task, samples without a reward, as of the step before."""
        self.last_step: StepSummary | None = None
        self.newest_checkpoint: tuple[int, str] | None = None
        """Step and path of the newest checkpoint that the trainer has reported."""

    # ---- steps

    def step_done(self, done: pb.StepDone) -> None:
        """Record a step that the trainer has taken with the groups that it holds."""
        if done.step < self._link.step:
            self._outbox.to_trainer(pb.TrainerCommand(step_recorded=pb.StepRecorded(step=done.step)))
            return
        self._check(done)
        if self._states is not None and not self._delivery.replaying:
            self._states.take(done)
        self._outbox.write(
            StepTaken(
                attempt=self.attempt,
                step=done.step,
                group_ids=tuple(done.group_ids),
                metrics=dict(done.metrics),
                advantages=done.advantages,
                version_hash=done.version_hash,
                micro_steps=tuple(done.micro_steps),
                cuts=done.cuts.SerializeToString(),
            ),
            then=partial(self._recorded, self._consume(done)),
        )
        self._link.recording = True

    def _check(self, done: pb.StepDone) -> None:
        step, held = self._link.step, self._link.held
        replaying = self._delivery.replaying
        expected = len(self._link.compositions[step]) if replaying else self._settings.batch_groups
        if self._link.recording or done.step != step:
            raise MismatchError(f"step {done.step} is done, step {step} was expected")
        if not len(done.group_ids) == len(held) == expected or set(done.group_ids) != set(held):
            raise MismatchError(
                f"step {done.step} took {len(done.group_ids)} groups, not the {expected} that it was given"
            )
        if len(done.advantages) not in (0, 4 * expected * self._settings.group_size):
            raise MismatchError(f"step {done.step} has {len(done.advantages)} bytes of advantages")
        if self._states is not None and (wrong := self._states.check(done)):
            raise MismatchError(wrong)
        if not all(first < second for first, second in pairwise((0, *done.micro_steps, expected))):
            raise MismatchError(
                f"step {done.step} of {expected} groups had micro-steps that end at {[*done.micro_steps]}"
            )

    def _consume(self, done: pb.StepDone) -> StepSummary:
        groups = [self._groups.by_id[group_id] for group_id in done.group_ids]
        summary = self._summarize(done, groups)
        for group in groups:
            self._groups.consume(group)
        self._link.cuts[self._link.step] = done.cuts.SerializeToString()
        if not self._delivery.replaying:
            self._link.compositions[self._link.step] = tuple(done.group_ids)
            self._window.advance()
        return summary

    def _recorded(self, summary: StepSummary) -> None:
        self.last_step = summary
        if summary.attempt != self.attempt:
            return  # a new attempt has begun; it repeats the step
        self._link.recording = False
        self._delivery.next_step()
        self._link.step = summary.step + 1
        if self._link.connected:
            self._outbox.to_trainer(pb.TrainerCommand(step_recorded=pb.StepRecorded(step=summary.step)))

    def checkpointed(self, checkpointed: pb.Checkpointed) -> None:
        """Forget the groups of steps before the oldest checkpoint that is kept."""
        if checkpointed.step > self._link.step:
            raise MismatchError(
                f"checkpoint of step {checkpointed.step}, but only {self._link.step} steps are recorded"
            )
        if checkpointed.path:
            self.newest_checkpoint = (checkpointed.step, checkpointed.path)
        if checkpointed.oldest_step <= self._oldest_checkpoint:
            return
        self._oldest_checkpoint = checkpointed.oldest_step
        compositions = self._link.compositions
        for step in [step for step in compositions if step < self._oldest_checkpoint]:
            self._link.cuts.pop(step, None)
            for group_id in compositions.pop(step):
                self._groups.forget(group_id)
        self._outbox.write(Checkpointed(step=self._oldest_checkpoint, path=checkpointed.path))

    # ---- the trainer connects

    def knows(self, hello: pb.TrainerHello) -> bool:
        """Return whether this is the process of the current attempt."""
        return self.attempt > 0 and hello.instance == self._instance

    def disconnect(self) -> None:
        """Note that the connection is lost; the trainer may still hold what it held."""
        self._link.connected = False
        self._delivery.disconnected()

    def begin(self, hello: pb.TrainerHello) -> None:
        """Begin a new attempt, of a new process, at its checkpoint."""
        self.disconnect()
        if hello.step != hello.checkpoint_step:
            raise MismatchError(
                f"a new trainer begins at its checkpoint {hello.checkpoint_step}, not at step {hello.step}"
            )
        if not self._oldest_checkpoint <= hello.step <= self._window.step:
            raise HistoryError(
                f"the trainer's checkpoint is of step {hello.step}, but the journal can continue from steps "
                f"{self._oldest_checkpoint} to {self._window.step} only{self._cause(hello.step)}"
            )
        self._roll_back(hello.step)
        self.newest_checkpoint = None
        self.attempt += 1
        self._instance = hello.instance
        self._link.durable = False
        self._connect()
        attempt = self.attempt
        self._outbox.write(
            AttemptStarted(attempt=attempt, instance=hello.instance, step=hello.step),
            then=lambda: self._attempt_durable(attempt),
        )

    def _connect(self) -> None:
        self._link.connected = True
        self._link.connections += 1

    def _cause(self, step: int) -> str:
        url = self._settings.copies_url
        if step < self._oldest_checkpoint:
            places = "on its disk" if url is None else f"on its disk and in {url}"
            return f": later ones are not {places}; put one back from a copy, or start a new run"
        if url is None:
            return ""
        fix = "start a new run in a folder of another name, or delete those copies and this folder first"
        return f": the copies in {url} may be of an earlier run whose folder had the same name; {fix}"

    def _attempt_durable(self, attempt: int) -> None:
        if attempt == self.attempt:
            self._link.durable = True
            if self._link.connected:
                self._welcome()

    def _roll_back(self, step: int) -> None:
        """Make `step` and all later steps repeated ones."""
        self._delivery.take_back([] if self._link.recording else list(self._link.held))
        self._link.held.clear()
        self._link.recording = False
        for undone, group_ids in self._link.compositions.items():
            for group in (self._groups[group_id] for group_id in group_ids if undone >= step):
                if group.state is GroupState.CONSUMED:
                    self._groups.follow(group, GroupEvent.ROLL_BACK)
        self._link.step = step

    def resume(self, hello: pb.TrainerHello) -> None:
        """Continue with the same process: agree on what it holds."""
        self.disconnect()
        self._connect()
        if not self._link.durable:
            return  # welcomed when the attempt is durable
        unrecorded = hello.unrecorded_step if hello.HasField("unrecorded_step") else None
        done_now = unrecorded is not None and unrecorded.step == self._link.step
        if hello.step != self._link.step + (1 if done_now else 0):
            raise MismatchError(
                f"the trainer continues with step {hello.step}, the journal with step {self._link.step}"
            )
        if not self._link.recording:
            self._agree(unrecorded.group_ids if done_now and unrecorded is not None else hello.held_groups)
        self._welcome()
        if unrecorded is not None and not self._link.recording:
            self.step_done(unrecorded)

    def _agree(self, claimed: Sequence[int]) -> None:
        """Take over which groups the trainer claims to hold. If the end is feasible, so is every state on the way (docs/reference/staleness.md)."""
        held = dict.fromkeys(claimed)
        self._delivery.take_back([group_id for group_id in self._link.held if group_id not in held])
        missing = [self._groups.by_id.get(group_id) for group_id in held if group_id not in self._link.held]
        for group in self._known(missing):
            if not self._delivery.replaying and not self._window.may_deliver(group.start_version or 0):
                raise MismatchError(f"group {group.group_id} cannot be in step {self._link.step}")
            self._delivery.mark_held(group)

    def _known(self, groups: Iterable[Group | None]) -> list[Group]:
        step = self._link.step
        reserved = set(self._link.compositions[step]) if self._delivery.replaying else None
        known = []
        for group in groups:
            if group is None or group.state is not GroupState.SCORED:
                raise MismatchError("the trainer holds a group that the journal does not have as scored")
            belongs = self._delivery.is_ready(group) if reserved is None else group.group_id in reserved
            if not belongs:
                raise MismatchError(f"group {group.group_id} does not belong to step {step}")
            known.append(group)
        return known

    def _welcome(self) -> None:
        welcome = pb.TrainerWelcome(
            attempt=self.attempt,
            batch_groups=self._settings.batch_groups,
            lease_seconds=self._settings.lease_s,
            cuts={
                step: pb.PassCuts.FromString(self._link.cuts.get(step, b""))
                for step in self._link.compositions
                if step >= self._link.step
            },
        )
        welcome.MergeFrom(self._welcome_fields)
        self._outbox.to_trainer(pb.TrainerCommand(welcome=welcome))

    # ---- what a step was made of

    def _summarize(self, done: pb.StepDone, groups: Sequence[Group]) -> StepSummary:
        reissued, dropped, dropped_of, failures = self._counted
        dropped_now = self._groups.dropped.copy(), self._groups.dropped_of.copy()
        self._counted = self._fleet.reissued, *dropped_now, self._failures.counts.copy()
        staleness = Counter([done.step - group.start_version for group in groups if group.start_version is not None])
        return StepSummary(
            attempt=self.attempt,
            step=done.step,
            stats=add_up([_stats(group) for group in groups]),
            tasks=self._tasks(groups, dropped=self._counted[2] - dropped_of),
            staleness_histogram=dict(sorted(staleness.items())),
            trainer_metrics=dict(done.metrics),
            reissued_samples=self._counted[0] - reissued,
            dropped_groups=self._counted[1] - dropped,
            score_failures=self._counted[3] - failures,
        )

    def _tasks(self, groups: Sequence[Group], *, dropped: Mapping[str, int]) -> dict[str, TaskSummary]:
        """Return what each task had in a step; empty: the job has one task."""
        of: dict[str, list[SampleStats]] = {name: [] for name in self._task_names}
        for group in groups if of else ():
            of[group.task.name].append(_stats(group))
        return {
            name: TaskSummary(groups=len(stats), stats=add_up(stats), dropped_groups=dropped.get(name, 0))
            for name, stats in of.items()
        }


def _stats(group: Group) -> SampleStats:
    assert group.result is not None, f"group {group.group_id} is in a step and was not scored"
    assert group.result.stats is not None, f"group {group.group_id} is in a step and was not scored"
    return group.result.stats


def first_unrecorded(recovered: Recovered) -> int:
    """Return the first step without a record."""
    return max(recovered.step, max(recovered.compositions, default=-1) + 1)


def restore(recovered: Recovered, *, planner: Planner) -> Iterator[Group]:
    """Yield the journal's groups, each in the state in which it starts."""
    steps = {group_id: step for step, group_ids in recovered.compositions.items() for group_id in group_ids}
    for found in recovered.groups:
        step = steps.get(found.group_id)
        is_scored = step is not None or bool(found.trajectories)
        assert not is_scored or found.start_version is not None, f"group {found.group_id} is scored, but has no version"
        group = planner.new_group(found.group_id, prompt_index=found.prompt_index)
        if is_scored:
            group.start_version = found.start_version
            group.result = ScoredGroup(samples=found.trajectories, size_bytes=found.size_bytes, stats=found.stats)
            group.state = GroupState.SCORED
        if step is not None:
            group.recorded = True
            group.state = GroupState.CONSUMED if step < recovered.step else GroupState.SCORED
        yield group
