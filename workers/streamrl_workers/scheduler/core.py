"""The scheduler's decisions: takes one event, changes its state, returns what is to be done.

Owns the whole state of a run between two events. Synchronous and pure: no I/O, no clock (`now_s` comes with the
event), no randomness. `server/` brings the events and carries the effects out in order. Each module decides one thing:

    groups/planning   which groups are planned       groups/staleness   who may begin, who may be delivered
    assignment        who takes what                 groups/lifecycle   a group from planned to scored
    evaluation        which weights, how good        trainer_feed      trainer, steps, attempts
    dispatch/         in which order                 lending           who is paused while the trainer computes

Invariants: each group in exactly one step of the history, or dropped with a reason; staleness at most S; every method leaves a state in
which nothing that can be done now is left undone, except what `in_portions` speaks of.
"""

from collections.abc import Mapping, Sequence

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.assignment import Assignment
from streamrl_workers.scheduler.components import CoreView, StepSummary, make_components, pool_view, pool_views, speeds
from streamrl_workers.scheduler.dispatch import Order, policy
from streamrl_workers.scheduler.dispatch.speeds import Curves, Reading
from streamrl_workers.scheduler.dispatcher import Dispatcher
from streamrl_workers.scheduler.effects import AskRanker, Effect, Failed, Finished
from streamrl_workers.scheduler.evaluation import GROUP_BASE, Announcer
from streamrl_workers.scheduler.fleet import Generator
from streamrl_workers.scheduler.groups.life import GroupEvent, GroupState
from streamrl_workers.scheduler.groups.supervised import HeldOutSamples
from streamrl_workers.scheduler.groups.table import restore
from streamrl_workers.scheduler.lending import Lending
from streamrl_workers.scheduler.lengths import Lengths
from streamrl_workers.scheduler.rebalancing import Rebalancer
from streamrl_workers.scheduler.records import Dropped, Evaluated, Recovered, RunEnded
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.scheduler.trainer_feed import HistoryError, MismatchError, TrainerFeed
from streamrl_workers.scheduler.versions.turns import WeightTurns
from streamrl_workers.tasks.values import Prompt, Score, TurnAnswer

MIN_DROPS_TO_FAIL = 16
"""So many groups dropped in a row (or two batches, if that is more) and none scored: the run is not getting anywhere."""


class Core:
    """Every method takes one event and returns its effects, in order."""

    def __init__(
        self,
        settings: SchedulerSettings,
        recovered: Recovered,
        *,
        first_lease: int = 1,
        lengths: Lengths | None = None,
        curves: Curves | None = None,
        epoch_s: float = 0.0,
    ) -> None:
        """Take up a run where its journal ends; `Recovered()` is an empty one.

        Args:
            settings: the job.
            recovered: what the journal holds.
            first_lease: leases are numbered from here; no number of an earlier scheduler of the run.
            lengths: what predicts completion lengths; None: the signals of the job, over the journal's history.
            curves: what is known of the pools' speed; None: nothing, it is measured.
            epoch_s: Unix time at which the events' `now_s` is 0.
        """
        self._settings = settings
        self._recovered = recovered
        self._components = make_components(settings, recovered, first_lease=first_lease, lengths=lengths, curves=curves)
        self._components.fleet.epoch_s = epoch_s
        self._outbox = self._components.outbox
        self._held_out = HeldOutSamples(settings)
        self._feed = TrainerFeed(self._components, recovered, held_out=self._held_out)
        self._announcer = Announcer(
            self._outbox,
            fleet=self._components.fleet,
            evaluator=self._components.evaluator,
            turns=WeightTurns() if settings.shares_uplink else None,
            only_due=settings.supervised,
        )
        self._feed.is_held_by = self._announcer.is_due
        lengths = self._components.lifecycle.lengths
        self._dispatcher = Dispatcher(
            policy(settings.dispatch, settings.dispatch_options),
            waiting=self._components.waiting,
            fleet=self._components.fleet,
            groups=self._components.groups,
            group_size=settings.group_size,
            overlaps=settings.staleness > 0,
            lengths=lengths,
        )
        self._assignment = Assignment(self._components)
        self._looks = [Lending(self._components, trainer_waits=lambda: self._feed.trainer_waits).look]
        if settings.rebalance is not None:
            self._looks.append(Rebalancer(self._components, options=settings.rebalance, lengths=lengths).look)
        self._components.lifecycle.on_scored = self._feed.scored
        self._exported = self._failed = self._is_due = False  # due: events were left unsettled
        self._ending = self._ended = recovered.ended
        self._ignored_progress = 0

    def start(self, now_s: float) -> list[Effect]:
        """First call, once. A run that had ended already answers Finished."""
        self._components.fleet.now_s = now_s
        if self._ended:
            return [Finished(step=self._recovered.step)]
        self._restore()
        self._components.evaluator.need_prompts()
        self._components.evaluator.tick(now_s)
        return self._settle()

    def tick(self, now_s: float) -> list[Effect]:
        """Call several times a lease: silent generators, deadlines, repeated announcements."""
        self._components.fleet.now_s = now_s
        for generator in self._components.fleet.connected:
            if not generator.silent and now_s - generator.heard_s > self._settings.lease_s:
                self._revoke(generator, cancel=True)
                generator.silent = True
                self._components.fleet.settle(generator)
            if generator.failed:
                generator.failed, generator.told = False, None
                self._announcer.changed()
        self._components.evaluator.tick(now_s)
        return self._settle()

    @property
    def in_portions(self) -> bool:
        """Whether there is more to do now, too much for one event: call `go_on`, behind what has come meanwhile."""
        portions = self._is_due or self._assignment.in_portions or self._components.lifecycle.in_portions
        return portions and not (self._ending or self._failed)

    def go_on(self) -> list[Effect]:
        """The next portion."""
        return self._settle()

    # ---- task pool

    def prompts_arrived(self, prompts: Sequence[Prompt]) -> list[Effect]:
        """Answer to NeedPrompts, in any portions."""
        for prompt in prompts:
            if prompt.split == "held_out":
                self._components.evaluator.arrived(prompt)
                self._held_out.arrived(prompt)
            else:
                self._components.planner.arrived(prompt)
                self._components.lifecycle.lengths.expect(prompt.text)
        if self._held_out.fault:
            self._fail(self._held_out.fault)
        return self._settle()

    def prompts_ranked(self, scores: Mapping[int, float]) -> list[Effect]:
        """Answers to AskRanker: scores by prompt key, in any portions."""
        self._components.lifecycle.lengths.ranked(scores)
        return self._settle()

    def scores_arrived(self, scores: Sequence[Score]) -> list[Effect]:
        """Answers to ScoreSample."""
        for score in scores:
            if score.group_id >= GROUP_BASE:
                self._components.evaluator.scored(score)
            else:
                self._components.lifecycle.scored(score)
        return self._settle()

    def turns_answered(self, answers: Sequence[TurnAnswer]) -> list[Effect]:
        """Answers to PlayTurn."""
        for answer in answers:
            if answer.group_id >= GROUP_BASE:
                self._components.evaluator.answered(answer)
            else:
                self._components.evaluator.slots_move()
                self._components.lifecycle.answered(answer)
        return self._settle()

    # ---- journal

    def committed(self, sequence: int) -> list[Effect]:
        """Every Write up to `sequence` is durable. At most one step becomes recorded in one call: `last_step`."""
        self._outbox.committed(sequence)
        return self._settle()

    # ---- generators

    def generator_joined(self, hello: pb.GeneratorHello, *, now_s: float) -> list[Effect]:
        """A generator has said hello; the first command to it is GeneratorWelcome. It is taken to hold nothing."""
        self._remove(hello.generator_id)
        self._components.fleet.join(hello, now_s=now_s)
        self._announcer.sources.joined(hello)
        welcome = pb.GeneratorWelcome(lease_seconds=self._settings.lease_s)
        self._outbox.to_generator(hello.generator_id, pb.GeneratorCommand(welcome=welcome))
        self._announcer.changed()
        return self._soon()

    def generator_left(self, generator_id: str) -> list[Effect]:
        """The link is closed: what the generator held is issued again."""
        self._remove(generator_id)
        self._announcer.changed()
        return self._soon()

    def generator_progress(self, generator_id: str, *, items: Sequence[pb.Progress], now_s: float) -> list[Effect]:
        """Tokens and finished samples."""
        if self._heard(generator_id, now_s) is None:
            return []
        for item in items:
            self._progress(generator_id, item)
        return self._settle()

    def generator_alive(self, generator_id: str, *, now_s: float, reading: Reading | None = None) -> list[Effect]:
        """A heartbeat; `reading`: what it says of the generator's speed."""
        was_silent = self.is_silent(generator_id)
        generator = self._heard(generator_id, now_s)
        if generator is not None and reading is not None:
            self._components.fleet.beat(generator, reading)
        return self._settle() if was_silent else []

    def weights_loaded(self, generator_id: str, *, version: pb.VersionName, now_s: float) -> list[Effect]:
        """The generator's next tokens are of this version."""
        generator = self._heard(generator_id, now_s)
        if generator is not None:
            self._components.fleet.loaded(generator, (version.attempt, version.step))
            self._announcer.weights_loaded(generator, (version.attempt, version.step))
        return self._soon()

    def weights_failed(self, generator_id: str, *, version: pb.VersionName, now_s: float) -> list[Effect]:
        """The generator keeps its version, or generates nothing if it could not; it is told again at the next tick."""
        generator = self._heard(generator_id, now_s)
        if generator is not None:
            generator.failed = generator.told == (version.attempt, version.step)
            if version.step == generator.highest_told:
                generator.highest_told = -1
                self._announcer.changed()
            if generator.failed:
                self._announcer.weights_failed(generator)
        return self._settle()

    def weights_stalled(self, generator_id: str, *, stalled: pb.WeightsStalled, now_s: float) -> list[Effect]:
        """Nothing comes from the source that the generator was told of: it may be given another one."""
        generator = self._heard(generator_id, now_s)
        version = stalled.version.attempt, stalled.version.step
        if generator is not None and (generator.told, generator.told_address) == (version, stalled.address):
            self._announcer.weights_failed(generator)
            self._announcer.sources.stalled(generator_id)
            self._announcer.changed()
        return self._settle()

    def generator_leaving(self, generator_id: str, *, now_s: float) -> list[Effect]:
        """The generator finishes what it holds, takes nothing more, and goes."""
        generator = self._heard(generator_id, now_s)
        if generator is not None:
            generator.leaving = True
            self._components.fleet.settle(generator)
            self._outbox.to_generator(generator_id, pb.GeneratorCommand(drain=pb.Drain()))
        return self._settle()

    def generator_drained(self, generator_id: str, *, now_s: float) -> list[Effect]:
        """The generator holds nothing and takes nothing more."""
        generator = self._heard(generator_id, now_s)
        if generator is not None:
            self._revoke(generator, cancel=False)
            generator.drained = True
            self._components.fleet.settle(generator)
        return self._settle()

    # ---- trainer

    def trainer_joined(self, hello: pb.TrainerHello) -> list[Effect]:
        """Answered by TrainerWelcome once the attempt is durable, or by Restart; by nothing behind the end, when the shell tells everybody.

        After every Welcome the trainer says Credit and Published (of its own version) again.
        """
        if not self._ended:
            self._join(hello)
        return self._settle()

    def trainer_left(self) -> list[Effect]:
        """The link is closed."""
        self._feed.left()
        return self._settle()

    def _join(self, hello: pb.TrainerHello) -> None:
        try:
            if self._feed.knows(hello):
                self._feed.resume(hello)
            else:
                self._feed.begin(hello)
                self._announcer.clear()
            self._assignment.open = True
        except MismatchError as error:
            self._restart_trainer(error)
        except HistoryError as error:
            self._fail(str(error))

    def credit(self, size_bytes: int) -> list[Effect]:
        """The trainer can take so many more bytes of groups."""
        self._feed.give(size_bytes)
        return self._settle()

    def trainer_waits(self, waits: pb.TrainerWaits) -> list[Effect]:
        """The trainer has nothing to compute; said anew whenever that begins, and over each connection."""
        self._feed.waits(waits)
        return self._settle()

    def step_done(self, done: pb.StepDone) -> list[Effect]:
        """The trainer has taken a step; StepRecorded follows when that is durable."""
        try:
            self._feed.step_done(done)
        except MismatchError as error:
            self._restart_trainer(error)
        return self._settle()

    def published(self, published: pb.Published, *, address: str) -> list[Effect]:
        """The trainer serves this version at `address` (host:port)."""
        if published.version.attempt == self._feed.attempt:
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
            self._feed.checkpointed(checkpointed)
            self._exported |= checkpointed.exported and checkpointed.step >= self._settings.steps
        except MismatchError as error:
            self._restart_trainer(error)
        return self._settle()

    # ---- what others read

    @property
    def newest_step(self) -> int:
        """Newest weight version that a generator can have."""
        return self._components.window.step

    @property
    def last_step(self) -> StepSummary | None:
        """Summary of the newest step recorded by this scheduler."""
        return self._feed.last_step

    @property
    def last_evaluation(self) -> Evaluated | None:
        """Newest evaluation recorded by this scheduler."""
        return self._components.evaluator.last

    @property
    def order(self) -> Order:
        """In which order what waits is taken now, and why."""
        return self._components.waiting.order

    def view(self) -> CoreView:
        """The state in numbers."""
        parts, announced, evaluating = self._components, self._announcer.announced, self._components.evaluator.version
        return CoreView(
            attempt=self._feed.attempt,
            step=self._feed.step,
            steps=self._settings.steps,
            lengths=parts.lifecycle.lengths,
            ended=self._ended,
            groups_by_state={state.value: parts.groups.counts[state] for state in GroupState},
            waiting_samples=parts.waiting.samples + parts.evaluator.waiting,
            active_leases=parts.fleet.leases,
            buffered_bytes=parts.groups.buffered_bytes,
            delivered_groups=self._feed.delivered,
            buffered_groups=self._feed.buffered,
            fleet=pool_view(parts.fleet),
            pools=pool_views(parts.fleet.connected),
            order=self.order,
            speeds=speeds(parts.fleet),
            cluster_turns={} if self._announcer.turns is None else self._announcer.turns.view(),
            announced_step=None if announced is None else announced[1],
            evaluating_step=None if evaluating is None else evaluating[1],
            checkpoint=self._feed.newest_checkpoint,
            prompts_ready=parts.planner.ready,
            ignored_progress=self._ignored_progress,
            reissued_samples=parts.fleet.reissued,
            moved_samples=parts.lifecycle.moved,
            dropped_groups=dict(parts.groups.dropped),
            dropped_groups_of=dict(parts.groups.dropped_of),
            score_failures=dict(parts.lifecycle.failures),
        )

    def is_silent(self, generator_id: str) -> bool:
        """Whether the generator is connected and was not heard for a lease."""
        return (one := self._components.fleet.get(generator_id)) is not None and one.silent

    # ---- inside: generators

    def _heard(self, generator_id: str, now_s: float) -> Generator | None:
        self._components.fleet.now_s = now_s
        generator = self._components.fleet.get(generator_id)
        if generator is not None:
            generator.heard_s = now_s
            if generator.silent:
                generator.silent = False
                self._components.fleet.settle(generator)
        return generator

    def _progress(self, generator_id: str, item: pb.Progress) -> None:
        lease = self._components.fleet.find(item.lease, generator_id=generator_id)
        if lease is None:
            self._ignored_progress += 1
            if not item.finish_reason:
                self._outbox.cancel(generator_id, item.lease)
        elif lease.evaluation:
            self._components.evaluator.progress(lease, item)
        else:
            self._components.evaluator.slots_move()
            self._components.lifecycle.progress(lease, item, newest_step=self._components.window.step)

    def _revoke(self, generator: Generator, *, cancel: bool) -> None:
        for lease in list(generator.leases.values()):
            if lease.number not in generator.leases:
                continue  # its group was dropped with another sample of this generator
            if cancel:
                self._outbox.cancel(generator.generator_id, lease.number)
            if lease.evaluation:
                self._components.evaluator.lost(lease)
            else:
                self._components.lifecycle.lost(lease)

    def _remove(self, generator_id: str) -> None:
        generator = self._components.fleet.get(generator_id)
        if generator is not None:
            self._revoke(generator, cancel=False)
            self._components.fleet.remove(generator_id)
            self._announcer.sources.left(generator_id)
            self._outbox.forget(generator_id)

    # ---- inside: the whole

    def _restore(self) -> None:
        parts, planned = self._components, []
        for group in restore(self._recovered):
            if group.state is GroupState.PLANNED:
                planned.append(group)
            elif not group.recorded and not parts.window.may_begin(group.start_version or 0):
                self._outbox.write(Dropped(group_id=group.group_id, reason=GroupEvent.TOO_STALE.value))
                parts.groups.count_drop(group, GroupEvent.TOO_STALE)
                continue
            parts.groups.add(group)
            if group.state is GroupState.SCORED and not group.recorded:
                self._feed.scored(group)
        parts.planner.restore(planned)

    def _soon(self) -> list[Effect]:
        """Settle with the next portion: what bears on all generators comes from thousands at once, and is done once for those that have come."""
        self._is_due = True
        return self._outbox.take()

    def _settle(self) -> list[Effect]:
        """Do everything that the event has made possible."""
        self._is_due = False
        if not (self._ending or self._failed):
            self._components.lifecycle.complete()
            self._announcer.advance(recorded_steps=self._feed.step)
            self._components.planner.plan()
            self._feed.deliver()
            self._dispatcher.refresh()
            for look in self._looks:
                look()
            self._assignment.fill()
            self._ask_ranker()
            self._fail_if_hopeless()
            self._end_if_done()
        return self._outbox.take()

    def _ask_ranker(self) -> None:
        prompts, pairs = self._components.lifecycle.lengths.take_questions()
        if prompts or pairs:
            self._outbox.add(AskRanker(prompts=prompts, pairs=pairs))

    def _fail_if_hopeless(self) -> None:
        row = self._components.groups.drops_in_a_row
        if row.total() >= max(MIN_DROPS_TO_FAIL, 2 * self._settings.batch_groups):
            error = self._components.lifecycle.last_error or "no error was given"
            self._fail(f"{row.total()} groups in a row could not be used ({', '.join(row)}): {error}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._outbox.add(Failed(reason=reason))

    def _end_if_done(self) -> None:
        step, evaluator = self._feed.step, self._components.evaluator  # past the last one where `steps` was lowered
        if step < self._settings.steps or not self._exported or evaluator.version is not None or evaluator.due(step):
            return
        self._ending = self._assignment.ended = True
        self._outbox.write(RunEnded(step=step, version_hash=self._announcer.hash_of(step)), then=self._end)

    def _end(self) -> None:
        self._ended = True
        for group in self._components.groups:
            if not group.recorded:
                self._components.groups.drop(group, GroupEvent.RUN_ENDED)
        self._outbox.add(Finished(step=self._feed.step))

    def _restart_trainer(self, error: MismatchError) -> None:
        self._feed.left()
        self._outbox.to_trainer(pb.TrainerCommand(restart=pb.Restart(reason=str(error))))
