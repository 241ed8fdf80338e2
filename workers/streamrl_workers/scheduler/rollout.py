"""Assignment of samples to generators, and a training sample from its issue to its score.

    free slot ─▶ issue ─▶ tokens ─▶ turns ─▶ finished ─▶ reward, extensions ─▶ scored ─▶ group complete ─▶ journal

`Assignment` binds samples to generators, late: nothing is bound before a slot is free. The generator on which a sample would run fastest is
served first (by its pool's curve, with one more active; of equal ones the emptier), one group at a time, so that a group's samples share a
prefill and the load stays even. It reports to generators without work why there is none.

    1. samples of the evaluation, at its version
    2. samples of begun groups of the generator's length pool, oldest version first
    3. the next group of its pool by the order, if the staleness window and the buffer let one begin
    4. a generator that holds nothing steals: 2 and 3 of the other pool

So no group waits forever for generators that are gone: leases end, and then the other generators steal. A sample that would not fit a
generator's memory beside what it holds stays in its place in the order, until one of the generator's samples ends. Groups are kept for
generators that still load the version that others have loaded.

`SampleLifecycle` is the `WorkSource` of training samples. Invariant: a group's `start_version` is never newer than the version of its first
token. A sample that is with a generator without a token counts at the version that the generator had at issue; generators only load newer
versions, so the token can only be newer, and a token that claims an older one is refused.

Does not own which groups are planned (`planning.py`), nor what is delivered (`delivery.py`).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.evaluation import Evaluator
from streamrl_workers.scheduler.generators import Fleet, Generator, KvEstimate, KvSize, Lease
from streamrl_workers.scheduler.lengths import Lengths
from streamrl_workers.scheduler.model import (
    Group,
    GroupEvent,
    GroupFilter,
    GroupState,
    GroupTable,
    SampleStage,
    ScoredGroup,
    stats_of,
)
from streamrl_workers.scheduler.planning import Planner, WaitingGroups
from streamrl_workers.scheduler.records import Dropped, Scored
from streamrl_workers.scheduler.sample import Sample, SampleEvent, SampleState, ScoreFailures, covers, validate_progress
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.archive import is_archived
from streamrl_workers.stream.packing import tokens_hash
from streamrl_workers.tasks.values import FailureKind, PlayTurn, Score, TurnAnswer

ISSUE_PORTION_BYTES = 4 * 2**20
"""Bytes of prompts and tokens issued in one event: a thousand long prompts at once would delay all other events for a quarter of a second."""
MOST_KEPT = 4096
"""Maximum samples that are kept for generators that load: each assignment passes over their groups."""
PORTION_BYTES = 4 * 2**20
"""Bytes of groups that are serialized in one event: copies of more would delay all other events."""
MIN_REWARDS = 2
"""A group with fewer rewards has no advantage to learn from."""
REWARD = "reward"
"""What each finished sample awaits."""


class SampleLifecycle:
    """Training samples: a `WorkSource`."""

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        groups: GroupTable,
        fleet: Fleet,
        waiting: WaitingGroups,
        lengths: Lengths,
        on_scored: Callable[[Group], None],
        stages: Callable[["SampleLifecycle"], Sequence[SampleStage]] = lambda _lifecycle: (),
        filters: Sequence[GroupFilter] = (),
    ) -> None:
        """`on_scored`: called when a group's record is durable. `stages`: makes what adds results to finished samples."""
        self._settings = settings
        self._outbox = outbox
        self._groups = groups
        self._fleet = fleet
        self._waiting = waiting
        self.lengths = lengths
        self._on_scored = on_scored
        self._filters = filters
        self.kv = KvEstimate(lengths, max_tokens=settings.tasks.max_tokens)
        self.moved = 0
        """Samples that continued at another generator while theirs was connected."""
        self._scored: deque[Group] = deque()
        """Groups whose last score has arrived, and whose samples are not serialized yet."""
        self.answering = 0
        """Samples that are with the environment."""
        self.last_error = ""
        self.failures = ScoreFailures()
        """The evaluation counts here too."""
        self.stages = stages(self)

    # ---- to a generator

    def fits(self, group: Group, generator: Generator, *, index: int | None = None) -> bool:
        """Return whether the generator's memory has room for this sample of the group; None: for the next one to be issued."""
        sample = group.samples[group.waiting[-1] if index is None else index]
        return generator.kv.fits(group.group_id, self._size(group, sample))

    def _size(self, group: Group, sample: Sample) -> KvSize:
        held = sample.held()
        prompt_tokens = max(0, (len(group.prompt.tokens) - len(sample.prefix)) >> 2) or None
        return self.kv.size(
            group.prompt.text, prompt_tokens=prompt_tokens, tokens=held.tokens, context=held.context, coming=held.coming
        )

    def issue(self, group: Group, generator: Generator) -> int:
        """Give the group's next waiting sample to the generator. Return the bytes of its prompt and tokens, about."""
        sample = group.samples[self._waiting.take(group)]
        self._fleet.reissued += sample.issues > 0
        sample.issues += 1
        if group.state is GroupState.PLANNED:
            self._groups.follow(group, GroupEvent.ISSUE)
        lease, request = self._send(group, sample, generator, moves=0)
        if not sample.spans:
            self._groups.set_min_version(group, sample, to=lease.version_step)
        return len(request.prompt) + len(request.prefix_tokens)

    def may_move(self, lease: Lease, *, to: Generator) -> bool:
        """Return whether this running sample may continue with that generator's weights; without a token it begins there, under no older ones."""
        group, window = self._groups.by_id[lease.group_id], self._groups.window
        spans = group.samples[lease.sample_index].spans
        if to.step is None or to.step > window.step:
            return False
        stays = not spans or (to.weights.version == (spans[-1][2], spans[-1][1]) and not to.weights.is_loading)
        if not (stays or self._settings.partial_rollouts) or (not spans and to.step < lease.version_step):
            return False
        return group.start_version is None or window.may_continue(group.start_version, at=to.step)

    def move(self, lease: Lease, *, to: Generator) -> Lease:
        """Continue a running sample at another generator, from its tokens so far; return the new lease.

        What the old generator still sends for the sample is ignored, as for any lease that was revoked.
        """
        group = self._groups.by_id[lease.group_id]
        sample = group.samples[lease.sample_index]
        self._outbox.cancel(lease.generator_id, lease.number)
        self._fleet.end(lease.number)
        sample.follow(SampleEvent.LOSE)
        self.moved += 1
        moved, _ = self._send(group, sample, to, moves=lease.moves + 1)
        if not sample.spans:
            self._groups.set_min_version(group, sample, to=moved.version_step)
        return moved

    def _send(
        self, group: Group, sample: Sample, generator: Generator, *, moves: int
    ) -> tuple[Lease, pb.SampleRequest]:
        lease = self._fleet.lend(
            generator,
            group_id=group.group_id,
            sample_index=sample.index,
            size=self._size(group, sample),
            source=self,
            moves=moves,
        )
        request = sample.issued(
            lease,
            prompt=group.prompt.text,
            sampling=group.task.sampling,
            job_seed=self._settings.seed,
            pinned=not self._settings.partial_rollouts,
        )
        self._outbox.issue(generator.generator_id, request)
        return lease, request

    # ---- from a generator

    def progress(self, lease: Lease, item: pb.Progress) -> None:
        """Take tokens, and perhaps the end, of one sample."""
        group = self._groups.by_id[lease.group_id]
        sample = group.samples[lease.sample_index]
        if item.finish_reason == "error":
            self._failed(group, sample, lease, error=item.error)
            return
        newest_step, max_tokens = self._groups.window.step, group.task.sampling.max_tokens
        if wrong := validate_progress(lease, sample, item, newest_step=newest_step, max_tokens=max_tokens):
            self.last_error = f"{lease.generator_id}: {wrong}"
            self._outbox.cancel(lease.generator_id, lease.number)
            self.lost(lease)
            return
        wanted_hash = group.prompt.tokens_hash
        if wanted_hash and item.prompt_tokens and tokens_hash(item.prompt_tokens) != wanted_hash:
            self.give_up(group, f"the prompt of group {group.group_id} has other tokens than before")
            return
        self._begin(group, sample, item)
        added = sample.add(item)
        self._share_prompt(group, sample)
        self._groups.buffer(group, added)
        if item.finish_reason:
            self._end(group, sample, item, lease)
        else:
            self._fleet.resize(lease, self._size(group, sample))

    def _failed(self, group: Group, sample: Sample, lease: Lease, *, error: str) -> None:
        """Handle an engine's error: text of the environment that cannot be tokenized fails the sample, anything else the group."""
        if sample.turns is None or not sample.turns.awaits_text:
            self.give_up(group, error)
            return
        self.last_error = error
        self._end_lease(sample, lease)
        self._fail(group, sample, kind="bad_value", error=f"environment: {error}")

    def _share_prompt(self, group: Group, sample: Sample) -> None:
        """Keep one copy of the prompt's tokens: a copy in each sample would be larger than the completions."""
        prompt = group.prompt
        if sample.prompt_tokens and not prompt.tokens:
            prompt.tokens = sample.prompt_tokens
            self.kv.learn(prompt.text, tokens=(len(prompt.tokens) - len(sample.prefix)) >> 2)
        if sample.prompt_tokens == prompt.tokens:
            sample.prompt_tokens = prompt.tokens

    def _begin(self, group: Group, sample: Sample, item: pb.Progress) -> None:
        if not (item.spans or item.finish_reason):
            return
        if group.state is GroupState.ISSUED:
            self._groups.follow(group, GroupEvent.BEGIN)
        if item.spans and not sample.spans:
            self._groups.set_min_version(group, sample, to=item.spans[0].step)

    def _end(self, group: Group, sample: Sample, item: pb.Progress, lease: Lease) -> None:
        """Handle the end of a completion; with an environment that is one turn of the sample."""
        self._end_lease(sample, lease)
        if not group.source.is_rewarded:
            sample.ended_unrewarded(item)
            self._fail(group, sample, kind=None, error="")
            return
        question = sample.ended(item, lease, split="train", prompt_index=group.prompt.index, prompt=group.prompt.text)
        if isinstance(question, PlayTurn):
            sample.follow(SampleEvent.ASK)
            self.answering += 1
        else:
            self._finish(group, sample)
        self._outbox.add(question)

    def _end_lease(self, sample: Sample, lease: Lease) -> None:
        sample.lease, sample.outcome.generator_id = None, lease.generator_id
        self._fleet.end(lease.number)

    def _finish(self, group: Group, sample: Sample) -> None:
        """Mark the sample as complete in tokens."""
        sample.follow(SampleEvent.FINISH)
        sample.outcome.ended_at = self._fleet.epoch_s + self._fleet.now_s
        sample.awaits = frozenset({REWARD})
        for stage in self.stages:
            stage.put(group, sample)
        group.unfinished -= 1
        if not group.unfinished:
            self._groups.follow(group, GroupEvent.FINISH)

    # ---- turns

    def answered(self, answer: TurnAnswer) -> None:
        """Take the environment's answer to a turn; ignore late ones of groups that are gone."""
        group = self._groups.by_id.get(answer.group_id)
        if group is None or not answer.sample_index < len(group.samples):
            return
        sample = group.samples[answer.sample_index]
        if sample.turns is None or sample.turns.asked != answer.lease:
            return
        self.answering -= 1
        if sample.answered(answer, max_turns=group.task.max_turns):
            sample.issues = 0
            sample.follow(SampleEvent.CONTINUE)
            self._waiting.put(group, [sample.index])
            return
        if answer.error:
            self._fail(group, sample, kind=answer.kind, error=answer.error)
        else:
            self._finish(group, sample)
            self._outbox.add(sample.to_score(group.group_id, split="train", prompt_index=group.prompt.index))

    def _fail(self, group: Group, sample: Sample, *, kind: FailureKind | None, error: str) -> None:
        """End the sample without a reward."""
        self._finish(group, sample)
        self.scored(
            Score(group_id=group.group_id, sample_index=sample.index, reward=None, parts={}, error=error, kind=kind)
        )

    # ---- lost

    def lost(self, lease: Lease) -> None:
        """Put the sample of a revoked lease back in the queue, with its tokens, unless all must be of one version."""
        self._fleet.end(lease.number)
        group = self._groups.by_id[lease.group_id]
        sample = group.samples[lease.sample_index]
        sample.lease = None
        sample.follow(SampleEvent.LOSE)
        if not self._settings.partial_rollouts:
            self._groups.buffer(group, sample.reset())
        if sample.issues >= self._settings.max_issues:
            self.give_up(group, self.last_error or f"a sample was lost with its generator {sample.issues} times")
            return
        if not sample.spans:
            self._groups.set_min_version(group, sample, to=None)
        if group.state is GroupState.ISSUED and group.start_version is None:
            self._groups.follow(group, GroupEvent.LOSE)
        self._waiting.put(group, [sample.index])

    def give_up(self, group: Group, error: str) -> None:
        """Drop a group whose samples cannot be completed."""
        self.last_error = error
        self._drop(group, GroupEvent.GENERATION_FAILED)

    def _drop(self, group: Group, event: GroupEvent, *, mean_tokens: float | None = None) -> None:
        """Drop a group that will not be trained, and cancel its samples."""
        for sample in group.samples:
            self.answering -= sample.state is SampleState.ANSWERING
            if sample.lease is not None:
                lease = self._fleet.end(sample.lease)
                if lease is not None:
                    self._outbox.cancel(lease.generator_id, lease.number)
        self._waiting.discard(group)
        for stage in self.stages:
            stage.forget(group)
        self.lengths.forget(group.group_id, key=group.prompt.key)
        texts = self._texts(group)
        kept = [_result(group, sample).SerializeToString(deterministic=True) for sample in group.samples if texts]
        self._groups.drop(group, event)
        self._outbox.write(
            Dropped(
                group_id=group.group_id,
                reason=event.value,
                mean_tokens=mean_tokens,
                trajectories=tuple(kept),
                texts=texts,
            )
        )

    def _texts(self, group: Group) -> bytes:
        """Return what the archive stores; empty if the group does not go there or has samples that are not scored."""
        goes_there = is_archived(group.group_id, share_percent=self._settings.archived_percent)
        if not goes_there or group.unscored or not group.samples:
            return b""
        return group.prompt.texts([sample.texts() for sample in group.samples])

    # ---- scored

    def scored(self, score: Score) -> None:
        """Take the reward of one sample, or why it has none; ignore late ones of groups that are gone."""
        group = self._groups.by_id.get(score.group_id)
        if group is None or not score.sample_index < len(group.samples):
            return
        sample = group.samples[score.sample_index]
        if REWARD not in sample.awaits:
            return
        self.failures.add(score.kind, score.error)
        sample.rewarded(score)
        self.received(group, sample, REWARD)

    def received(self, group: Group, sample: Sample, what: str) -> None:
        """Note that a finished sample has one of the results that it awaits."""
        sample.awaits -= {what}
        if sample.awaits:
            return
        sample.follow(SampleEvent.SCORE)
        group.unscored -= 1
        if not group.unscored:
            self._scored.append(group)

    @property
    def has_more(self) -> bool:
        """Whether `complete` has left groups for the next call."""
        return bool(self._scored)

    def complete(self) -> None:
        """Serialize groups whose last score has arrived, a portion of them."""
        left_bytes = PORTION_BYTES
        while self._scored and left_bytes > 0:
            group = self._scored.popleft()
            left_bytes -= group.buffered_bytes
            if self._groups.by_id.get(group.group_id) is group:
                self._complete(group)

    def _complete(self, group: Group) -> None:
        if not group.source.is_rewarded:
            self.lengths.forget(group.group_id, key=group.prompt.key)
            self._keep(group)
            return
        rewards = [sample.reward for sample in group.samples]
        if sum(reward is not None for reward in rewards) < MIN_REWARDS:
            errors = (sample.outcome.reward_error for sample in group.samples)
            self.last_error = next((error for error in errors if error), "")
            self._drop(group, GroupEvent.REWARD_FAILED)
            return
        mean_tokens = self._learn_lengths(group)
        for one in self._filters:
            if one.drops(rewards, step=self._groups.window.step):
                self._drop(group, one.reason, mean_tokens=mean_tokens)
                self._groups.drops_in_a_row.clear()  # it could be scored: nothing is wrong with the run
                return
        self._keep(group)

    def _keep(self, group: Group) -> None:
        self.store(group, [_result(group, sample) for sample in group.samples], texts=self._texts(group))
        self._groups.follow(group, GroupEvent.SCORE)
        self._groups.drops_in_a_row.clear()

    def store(self, group: Group, samples: Sequence[pb.Sample], *, texts: bytes) -> None:
        """Write what is trained to the journal; the group may be delivered once the record is durable."""
        assert group.start_version is not None
        serialized = tuple(sample.SerializeToString(deterministic=True) for sample in samples)
        result = ScoredGroup(samples=serialized, size_bytes=sum(map(len, serialized)), stats=stats_of(samples))
        self._groups.store(group, result)
        record = Scored(
            group_id=group.group_id,
            start_version=group.start_version,
            trajectories=serialized,
            size_bytes=result.size_bytes,
            texts=texts,
        )
        self._outbox.write(record, then=partial(self._on_scored, group))

    def _learn_lengths(self, group: Group) -> float:
        """Return the mean tokens of the completions. Lengths of a dropped group count as those of any other."""
        tokens = [sample.completion_tokens for sample in group.samples]
        self.lengths.learn(group.prompt.key, tokens=tokens, prompt=group.prompt.text, group_id=group.group_id)
        return sum(tokens) / len(tokens)


class Assignment:
    """Fills slots."""

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        groups: GroupTable,
        fleet: Fleet,
        waiting: WaitingGroups,
        planner: Planner,
        lifecycle: SampleLifecycle,
        evaluator: Evaluator,
        step_cause: str = "",
    ) -> None:
        """`step_cause`: cause of idleness while no group may begin before the trainer has done its step; empty: found at the time."""
        self._settings = settings
        self._outbox = outbox
        self._groups = groups
        self._window = groups.window
        self._fleet = fleet
        self._waiting = waiting
        self._planner = planner
        self._lifecycle = lifecycle
        self._evaluator = evaluator
        self._step_cause = step_cause
        self._last: tuple[object, ...] = ()
        self.open = False
        """False until the trainer has reported which groups it holds: before that the room in its step is unknown."""
        self.ended = False
        self.has_more = False
        """Whether more can be issued now by another call of `fill`."""
        self._left_bytes = 0

    def fill(self) -> None:
        """Give every free slot what it can take; not while a batch is planned in portions, whose longest come last as often as first."""
        self.has_more = False
        batch_samples = self._settings.batch_groups * self._settings.group_size
        if self._planner.has_more and self._waiting.samples < batch_samples:
            return
        self._left_bytes = ISSUE_PORTION_BYTES
        coming = self._expected()
        candidates = self._candidates(coming)
        left = self._serve(candidates, coming)
        self.has_more = self._left_bytes <= 0
        if self.has_more:
            self._last = ()
        waiting = self._pools_waiting()
        for generator in left:
            if not generator.held_back:
                self._report_idle(generator, waiting=waiting[self._is_long(generator)])
        for generator in candidates:
            self._report_queue(generator, waiting=waiting[self._is_long(generator)])

    # ---- which generators are looked at

    def _candidates(self, coming: dict[str, Generator]) -> list[Generator]:
        """Return the generators to look at: all with free slots if anything changed that bears on them, else those whose slots did."""
        situation = (
            self._waiting.revision,
            self._waiting.samples > 0,
            self._pools_waiting(),
            self._evaluator.version,
            len(self._evaluator.queue),
            self._window.situation(),
            self._pressed(),
            self._not_yet(),
            self._planner.may_plan,
            self._planner.all_planned,
            self._lifecycle.answering > 0,
            self.open,
            self.ended,
            len(coming),
        )
        names = list(self._fleet.touched)
        self._fleet.touched.clear()
        if situation == self._last:
            return [self._fleet.free[name] for name in names if name in self._fleet.free]
        self._last = situation
        return list(self._fleet.free.values())

    def _expected(self) -> dict[str, Generator]:
        """Return generators that will soon have loaded the version, and for which groups are kept.

        With S = 0 generators load each step's version one after the other: the first would else be filled completely, or
        get all of the longest, and end last. If more waits than there is room for, and in the order of planning, it makes
        no difference.
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
        """Return whether groups may begin with it under the version that it loads, and not under the one that it has."""
        now = generator.step is not None and self._may_begin(generator.step)
        return not now and generator.weights.announced is not None and self._may_begin(generator.weights.announced[1])

    # ---- what each of them gets

    def _serve(self, generators: Iterable[Generator], coming: dict[str, Generator]) -> list[Generator]:
        """Fill slots until they are full, or what is left is kept for `coming`; return generators with free slots at the end."""
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
        if kept:
            self._waiting.put_back()
        return left

    def _keep(self, generator: Generator) -> bool:
        """Set the next group of its pool aside for it, if there is one."""
        group = self._waiting.first_fresh(long=self._is_long(generator))
        if group is not None:
            self._waiting.set_aside(group)
        return group is not None

    def _give(self, generator: Generator, *, begins: bool) -> bool:
        """Issue one portion to the generator; return whether there was one. `begins`: also of a group that begins with it."""
        generator.held_back = False
        if generator.weights.version is None or generator.weights.version[1] > self._window.step or self.ended:
            return False
        version = generator.weights.version[1]
        if self._evaluator.queue and self._evaluator.wants(generator):
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
        """Return the group of this pool that a generator of this version takes."""
        group = self._waiting.first_open(long=long)
        if (
            group is not None
            and group.start_version is not None
            and self._window.may_continue(group.start_version, at=version)
        ):
            return group
        return self._waiting.first_fresh(long=long) if begins else None

    def _is_held(self, generator: Generator) -> bool:
        """Return whether it must load the announced version first: what runs ends under the version that it began with."""
        return not self._settings.partial_rollouts and generator.weights.is_loading

    def _is_long(self, generator: Generator) -> bool:
        return generator.generator_id in self._waiting.order.long_generators

    def _may_begin(self, version: int) -> bool:
        return self._window.may_begin(version) and not self._pressed()

    def _pressed(self) -> bool:
        """Return whether the buffer is full. What the current step needs may always begin: else it would never be done."""
        full = self._groups.buffered_bytes > self._settings.max_buffer_bytes
        return full and self._window.live >= self._window.room

    # ---- why nothing

    def _pools_waiting(self) -> tuple[bool, bool]:
        """Return whether samples wait for generators of the short pool, and of the long one."""
        if len(self._evaluator.queue) or not self._waiting.order.long_generators:
            waits = self._waiting.samples + len(self._evaluator.queue) > 0
            return waits, waits
        first = (self._waiting.first_open, self._waiting.first_fresh)
        short, long = (any(find(long=pool) is not None for find in first) for pool in (False, True))
        return short, long

    def _report_idle(self, generator: Generator, *, waiting: bool) -> None:
        cause = self._cause(generator, waiting=waiting)
        if generator.reported.idle_cause != cause:
            generator.reported.idle_cause = cause
            self._outbox.idle(generator.generator_id, cause)

    def _cause(self, generator: Generator, *, waiting: bool) -> str:
        """`waiting`: whether samples wait for its pool."""
        if self._lifecycle.answering and not (self.ended or self._waiting.samples):
            return "no_prompts"  # what the model reads next is not there yet
        if self.ended or (self._planner.all_planned and not self._waiting.samples and not len(self._evaluator.queue)):
            return "ended"
        if generator.step is None or not self.open or self._is_held(generator):
            return "no_weights"
        if self._waiting.samples and not waiting and generator.leases:
            return "no_prompts"  # what waits is for the other pool
        if self._waiting.samples:
            if not self._window.may_begin(generator.step):
                return self._not_yet()
            return "back_pressure" if self._pressed() else "no_prompts"  # the rest is kept for others that load
        return "no_prompts" if self._planner.may_plan else self._not_yet()

    def _not_yet(self) -> str:
        """Return why nothing more may begin before the trainer has done its step."""
        if self._step_cause:
            return self._step_cause
        return "scoring" if self._groups.awaits_scores(self._window.room) else "staleness"

    def _report_queue(self, generator: Generator, *, waiting: bool) -> None:
        if generator.reported.queue_waits != waiting:
            generator.reported.queue_waits = waiting
            self._outbox.to_generator(generator.generator_id, pb.GeneratorCommand(queue=pb.QueueState(waiting=waiting)))


def _result(group: Group, sample: Sample) -> pb.Sample:
    result = sample.result()
    assert not result.segments or covers(result.segments, tokens=len(sample.tokens) >> 2), (
        "segments do not cover the tokens"
    )
    result.group_id = group.group_id
    result.resampled = not group.source.is_rewarded
    return result
