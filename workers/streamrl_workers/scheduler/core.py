"""The scheduler's decisions: takes one event, changes its state, returns what is to be done.

Owns the whole state of a run between two events. Synchronous and pure: no I/O, no clock (`now_s` comes
with the event), no randomness. The shell brings events (`service.py`, `shell/`) and carries the effects
out in order (`shell/executor.py`). The parts decide one thing each:

    prompts.py      which groups are planned            staleness.py    who may begin, who may be handed over
    assignment.py   who takes what                      production.py   a group from planned to scored
    evaluation.py   held-out evaluation                 announce.py     which weights generators use
    handover.py     trainer, steps, attempts            life.py         which event may follow which state
    dispatch/       in which order, and on which side
    rebalancing/    what goes on elsewhere

Invariants: those of design.md section 7, numbers 1 and 2 first of all; every method leaves a state in
which nothing that can be done now is left undone.
"""

from collections.abc import Mapping, Sequence

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.accounting import StepSummary
from streamrl_workers.scheduler.announce import Announcer
from streamrl_workers.scheduler.assignment import Assignment
from streamrl_workers.scheduler.core_view import CoreView
from streamrl_workers.scheduler.dispatch import Plan, policy
from streamrl_workers.scheduler.dispatch.measured import Curves, Reading
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER
from streamrl_workers.scheduler.dispatch.replanning import Replanning
from streamrl_workers.scheduler.effects import (
    Dropped,
    Effect,
    Evaluated,
    Failed,
    Finished,
    GeneratorInfo,
    Prompt,
    Recovered,
    RunEnded,
    Score,
    TurnAnswer,
)
from streamrl_workers.scheduler.evaluation import GROUP_BASE, PATIENCE_LEASES, Evaluator
from streamrl_workers.scheduler.fleet import Fleet, Generator, welcome
from streamrl_workers.scheduler.groups import GroupTable
from streamrl_workers.scheduler.handover import HandOver, HistoryError, MismatchError
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths
from streamrl_workers.scheduler.lengths.asking import Asking
from streamrl_workers.scheduler.life import Event, State
from streamrl_workers.scheduler.outbox import Outbox
from streamrl_workers.scheduler.parts import Parts
from streamrl_workers.scheduler.pool_view import pool_view, pool_views, speeds
from streamrl_workers.scheduler.production import Production
from streamrl_workers.scheduler.prompts import Planner
from streamrl_workers.scheduler.rebalancing import Rebalancer
from streamrl_workers.scheduler.recovery import frontier, restore
from streamrl_workers.scheduler.settings import Settings
from streamrl_workers.scheduler.staleness import Window
from streamrl_workers.scheduler.waiting import WaitingGroups

MIN_DROPS_TO_FAIL = 16
"""So many groups dropped in a row (or two batches, if that is more) and none scored: the run is not getting anywhere."""


class Core:
    """Every method takes one event and returns its effects, in order."""

    def __init__(
        self,
        settings: Settings,
        recovered: Recovered,
        *,
        first_lease: int = 1,
        lengths: Lengths | None = None,
        curves: Curves | None = None,
    ) -> None:
        """Take up a run where its journal ends; `replay([])` is an empty one.

        Args:
            settings: the job.
            recovered: what the journal holds.
            first_lease: leases are numbered from here; above every number of an earlier scheduler of the run.
            lengths: what predicts completion lengths; None: the signals of the job, over the journal's history.
            curves: what is known of the pools' speed; None: nothing, it is measured.
        """
        self._settings = settings
        self._recovered = recovered
        self._parts = _make_parts(settings, recovered, first_lease=first_lease, lengths=lengths, curves=curves)
        self._outbox = self._parts.outbox
        self._handover = HandOver(self._parts, recovered)
        self._announcer = Announcer(self._outbox, fleet=self._parts.fleet, evaluator=self._parts.evaluator)
        self._replanning = Replanning(
            policy(settings.dispatch, settings.dispatch_options),
            waiting=self._parts.waiting,
            fleet=self._parts.fleet,
            groups=self._parts.groups,
            group_size=settings.group_size,
            overlap=settings.staleness,
            lengths=self._parts.production.lengths,
        )
        self._assignment = Assignment(self._parts)
        self._asking = Asking(self._parts)
        self._rebalancer = Rebalancer(self._parts)
        self._parts.production.on_scored = self._handover.scored
        self._exported = False
        self._ending = recovered.ended
        self._ended = recovered.ended
        self._failed = False
        self._ignored_progress = 0

    def start(self, now_s: float) -> list[Effect]:
        """First call, once. A run that had ended already answers Finished."""
        self._parts.fleet.now_s = now_s
        if self._ended:
            return [Finished(step=self._recovered.step)]
        self._restore()
        self._parts.evaluator.need_prompts()
        self._parts.evaluator.tick(now_s, patience_s=self._patience_s)
        return self._settle()

    def tick(self, now_s: float) -> list[Effect]:
        """Call several times a lease: silent generators, deadlines, repeated announcements."""
        self._parts.fleet.now_s = now_s
        for generator in self._parts.fleet:
            if not generator.silent and now_s - generator.heard_s > self._settings.lease_s:
                self._revoke(generator, cancel=True)
                generator.silent = True
                self._parts.fleet.settle(generator)
            if generator.failed:
                generator.failed, generator.told = False, None
                self._announcer.changed()
        self._parts.evaluator.tick(now_s, patience_s=self._patience_s)
        return self._settle()

    # ---- task pool

    def prompts_arrived(self, prompts: Sequence[Prompt]) -> list[Effect]:
        """Answer to NeedPrompts, in any portions."""
        for prompt in prompts:
            if prompt.split == "held_out":
                self._parts.evaluator.arrived(prompt)
            else:
                self._parts.planner.arrived(prompt)
                self._parts.production.lengths.expect(prompt.text)
        return self._settle()

    def prompts_ranked(self, scores: Mapping[int, float]) -> list[Effect]:
        """Answers to AskRanker: scores by prompt key, in any portions."""
        self._asking.answered(scores)
        return self._settle()

    def rank_some(self) -> list[Effect]:
        """Answer to RankSome: one portion of what the ranker has put off."""
        self._asking.work()
        return self._settle()

    def scores_arrived(self, scores: Sequence[Score]) -> list[Effect]:
        """Answers to ScoreSample."""
        for score in scores:
            if score.group_id >= GROUP_BASE:
                self._parts.evaluator.scored(score)
            else:
                self._parts.production.scored(score)
        return self._settle()

    def turns_answered(self, answers: Sequence[TurnAnswer]) -> list[Effect]:
        """Answers to PlayTurn."""
        for answer in answers:
            if answer.group_id >= GROUP_BASE:
                self._parts.evaluator.answered(answer)
            else:
                self._parts.evaluator.slots_move()
                self._parts.production.answered(answer)
        return self._settle()

    # ---- journal

    def committed(self, sequence: int) -> list[Effect]:
        """Every Write up to `sequence` is durable. At most one step becomes recorded in one call: `last_step`."""
        self._outbox.committed(sequence)
        return self._settle()

    # ---- generators

    def generator_joined(self, info: GeneratorInfo, *, now_s: float) -> list[Effect]:
        """A generator has said hello; the first command to it is GeneratorWelcome. It is taken to hold nothing."""
        self._remove(info.generator_id)
        self._parts.fleet.join(info, now_s=now_s)
        self._outbox.to_generator(info.generator_id, welcome(self._settings.lease_s))
        self._announcer.changed()
        return self._settle()

    def generator_left(self, generator_id: str, *, reason: str, now_s: float) -> list[Effect]:
        """The link is closed: what the generator held is issued again."""
        self._remove(generator_id)
        self._announcer.changed()
        return self._settle()

    def generator_progress(self, generator_id: str, *, items: Sequence[pb.Progress], now_s: float) -> list[Effect]:
        """Tokens and finished samples."""
        if self._heard(generator_id, now_s) is None:
            return []
        for item in items:
            self._progress(generator_id, item)
        return self._settle()

    def generator_alive(self, generator_id: str, *, now_s: float, reading: Reading | None = None) -> list[Effect]:
        """A heartbeat; `reading`: what it says of the generator's speed."""
        self._parts.fleet.now_s = now_s
        generator = self._parts.fleet.get(generator_id)
        if generator is not None and reading is not None:
            self._parts.fleet.beat(generator, reading)
        if generator is None or not generator.silent:
            if generator is not None:
                generator.heard_s = now_s
            return []
        self._heard(generator_id, now_s)
        return self._settle()

    def weights_loaded(self, generator_id: str, *, version: pb.VersionName, now_s: float) -> list[Effect]:
        """The generator's next tokens are of this version."""
        generator = self._heard(generator_id, now_s)
        if generator is not None:
            self._parts.fleet.loaded(generator, (version.attempt, version.step))
            self._announcer.changed()
        return self._settle()

    def weights_failed(self, generator_id: str, *, version: pb.VersionName, error: str, now_s: float) -> list[Effect]:
        """The generator keeps its version; it is told again at the next tick."""
        generator = self._heard(generator_id, now_s)
        if generator is not None:
            generator.failed = generator.told == (version.attempt, version.step)
            if version.step == generator.highest_told:
                generator.highest_told = -1
                self._announcer.changed()
        return self._settle()

    def generator_leaving(self, generator_id: str, *, now_s: float) -> list[Effect]:
        """The generator finishes what it holds, takes nothing more, and goes."""
        generator = self._heard(generator_id, now_s)
        if generator is not None:
            generator.leaving = True
            self._parts.fleet.settle(generator)
            self._outbox.to_generator(generator_id, pb.GeneratorCommand(drain=pb.Drain()))
        return self._settle()

    def generator_drained(self, generator_id: str, *, now_s: float) -> list[Effect]:
        """The generator holds nothing and takes nothing more."""
        generator = self._heard(generator_id, now_s)
        if generator is not None:
            self._revoke(generator, cancel=False)
            generator.drained = True
            self._parts.fleet.settle(generator)
        return self._settle()

    # ---- trainer

    def trainer_joined(self, hello: pb.TrainerHello, *, now_s: float) -> list[Effect]:
        """Answered by TrainerWelcome once the attempt is durable, or by Restart; by nothing behind the end, when the shell tells everybody.

        After every Welcome the trainer says Credit and Published (of its own version) again.
        """
        if self._ended:
            return self._settle()
        try:
            if self._handover.knows(hello):
                self._handover.resume(hello)
            else:
                self._handover.begin(hello)
                self._announcer.clear()
            self._assignment.open = True
        except MismatchError as error:
            self._restart_trainer(error)
        except HistoryError as error:
            self._fail(str(error))
        return self._settle()

    def trainer_left(self, *, now_s: float) -> list[Effect]:
        """The link is closed."""
        self._handover.left()
        return self._settle()

    def credit(self, size_bytes: int) -> list[Effect]:
        """The trainer can take so many more bytes of groups."""
        self._handover.give(size_bytes)
        return self._settle()

    def step_done(self, done: pb.StepDone) -> list[Effect]:
        """The trainer has taken a step; StepRecorded follows when that is durable."""
        try:
            self._handover.step_done(done)
        except MismatchError as error:
            self._restart_trainer(error)
        return self._settle()

    def published(self, published: pb.Published, *, address: str) -> list[Effect]:
        """The trainer serves this version at `address` (host:port)."""
        if published.version.attempt == self._handover.attempt:
            self._announcer.published(published.version, address=address)
        return self._settle()

    def sync_journal(self, sync: pb.SyncJournal) -> list[Effect]:
        """JournalSynced comes out of this call or of a later `committed`."""
        command = pb.TrainerCommand(journal_synced=pb.JournalSynced(step=sync.step))
        self._outbox.when_all_durable(lambda: self._outbox.to_trainer(command))
        return self._settle()

    def checkpointed(self, checkpointed: pb.Checkpointed) -> list[Effect]:
        """A checkpoint is on disk; `exported`: the model of the last step as well."""
        try:
            self._handover.checkpointed(checkpointed)
        except MismatchError as error:
            self._restart_trainer(error)
        else:
            self._exported |= checkpointed.exported and checkpointed.step == self._settings.steps
        return self._settle()

    # ---- what metrics read

    @property
    def last_step(self) -> StepSummary | None:
        """Summary of the newest step recorded by this scheduler."""
        return self._handover.last_step

    @property
    def last_evaluation(self) -> Evaluated | None:
        """Newest evaluation recorded by this scheduler."""
        return self._parts.evaluator.last

    @property
    def plan(self) -> Plan:
        """How dispatch goes now, and why."""
        return self._parts.waiting.plan

    def view(self) -> CoreView:
        """The state in numbers."""
        parts, announced, evaluating = self._parts, self._announcer.announced, self._parts.evaluator.version
        return CoreView(
            attempt=self._handover.attempt,
            step=self._handover.step,
            steps=self._settings.steps,
            lengths=parts.production.lengths.view(),
            ended=self._ended,
            groups_by_state={state.value: parts.groups.counts[state] for state in State},
            waiting_samples=parts.waiting.samples + parts.evaluator.waiting,
            active_leases=parts.fleet.leases,
            buffered_bytes=parts.groups.buffered_bytes,
            handed_groups=self._handover.handed,
            buffered_groups=self._handover.buffered,
            fleet=pool_view(parts.fleet),
            pools=pool_views(parts.fleet),
            plan=self.plan,
            speeds=speeds(parts.fleet),
            announced_step=None if announced is None else announced[1],
            evaluating_step=None if evaluating is None else evaluating[1],
            checkpoint=self._handover.newest_checkpoint,
            prompts_ready=parts.planner.ready,
            ignored_progress=self._ignored_progress,
            reissued_samples=parts.production.reissued,
            moved_samples=parts.production.moved,
            dropped_groups=dict(parts.groups.dropped),
            score_failures=dict(parts.production.failures),
        )

    # ---- inside: generators

    def _heard(self, generator_id: str, now_s: float) -> Generator | None:
        self._parts.fleet.now_s = now_s
        generator = self._parts.fleet.get(generator_id)
        if generator is not None:
            generator.heard_s = now_s
            if generator.silent:
                generator.silent = False
                self._parts.fleet.settle(generator)
        return generator

    def _progress(self, generator_id: str, item: pb.Progress) -> None:
        lease = self._parts.fleet.find(item.lease, generator_id=generator_id)
        if lease is None:
            self._ignored_progress += 1
            if not item.finish_reason:
                self._outbox.cancel(generator_id, item.lease)
        elif lease.evaluation:
            self._parts.evaluator.progress(lease, item)
        else:
            self._parts.evaluator.slots_move()
            self._parts.production.progress(lease, item, newest_step=self._parts.window.step)

    def _revoke(self, generator: Generator, *, cancel: bool) -> None:
        for lease in list(generator.leases.values()):
            if lease.number not in generator.leases:
                continue  # its group was dropped with another sample of this generator
            if cancel:
                self._outbox.cancel(generator.generator_id, lease.number)
            if lease.evaluation:
                self._parts.evaluator.lost(lease)
            else:
                self._parts.production.lost(lease)

    def _remove(self, generator_id: str) -> None:
        generator = self._parts.fleet.get(generator_id)
        if generator is not None:
            self._revoke(generator, cancel=False)
            self._parts.fleet.remove(generator_id)
            self._outbox.forget(generator_id)

    # ---- inside: the whole

    def _restore(self) -> None:
        parts, restored = self._parts, restore(self._recovered)
        for group in [*restored.recorded, *restored.planned]:
            parts.groups.add(group)
        for group in restored.scored:
            if group.begun is not None and parts.window.may_begin(group.begun):
                parts.groups.add(group)
                self._handover.scored(group)
            else:
                self._outbox.write(Dropped(group_id=group.group_id, reason=Event.TOO_STALE.value))
                parts.groups.dropped[Event.TOO_STALE.value] += 1
        parts.planner.restore(restored.planned)

    def _settle(self) -> list[Effect]:
        """Do everything that the event has made possible."""
        if not (self._ending or self._failed):
            self._announcer.advance(recorded_steps=self._handover.step)
            self._parts.planner.plan()
            self._handover.hand_over()
            self._replanning.refresh()
            self._rebalancer.look()
            self._assignment.fill()
            self._asking.ask()
            self._fail_if_hopeless()
            self._end_if_done()
        return self._outbox.take()

    def _fail_if_hopeless(self) -> None:
        row = self._parts.groups.drops_in_a_row
        if row.total() >= max(MIN_DROPS_TO_FAIL, 2 * self._settings.batch_groups):
            error = self._parts.production.last_error or "no error was given"
            self._fail(f"{row.total()} groups in a row could not be used ({', '.join(row)}): {error}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._outbox.add(Failed(reason=reason))

    def _end_if_done(self) -> None:
        steps, evaluator = self._settings.steps, self._parts.evaluator
        if self._handover.step < steps or not self._exported or evaluator.version is not None or evaluator.due(steps):
            return
        self._ending = self._assignment.ended = True
        self._outbox.write(RunEnded(step=steps), then=self._end)

    def _end(self) -> None:
        self._ended = True
        for group in self._parts.groups:
            if not group.recorded:
                self._parts.groups.drop(group, Event.RUN_ENDED)
        self._outbox.add(Finished(step=self._settings.steps))

    def _restart_trainer(self, error: MismatchError) -> None:
        self._handover.left()
        self._outbox.to_trainer(pb.TrainerCommand(restart=pb.Restart(reason=str(error))))

    @property
    def _patience_s(self) -> float:
        return PATIENCE_LEASES * self._settings.lease_s


def _make_parts(
    settings: Settings, recovered: Recovered, *, first_lease: int, lengths: Lengths | None, curves: Curves | None
) -> Parts:
    outbox = Outbox()
    window = Window(batch_groups=settings.batch_groups, staleness=settings.staleness, step=frontier(recovered))
    groups = GroupTable(window)
    fleet = Fleet(first_lease=first_lease, curves=curves)
    if lengths is None:
        lengths = Lengths(LengthHistory(recovered.prompt_lengths), signals=settings.length_signals)
    waiting = WaitingGroups(groups, plan=IN_ORDER, lengths=lengths, batch_groups=settings.batch_groups)
    first = recovered.next_group_id
    production = Production(settings, outbox, groups=groups, fleet=fleet, waiting=waiting, lengths=lengths)
    return Parts(
        settings=settings,
        outbox=outbox,
        groups=groups,
        window=window,
        fleet=fleet,
        waiting=waiting,
        production=production,
        evaluator=Evaluator(
            settings, outbox, fleet=fleet, done=recovered.evaluated_steps, failures=production.failures
        ),
        planner=Planner(settings, outbox, groups=groups, window=window, waiting=waiting, first=first),
    )
