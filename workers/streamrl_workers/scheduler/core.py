"""The scheduler's decisions: takes one event, changes its state, returns what must be done.

Owns the whole state of a run between two events. Synchronous and pure: no I/O, no clock (`now_s` comes with the event), no randomness.
`server/` brings the events and carries the effects out in order. After each event the core settles, in this order:

    1. serialize scored groups          `rollout.py`     SampleLifecycle
    2. announce weights                 `weights.py`     WeightAnnouncer
    3. plan groups                      `planning.py`    Planner
    4. deliver groups to the trainer    `delivery.py`    Delivery
    5. order what waits                 `planning.py`    Dispatcher
    6. extensions of the job            `extensions/`
    7. fill free slots                  `rollout.py`     Assignment
    8. fail or end the run

`model.py` has the values, `sample.py` one completion, `generators.py` the generators and their leases, `evaluation.py` held-out evaluation,
`history.py` attempts and recorded steps, `views.py` the state in numbers.

Invariants: each group is in exactly one step of the history, or dropped with a reason; staleness is at most S; after every event nothing that can
be done now is left undone, except what `has_more` announces.
"""

from collections.abc import Mapping, Sequence

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import extensions
from streamrl_workers.scheduler.delivery import (
    Delivery,
    InArrivalOrder,
    ReadyGroups,
    RecordedSteps,
    TrainerLink,
    WholeBatches,
)
from streamrl_workers.scheduler.dispatch import Order, policy
from streamrl_workers.scheduler.dispatch.order import IN_ORDER
from streamrl_workers.scheduler.dispatch.speeds import Curves, Reading
from streamrl_workers.scheduler.effects import Effect, Failed, Finished, Outbox
from streamrl_workers.scheduler.evaluation import Evaluator, is_evaluated
from streamrl_workers.scheduler.generators import Fleet, Generator
from streamrl_workers.scheduler.history import History, HistoryError, MismatchError, first_unrecorded, restore
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths
from streamrl_workers.scheduler.model import GroupEvent, GroupState, GroupTable, Window
from streamrl_workers.scheduler.planning import Dispatcher, Planner, PromptGroups, WaitingGroups
from streamrl_workers.scheduler.records import Dropped, Evaluated, Recovered, RunEnded
from streamrl_workers.scheduler.rollout import Assignment, SampleLifecycle
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.scheduler.views import CoreView, StepSummary, pool_view, pool_views, speeds
from streamrl_workers.scheduler.weights import WeightAnnouncer
from streamrl_workers.tasks.values import Prompt, Score, TurnAnswer

MIN_DROPS_TO_FAIL = 16
"""The run fails after max(16, 2 batches) consecutive drops without a group that could be scored."""


class Core:
    """Each method takes one event and returns its effects, in order."""

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
        """Continue a run where its journal ends; `Recovered()` is an empty journal.

        Args:
            settings: the job.
            recovered: what the journal holds.
            first_lease: number of the first lease; not a number of an earlier scheduler of the run.
            lengths: predicts completion lengths; None: by the signals of the job, from the journal's history.
            curves: what is known of the pools' speed; None: nothing, it is measured.
            epoch_s: Unix time at which the events' `now_s` is 0.
        """
        self._settings = settings
        self._recovered = recovered
        self._exported = self._failed = self._settle_is_due = False
        self._ending = self._ended = recovered.ended
        self._ignored_progress = 0
        outbox = self._outbox = Outbox()
        # the values of the run
        window = Window(
            batch_groups=settings.batch_groups, staleness=settings.staleness, step=first_unrecorded(recovered)
        )
        groups = self._groups = GroupTable(window, rewards_alone=extensions.awaits_rewards_alone(settings))
        fleet = self._fleet = Fleet(
            first_lease=first_lease,
            curves=curves,
            reserved_pools=extensions.reserved_pools(settings),
            shared_pools=extensions.shared_pools(settings),
            epoch_s=epoch_s,
        )
        if lengths is None:
            lengths = Lengths(LengthHistory(recovered.prompt_lengths), signals=settings.dispatch.length_signals)
        # samples
        waiting = self._waiting = WaitingGroups(
            groups, order=IN_ORDER, lengths=lengths, batch_groups=settings.batch_groups
        )
        ready = ReadyGroups()
        lifecycle = self._lifecycle = SampleLifecycle(
            settings,
            outbox,
            groups=groups,
            fleet=fleet,
            waiting=waiting,
            lengths=lengths,
            on_scored=ready.put,
            stages=extensions.sample_stages(settings, outbox, groups=groups, fleet=fleet),
            filters=extensions.group_filters(settings),
        )
        evaluator = self._evaluator = Evaluator(
            settings,
            outbox,
            fleet=fleet,
            done=recovered.evaluated_steps,
            failures=lifecycle.failures,
            kv=lifecycle.kv,
            trainer_waits=extensions.only_evaluates(settings),
        )
        self._weights = WeightAnnouncer(
            outbox,
            fleet=fleet,
            evaluator=evaluator,
            turns=extensions.weight_turns(settings),
            only_evaluated=extensions.only_evaluates(settings),
        )
        self._wire_groups()
        self._wire_trainer(ready)

    def _wire_groups(self) -> None:
        """Make what plans groups and orders them."""
        settings, groups, fleet, waiting = self._settings, self._groups, self._fleet, self._waiting
        first, lifecycle = self._recovered.next_group_id, self._lifecycle
        prompts = PromptGroups(group_size=settings.group_size, waiting=waiting)
        states = self._states = extensions.step_states(settings, waiting=waiting, first=first)
        default = extensions.default_source(settings, prompts, groups=groups, fleet=fleet, lifecycle=lifecycle)
        self._planner = Planner(
            settings,
            self._outbox,
            groups=groups,
            sources=[default] if states is None else [states, default],
            first=first,
        )
        self._dispatcher = Dispatcher(
            policy(settings.dispatch.policy, settings.dispatch.options),
            waiting=waiting,
            fleet=fleet,
            groups=groups,
            group_size=settings.group_size,
            overlaps=settings.staleness > 0,
            lengths=lifecycle.lengths,
        )
        self._assignment = Assignment(
            settings,
            self._outbox,
            groups=groups,
            fleet=fleet,
            waiting=waiting,
            planner=self._planner,
            lifecycle=lifecycle,
            evaluator=self._evaluator,
            step_cause=extensions.step_cause(settings),
        )

    def _wire_trainer(self, ready: ReadyGroups) -> None:
        """Make what gives groups to the trainer, and the extensions."""
        settings, outbox, groups, window = self._settings, self._outbox, self._groups, self._groups.window
        link = TrainerLink(
            step=self._recovered.step, compositions=dict(self._recovered.compositions), cuts=dict(self._recovered.cuts)
        )
        order = extensions.ordered(
            settings,
            InArrivalOrder(window=window, ready=ready),
            groups=groups,
            ready=ready,
            link=link,
        )
        if settings.delivery.whole_batches:
            order = WholeBatches(window=window, ready=ready, link=link, then=order)
        order = RecordedSteps(link=link, groups=groups, then=order)
        delivery = self._delivery = Delivery(
            settings,
            outbox,
            groups=groups,
            link=link,
            ready=ready,
            order=extensions.gated(settings, order, link=link, is_due=self._weights.is_due),
            idle_cause=extensions.step_cause(settings),
        )
        self._history = History(
            settings,
            outbox,
            self._recovered,
            groups=groups,
            fleet=self._fleet,
            link=link,
            delivery=delivery,
            failures=self._lifecycle.failures,
            states=self._states,
            welcome=extensions.welcome(settings),
        )
        parts = extensions.CoreParts(
            outbox=outbox,
            groups=groups,
            fleet=self._fleet,
            waiting=self._waiting,
            lifecycle=self._lifecycle,
            evaluator=self._evaluator,
            link=link,
            delivery=delivery,
            fail=self._fail,
        )
        self._ready, self._link = ready, link
        self._extensions = extensions.extensions(settings, parts)

    def start(self, now_s: float) -> list[Effect]:
        """Make the first call, once. A run that had ended already answers Finished."""
        self._fleet.now_s = now_s
        if self._ended:
            return [Finished(step=self._recovered.step)]
        self._restore()
        self._evaluator.need_prompts()
        self._evaluator.tick(now_s)
        return self._settle()

    def tick(self, now_s: float) -> list[Effect]:
        """Call several times a lease: unresponsive generators, deadlines, repeated announcements."""
        self._fleet.now_s = now_s
        for generator in self._fleet.connected.values():
            if not generator.unresponsive and now_s - generator.last_seen_s > self._settings.lease_s:
                self._revoke(generator, cancel=True)
                generator.unresponsive = True
                self._fleet.settle(generator)
            self._weights.retry(generator)
        self._evaluator.tick(now_s)
        return self._settle()

    @property
    def has_more(self) -> bool:
        """Whether work is left for `resume`: too much for one event. Call it after the events that have come meanwhile."""
        more = self._settle_is_due or self._assignment.has_more or self._lifecycle.has_more
        return more and not (self._ending or self._failed)

    def resume(self) -> list[Effect]:
        """Do the next portion."""
        return self._settle()

    # ---- task pool

    def prompts_arrived(self, prompts: Sequence[Prompt]) -> list[Effect]:
        """Take answers to NeedPrompts, in any portions."""
        for prompt in prompts:
            if prompt.split == "held_out":
                self._evaluator.arrived(prompt)
            else:
                self._planner.arrived(prompt)
                self._lifecycle.lengths.expect(prompt.text)
        return self._settle()

    def prompts_ranked(self, scores: Mapping[int, float]) -> list[Effect]:
        """Take answers to AskRanker: scores by prompt key, in any portions."""
        self._lifecycle.lengths.ranked(scores)
        return self._settle()

    def scores_arrived(self, scores: Sequence[Score]) -> list[Effect]:
        """Take answers to ScoreSample."""
        for score in scores:
            (self._evaluator if is_evaluated(score.group_id) else self._lifecycle).scored(score)
        return self._settle()

    def turns_answered(self, answers: Sequence[TurnAnswer]) -> list[Effect]:
        """Take answers to PlayTurn."""
        for answer in answers:
            if is_evaluated(answer.group_id):
                self._evaluator.answered(answer)
            else:
                self._evaluator.progressed = True
                self._lifecycle.answered(answer)
        return self._settle()

    # ---- journal

    def committed(self, sequence: int) -> list[Effect]:
        """Note that every Write up to `sequence` is durable. At most one step becomes recorded in one call: `last_step`."""
        self._outbox.committed(sequence)
        return self._settle()

    # ---- generators

    def generator_joined(self, hello: pb.GeneratorHello, *, now_s: float) -> list[Effect]:
        """Add a generator, assumed to hold no samples; the first command to it is GeneratorWelcome."""
        self._remove(hello.generator_id)
        self._fleet.join(hello, now_s=now_s)
        welcome = pb.GeneratorWelcome(lease_seconds=self._settings.lease_s)
        self._outbox.to_generator(hello.generator_id, pb.GeneratorCommand(welcome=welcome))
        self._weights.joined(hello)
        return self._defer_settle()

    def generator_left(self, generator_id: str) -> list[Effect]:
        """Remove a generator whose connection is closed: what it held is issued again."""
        self._remove(generator_id)
        self._weights.changed()
        return self._defer_settle()

    def generator_progress(self, generator_id: str, *, items: Sequence[pb.Progress], now_s: float) -> list[Effect]:
        """Take tokens and finished samples."""
        generator = self._fleet.seen(generator_id, now_s=now_s)
        if generator is None:
            return []
        for item in items:
            self._progress(generator, item)
        return self._settle()

    def generator_alive(self, generator_id: str, *, now_s: float, reading: Reading | None = None) -> list[Effect]:
        """Take a heartbeat; `reading`: what it says of the generator's speed."""
        was_unresponsive = self.is_unresponsive(generator_id)
        generator = self._fleet.seen(generator_id, now_s=now_s)
        if generator is not None and reading is not None:
            self._fleet.heartbeat(generator, reading)
        return self._settle() if was_unresponsive else []

    def weights_loaded(self, generator_id: str, *, version: pb.VersionName, now_s: float) -> list[Effect]:
        """Note that the generator's next tokens are of this version."""
        generator = self._fleet.seen(generator_id, now_s=now_s)
        if generator is not None:
            self._weights.loaded(generator, (version.attempt, version.step))
        return self._defer_settle()

    def weights_failed(self, generator_id: str, *, version: pb.VersionName, now_s: float) -> list[Effect]:
        """Note that the generator keeps its version, or has none; the next tick announces the version again."""
        generator = self._fleet.seen(generator_id, now_s=now_s)
        if generator is not None:
            self._weights.failed(generator, (version.attempt, version.step))
        return self._settle()

    def weights_stalled(self, generator_id: str, *, stalled: pb.WeightsStalled, now_s: float) -> list[Effect]:
        """Note that nothing comes from the source that was announced: the generator may get another one."""
        generator = self._fleet.seen(generator_id, now_s=now_s)
        if generator is not None:
            version = stalled.version.attempt, stalled.version.step
            self._weights.stalled(generator, version, address=stalled.address)
        return self._settle()

    def generator_leaving(self, generator_id: str, *, now_s: float) -> list[Effect]:
        """Note that the generator finishes what it holds, takes nothing more, and goes."""
        generator = self._fleet.seen(generator_id, now_s=now_s)
        if generator is not None:
            generator.leaving = True
            self._fleet.settle(generator)
            self._outbox.to_generator(generator_id, pb.GeneratorCommand(drain=pb.Drain()))
        return self._settle()

    def generator_drained(self, generator_id: str, *, now_s: float) -> list[Effect]:
        """Note that the generator holds nothing and takes nothing more."""
        generator = self._fleet.seen(generator_id, now_s=now_s)
        if generator is not None:
            self._revoke(generator, cancel=False)
            generator.leaving = True
            self._fleet.settle(generator)
        return self._settle()

    # ---- trainer

    def trainer_joined(self, hello: pb.TrainerHello) -> list[Effect]:
        """Answer with TrainerWelcome once the attempt is durable, or with Restart; with nothing after the end, when the shell stops everybody.

        After every Welcome the trainer sends Credit and Published (of its own version) again.
        """
        if not self._ended:
            self._join(hello)
        return self._settle()

    def trainer_left(self) -> list[Effect]:
        """Note that the connection is closed."""
        self._history.disconnect()
        return self._settle()

    def _join(self, hello: pb.TrainerHello) -> None:
        try:
            if self._history.knows(hello):
                self._history.resume(hello)
            else:
                self._history.begin(hello)
                self._weights.clear()
            self._assignment.open = True
        except MismatchError as error:
            self._restart_trainer(error)
        except HistoryError as error:
            self._fail(str(error))

    def credit(self, size_bytes: int) -> list[Effect]:
        """Note that the trainer has room for this many more bytes of groups."""
        self._delivery.add_credit(size_bytes)
        return self._settle()

    def trainer_waits(self, waits: pb.TrainerWaits) -> list[Effect]:
        """Note that the trainer has nothing to compute; it reports this whenever it begins, and over each connection."""
        self._delivery.waits(waits)
        return self._settle()

    def step_done(self, done: pb.StepDone) -> list[Effect]:
        """Note that the trainer has taken a step; StepRecorded follows when that is durable."""
        try:
            self._history.step_done(done)
        except MismatchError as error:
            self._restart_trainer(error)
        return self._settle()

    def published(self, published: pb.Published, *, address: str) -> list[Effect]:
        """Note that the trainer serves this version at `address` (host:port)."""
        if published.version.attempt == self._history.attempt:
            self._weights.published(published.version, address=address)
        return self._settle()

    def sync_journal(self, sync: pb.SyncJournal) -> list[Effect]:
        """Answer with JournalSynced, in this call or in a later `committed`."""
        command = pb.TrainerCommand(journal_synced=pb.JournalSynced(step=sync.step))
        self._outbox.when_all_durable(lambda: self._outbox.to_trainer(command))
        return self._settle()

    def checkpointed(self, checkpointed: pb.Checkpointed) -> list[Effect]:
        """Note that a checkpoint is on disk; `exported`: the model of the last step as well."""
        try:
            self._history.checkpointed(checkpointed)
            self._exported |= checkpointed.exported and checkpointed.step >= self._settings.steps
        except MismatchError as error:
            self._restart_trainer(error)
        return self._settle()

    # ---- what others read

    @property
    def newest_step(self) -> int:
        """Newest weight version that a generator can have."""
        return self._groups.window.step

    @property
    def last_step(self) -> StepSummary | None:
        """Summary of the newest step recorded by this scheduler."""
        return self._history.last_step

    @property
    def last_evaluation(self) -> Evaluated | None:
        """Newest evaluation recorded by this scheduler."""
        return self._evaluator.last

    @property
    def order(self) -> Order:
        """In which order what waits is taken now, and why."""
        return self._waiting.order

    def view(self) -> CoreView:
        """Return the state in numbers."""
        groups, fleet, lifecycle = self._groups, self._fleet, self._lifecycle
        announced, evaluating = self._weights.announced, self._evaluator.version
        return CoreView(
            attempt=self._history.attempt,
            step=self._link.step,
            steps=self._settings.steps,
            lengths=lifecycle.lengths,
            ended=self._ended,
            groups_by_state={state.value: groups.counts[state] for state in GroupState},
            waiting_samples=self._waiting.samples + len(self._evaluator.queue),
            active_leases=len(fleet.leases),
            buffered_bytes=groups.buffered_bytes,
            delivered_groups=len(self._link.held),
            buffered_groups=self._delivery.buffered,
            undelivered=self._delivery.why,
            fleet=pool_view(fleet),
            pools=pool_views(fleet.connected.values()),
            order=self.order,
            speeds=speeds(fleet),
            cluster_turns={} if self._weights.turns is None else self._weights.turns.view(),
            announced_step=None if announced is None else announced[1],
            evaluating_step=None if evaluating is None else evaluating[1],
            checkpoint=self._history.newest_checkpoint,
            prompts_ready=len(self._planner.ready),
            ignored_progress=self._ignored_progress,
            reissued_samples=fleet.reissued,
            moved_samples=lifecycle.moved,
            dropped_groups=dict(groups.dropped),
            dropped_groups_of=dict(groups.dropped_of),
            score_failures=dict(lifecycle.failures.counts),
            score_errors=dict(lifecycle.failures.first),
        )

    def is_unresponsive(self, generator_id: str) -> bool:
        """Return whether the generator is connected and has sent nothing for a lease."""
        return (one := self._fleet.connected.get(generator_id)) is not None and one.unresponsive

    # ---- inside: generators

    def _progress(self, generator: Generator, item: pb.Progress) -> None:
        lease = generator.leases.get(item.lease)
        if lease is None:
            self._ignored_progress += 1
            if not item.finish_reason:
                self._outbox.cancel(generator.generator_id, item.lease)
            return
        if lease.source is not self._evaluator:
            self._evaluator.progressed = True
        lease.source.progress(lease, item)

    def _revoke(self, generator: Generator, *, cancel: bool) -> None:
        for lease in list(generator.leases.values()):
            if lease.number not in generator.leases:
                continue  # its group was dropped with another sample of this generator
            if cancel:
                self._outbox.cancel(generator.generator_id, lease.number)
            lease.source.lost(lease)

    def _remove(self, generator_id: str) -> None:
        generator = self._fleet.connected.get(generator_id)
        if generator is not None:
            self._revoke(generator, cancel=False)
            self._fleet.remove(generator_id)
            self._weights.left(generator_id)
            self._outbox.forget(generator_id)

    # ---- inside: the whole

    def _settle(self) -> list[Effect]:
        """Do everything that the event has made possible."""
        self._settle_is_due = False
        if not (self._ending or self._failed):
            self._lifecycle.complete()
            self._weights.advance(recorded_steps=self._link.step)
            self._planner.plan()
            self._delivery.deliver()
            self._dispatcher.refresh()
            for extension in self._extensions:
                extension.settle()
            self._assignment.fill()
            self._fail_if_hopeless()
            self._end_if_done()
        return self._outbox.take()

    def _defer_settle(self) -> list[Effect]:
        """Settle with the next portion: events that concern all generators come from thousands at once, and are settled together."""
        self._settle_is_due = True
        return self._outbox.take()

    def _restore(self) -> None:
        groups, planned = self._groups, []
        for group in restore(self._recovered, planner=self._planner):
            if group.state is GroupState.PLANNED:
                planned.append(group)
            elif not group.recorded and not groups.window.may_begin(group.start_version or 0):
                self._outbox.write(Dropped(group_id=group.group_id, reason=GroupEvent.TOO_STALE.value))
                groups.count_drop(group, GroupEvent.TOO_STALE)
                continue
            groups.add(group)
            if group.state is GroupState.SCORED and not group.recorded:
                self._ready.put(group)
        self._planner.restore(planned)

    def _fail_if_hopeless(self) -> None:
        row = self._groups.drops_in_a_row
        if row and row.total() >= max(MIN_DROPS_TO_FAIL, 2 * self._settings.batch_groups):
            error = self._lifecycle.last_error or "no error was given"
            self._fail(f"{row.total()} groups in a row could not be used ({', '.join(row)}): {error}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._outbox.add(Failed(reason=reason))

    def _end_if_done(self) -> None:
        step, evaluator = self._link.step, self._evaluator  # past the last one if `steps` was lowered
        if step < self._settings.steps or not self._exported or evaluator.version is not None or evaluator.due(step):
            return
        self._ending = self._assignment.ended = True
        self._outbox.write(RunEnded(step=step, version_hash=self._weights.hash_of(step)), then=self._end)

    def _end(self) -> None:
        self._ended = True
        for group in self._groups:
            if not group.recorded:
                self._groups.drop(group, GroupEvent.RUN_ENDED)
        self._outbox.add(Finished(step=self._link.step))

    def _restart_trainer(self, error: MismatchError) -> None:
        self._history.disconnect()
        self._outbox.to_trainer(pb.TrainerCommand(restart=pb.Restart(reason=str(error))))
