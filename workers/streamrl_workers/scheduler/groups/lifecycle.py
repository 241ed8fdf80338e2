"""A group's way from planned to scored: issue, tokens, moves, lost generators, turns, scores, dynamic sampling.

Owns what each of these does to samples, groups and the queue. Decides nothing about who gets what
(`assignment.py`) or what is delivered (`trainer_feed.py`).

Invariant: a group's `start_version` is never newer than the version of its first token. A sample that is out
without a token counts at the version that its generator had at issue; generators only load newer
versions, so the token can only be newer, and a token that claims an older one is refused.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group whose rewards are all equal has advantages of zero and
teaches nothing, so another one takes its place. With n = maxDrawsPerStep and B groups a step, at most (n - 1) * B groups
are dropped while one step is filled; with the B that it takes, n batches are scored for a step. After that every group
is taken: so every step gets its B groups, and the whole run plans at most n * B * steps. The count begins anew with the
scheduler's process: each restart may add (n - 1) * B drops, and restarts are bounded.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from streamrl.proto import stream_pb2 as pb
from streamrl.proto.literals import unmarked
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.fleet import Fleet, Generator, Lease
from streamrl_workers.scheduler.groups.frozen_stage import FrozenStage
from streamrl_workers.scheduler.groups.life import GroupEvent, GroupState, SampleEvent, SampleState
from streamrl_workers.scheduler.groups.sample import Sample, covers, fault
from streamrl_workers.scheduler.groups.supervised import demonstrated_sample, demonstrated_texts
from streamrl_workers.scheduler.groups.table import Group, GroupTable
from streamrl_workers.scheduler.groups.waiting import WaitingGroups
from streamrl_workers.scheduler.kv_memory import KvEstimate, KvSize
from streamrl_workers.scheduler.lengths import Lengths
from streamrl_workers.scheduler.records import Dropped, Scored, stats_of
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.archive import is_archived
from streamrl_workers.stream.packing import tokens_hash
from streamrl_workers.tasks.values import Demonstration, FailureKind, PlayTurn, Score, TurnAnswer


class ZeroVarianceFilter:
    """The draws of the step that is being filled."""

    def __init__(self, *, draws_per_step: int, batch_groups: int) -> None:
        """`draws_per_step`: batches that may be scored for one step; 1 drops nothing."""
        self._limit = (draws_per_step - 1) * batch_groups
        self._step = 0
        self._dropped = 0

    def drops(self, rewards: Iterable[float | None], *, step: int) -> bool:
        """Whether to drop a group with these rewards (None: no reward) while `step` is filled; counts the drop."""
        if step != self._step:
            self._step, self._dropped = step, 0
        if self._dropped >= self._limit or not all_equal(rewards):
            return False
        self._dropped += 1
        return True


def all_equal(rewards: Iterable[float | None]) -> bool:
    """Whether all samples that have a reward have the same one."""
    return len({reward for reward in rewards if reward is not None}) <= 1


PORTION_BYTES = 4 * 2**20
"""Of groups that become trajectories in one event: copies of more would hold up everything else."""
MIN_REWARDS = 2
"""A group with fewer rewards has no advantage to learn from."""


class SampleLifecycle:
    """Groups that are being made."""

    def __init__(
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        groups: GroupTable,
        fleet: Fleet,
        waiting: WaitingGroups,
        lengths: Lengths,
        stage: FrozenStage | None = None,
    ) -> None:
        self._settings = settings
        self._outbox = outbox
        self._groups = groups
        self._fleet = fleet
        self._waiting = waiting
        self.lengths = lengths
        """Predicts, and learns from what is made here."""
        self._stage = stage
        if stage is not None:
            stage.on_measured, stage.on_failed = self._score, self._give_up
        self.kv = KvEstimate(lengths, max_tokens=settings.sampling.max_tokens)
        self._dynamic = ZeroVarianceFilter(draws_per_step=settings.draws_per_step, batch_groups=settings.batch_groups)
        self.on_scored: Callable[[Group], None] = lambda group: None
        """Called when a group's record is durable."""
        self.moved = 0
        """Samples that went on at another generator while theirs was alive."""
        self._scored: deque[Group] = deque()
        """Their last score has come, their trajectories are still to be made."""
        self.answering = 0
        """Samples that are with the environment."""
        self.last_error = ""
        self.failures: Counter[str] = Counter()
        """Samples that got no reward, by kind; the evaluator counts here too."""

    # ---- to a generator

    def fits(self, group: Group, generator: Generator, *, index: int | None = None) -> bool:
        """Whether the generator's memory has room for this sample of the group; None: for the one that is issued next."""
        sample = group.samples[group.waiting[-1] if index is None else index]
        return generator.kv.fits(group.group_id, self._size(group, sample))

    def _size(self, group: Group, sample: Sample) -> KvSize:
        before = len(sample.before) >> 2
        prompt_tokens = max(0, (len(group.prompt_tokens) >> 2) - before) or None
        return self.kv.size(
            group.prompt,
            prompt_tokens=prompt_tokens,
            tokens=sample.held_tokens + before,
            context=sample.held_context + before,
            coming=sample.coming_prompt,
        )

    def issue(self, group: Group, generator: Generator) -> int:
        """The group's next waiting sample goes to the generator. Returns the bytes of its prompt and tokens, about."""
        sample = group.samples[self._waiting.take(group)]
        if sample.issues:
            self._fleet.reissued += 1
        sample.issues += 1
        if group.state is GroupState.PLANNED:
            self._groups.follow(group, GroupEvent.ISSUE)
        lease, request = self._send(group, sample, generator, moves=0)
        if not sample.spans:
            self._groups.set_min_version(group, sample, to=lease.version_step)
        return len(request.prompt) + len(request.prefix_tokens)

    def may_move(self, lease: Lease, *, to: Generator) -> bool:
        """Whether this running sample may go on with that generator's weights; one without a token begins there, under no older ones."""
        group, window = self._groups[lease.group_id], self._groups.window
        spans = group.samples[lease.sample_index].spans
        if to.step is None or to.step > window.step:
            return False
        stays = not spans or (to.version == (spans[-1][2], spans[-1][1]) and not to.is_loading)
        if not (stays or self._settings.partial_rollouts) or (not spans and to.step < lease.version_step):
            return False
        return group.start_version is None or window.may_go_on(group.start_version, at=to.step)

    def move(self, lease: Lease, *, to: Generator) -> Lease:
        """A running sample goes on at another generator, from its tokens so far; its new lease.

        What its old generator still says of it is ignored, as of any lease that was revoked.
        """
        group = self._groups[lease.group_id]
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
            moves=moves,
        )
        sample.follow(SampleEvent.ISSUE)
        sample.lease = lease.number
        sample.generator_id = generator.generator_id
        request = sample.request(
            lease,
            prompt=group.prompt,
            sampling=self._settings.sampling_of(group.prompt_index),
            job_seed=self._settings.seed,
            pinned=not self._settings.partial_rollouts,
        )
        self._outbox.issue(generator.generator_id, request)
        return lease, request

    # ---- from a generator

    def progress(self, lease: Lease, item: pb.Progress, *, newest_step: int) -> None:
        """Tokens, and perhaps the end, of one sample; of a finished one, its log-probs by the frozen model."""
        if lease.frozen and self._stage is not None:
            self._stage.progress(lease, item)
            return
        group = self._groups[lease.group_id]
        sample = group.samples[lease.sample_index]
        if item.finish_reason == "error":
            if sample.turns is None or not sample.turns.awaits_text:
                self._give_up(group, item.error)
                return
            self.last_error = item.error
            self._end_lease(sample, lease)
            self._fail(group, sample, kind="bad_value", error=f"environment: {item.error}")
            return
        max_tokens = self._settings.sampling_of(group.prompt_index).max_tokens
        if wrong := fault(lease, sample, item, newest_step=newest_step, max_tokens=max_tokens):
            self.last_error = f"{lease.generator_id}: {wrong}"
            self._outbox.cancel(lease.generator_id, lease.number)
            self.lost(lease)
            return
        state, prompt = group.before, item.prompt_tokens
        if state is not None and prompt and tokens_hash(prompt) != state.prompt_hash:
            self._give_up(
                group, f"prompt {state.prompt_index} has other tokens than before: no turn is drawn anew behind it"
            )
            return
        self._begin(group, sample, item)
        before = sample.size_bytes
        sample.add(item)
        self._share_prompt(group, sample)
        self._groups.buffer(group, sample.size_bytes - before)
        if item.finish_reason:
            self._end(group, sample, item, lease)
        else:
            self._fleet.resize(lease, self._size(group, sample))

    def _share_prompt(self, group: Group, sample: Sample) -> None:
        """A copy of the prompt's tokens in each sample would be more than their completions."""
        if sample.prompt_tokens and not group.prompt_tokens:
            group.prompt_tokens = sample.prompt_tokens
            self.kv.learn(group.prompt, tokens=(len(group.prompt_tokens) - len(sample.before)) >> 2)
        if sample.prompt_tokens == group.prompt_tokens:
            sample.prompt_tokens = group.prompt_tokens

    def _begin(self, group: Group, sample: Sample, item: pb.Progress) -> None:
        if not (item.spans or item.finish_reason):
            return
        if group.state is GroupState.ISSUED:
            self._groups.follow(group, GroupEvent.BEGIN)
        if item.spans and not sample.spans:
            self._groups.set_min_version(group, sample, to=item.spans[0].step)

    def _end(self, group: Group, sample: Sample, item: pb.Progress, lease: Lease) -> None:
        """The completion has ended; with an environment that is one turn of it."""
        self._end_lease(sample, lease)
        sample.finish_reason = item.finish_reason
        sample.generate_s += item.generate_s
        if group.before is not None:
            sample.text = item.text
            self._fail(group, sample, kind=None, error="")  # nobody rewards a turn by itself
            return
        question = sample.ended(item, lease, split="train", prompt_index=group.prompt_index, prompt=group.prompt)
        if isinstance(question, PlayTurn):
            sample.follow(SampleEvent.ASK)
            self.answering += 1
        else:
            self._finish(group, sample)
        self._outbox.add(question)

    def _end_lease(self, sample: Sample, lease: Lease) -> None:
        sample.lease = None
        self._fleet.end(lease.number)

    def _finish(self, group: Group, sample: Sample) -> None:
        """The sample has all its tokens: where the frozen model has a pool, its log-probs are formed beside the reward."""
        sample.follow(SampleEvent.FINISH)
        sample.ended_at = self._fleet.epoch_s + self._fleet.now_s
        if self._stage is not None:
            self._stage.put(group, sample)
        group.unfinished -= 1
        if not group.unfinished:
            self._groups.follow(group, GroupEvent.FINISH)

    # ---- turns

    def answered(self, answer: TurnAnswer) -> None:
        """The environment's answer to a turn; late ones of groups that are gone are left alone."""
        group = self._groups.get(answer.group_id)
        if group is None or not answer.sample_index < len(group.samples):
            return
        sample = group.samples[answer.sample_index]
        if sample.turns is None or sample.turns.asked != answer.lease:
            return
        self.answering -= 1
        if sample.answered(answer, max_turns=self._settings.max_turns_of(group.prompt_index)):
            sample.issues = 0
            sample.follow(SampleEvent.GO_ON)
            self._waiting.put(group, [sample.index])
            return
        if answer.error:
            self._fail(group, sample, kind=answer.kind, error=answer.error)
        else:
            self._finish(group, sample)
            self._outbox.add(sample.to_score(group.group_id, split="train", prompt_index=group.prompt_index))

    def _fail(self, group: Group, sample: Sample, *, kind: FailureKind | None, error: str) -> None:
        """The sample ends here, without a reward."""
        self._finish(group, sample)
        self.scored(
            Score(group_id=group.group_id, sample_index=sample.index, reward=None, parts={}, error=error, kind=kind)
        )

    # ---- lost

    def lost(self, lease: Lease) -> None:
        """The lease is revoked: its sample waits again, with the tokens that had arrived, unless all must be of one version."""
        if lease.frozen and self._stage is not None:
            self._stage.lost(lease)
            return
        self._fleet.end(lease.number)
        group = self._groups[lease.group_id]
        sample = group.samples[lease.sample_index]
        sample.lease = None
        sample.follow(SampleEvent.LOSE)
        if not self._settings.partial_rollouts:
            before = sample.size_bytes
            sample.begin_anew()
            self._groups.buffer(group, sample.size_bytes - before)
        if sample.issues >= self._settings.max_issues:
            self._give_up(group, self.last_error or f"a sample was lost with its generator {sample.issues} times")
            return
        if not sample.spans:
            self._groups.set_min_version(group, sample, to=None)
        if group.state is GroupState.ISSUED and group.start_version is None:
            self._groups.follow(group, GroupEvent.LOSE)
        self._waiting.put(group, [sample.index])

    def _give_up(self, group: Group, error: str) -> None:
        self.last_error = error
        self._drop(group, GroupEvent.GENERATION_FAILED)

    def _drop(self, group: Group, event: GroupEvent, *, mean_tokens: float | None = None) -> None:
        """The group will not be trained: take it back from everybody."""
        for sample in group.samples:
            self.answering -= sample.state is SampleState.ANSWERING
            if sample.lease is not None:
                lease = self._fleet.end(sample.lease)
                if lease is not None:
                    self._outbox.cancel(lease.generator_id, lease.number)
        self._waiting.discard(group)
        if self._stage is not None:
            self._stage.forget(group)
        self.lengths.forget(group.group_id, key=group.prompt_key)
        texts = self._texts(group)
        kept = [_trajectory(group, sample).SerializeToString(deterministic=True) for sample in group.samples if texts]
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
        """For the archive; empty where the group does not go there, or has samples that are not scored."""
        if not self._is_archived(group) or group.unscored or not group.samples:
            return b""
        samples = [sample.texts() for sample in group.samples]
        return pb.GroupTexts(prompt=unmarked(group.prompt), samples=samples).SerializeToString()

    def _is_archived(self, group: Group) -> bool:
        return is_archived(group.group_id, share_percent=self._settings.archived_percent)

    # ---- scored

    def scored(self, score: Score) -> None:
        """The result for one sample; late ones of groups that are gone are left alone."""
        group = self._groups.get(score.group_id)
        if group is None or not score.sample_index < len(group.samples):
            return
        sample = group.samples[score.sample_index]
        if sample.state is not SampleState.FINISHED or sample.is_rewarded:
            return
        sample.is_rewarded = True
        if score.kind is not None:
            self.failures[score.kind] += 1
        sample.reward, sample.reward_parts, sample.reward_error = score.reward, score.parts, score.error
        self._score(group, sample)

    def _score(self, group: Group, sample: Sample) -> None:
        """The sample is scored once both its reward and the frozen model's log-probs are there."""
        if not (sample.is_rewarded and sample.is_measured):
            return
        sample.follow(SampleEvent.SCORE)
        group.unscored -= 1
        if not group.unscored:
            self._scored.append(group)

    @property
    def in_portions(self) -> bool:
        """Whether `complete` has left something."""
        return bool(self._scored)

    def complete(self) -> None:
        """Make the trajectories of groups whose last score has come, a portion of them."""
        left_bytes = PORTION_BYTES
        while self._scored and left_bytes > 0:
            group = self._scored.popleft()
            left_bytes -= group.buffered_bytes
            if self._groups.get(group.group_id) is group:
                self._complete(group)

    def _complete(self, group: Group) -> None:
        if group.before is not None:
            self.lengths.forget(group.group_id, key=group.prompt_key)
            self._settle(group)
            return
        if sum(sample.reward is not None for sample in group.samples) < MIN_REWARDS:
            self.last_error = next((sample.reward_error for sample in group.samples if sample.reward_error), "")
            self._drop(group, GroupEvent.REWARD_FAILED)
            return
        mean_tokens = self._learn_lengths(group)
        if self._dynamic.drops([sample.reward for sample in group.samples], step=self._groups.filling_step):
            self._drop(group, GroupEvent.ZERO_VARIANCE, mean_tokens=mean_tokens)
            self._groups.drops_in_a_row.clear()  # it could be scored: nothing is wrong with the run
            return
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """It is scored, and will be delivered."""
        self._store(group, [_trajectory(group, sample) for sample in group.samples], texts=self._texts(group))
        self._groups.follow(group, GroupEvent.SCORE)
        self._groups.drops_in_a_row.clear()

    def demonstrated(self, group: Group, shown: Demonstration) -> None:
        """The group's one sample stands in the data set: it is scored as it is planned, as if of the step's weights."""
        self._groups.begin(group)
        sample = demonstrated_sample(shown, group_id=group.group_id, version=self._groups.filling_step)
        sample.ended_at = self._fleet.epoch_s + self._fleet.now_s
        texts = pb.GroupTexts(prompt=unmarked(group.prompt), samples=[demonstrated_texts(shown)])
        self._store(group, [sample], texts=texts.SerializeToString() if self._is_archived(group) else b"")
        self._groups.follow(group, GroupEvent.DEMONSTRATE)

    def _store(self, group: Group, trajectories: Sequence[pb.Sample], *, texts: bytes) -> None:
        """What is trained goes into the journal; the group may be delivered once it is there."""
        assert group.start_version is not None
        group.stats = stats_of(trajectories)
        group.trajectories = tuple(trajectory.SerializeToString(deterministic=True) for trajectory in trajectories)
        group.size_bytes = sum(map(len, group.trajectories))
        group.samples, group.prompt, group.prompt_tokens, group.before = [], "", b"", None
        self._groups.unbuffer(group)
        self._groups.buffer(group, group.size_bytes)
        record = Scored(
            group_id=group.group_id,
            start_version=group.start_version,
            trajectories=group.trajectories,
            size_bytes=group.size_bytes,
            texts=texts,
        )
        self._outbox.write(record, then=lambda: self.on_scored(group))

    def _learn_lengths(self, group: Group) -> float:
        """Mean tokens of its completions. A group with equal rewards is dropped, but its lengths are as true as any."""
        tokens = [sample.completion_tokens for sample in group.samples]
        self.lengths.learn(group.prompt_key, tokens=tokens, prompt=group.prompt, group_id=group.group_id)
        return sum(tokens) / len(tokens)


def _trajectory(group: Group, sample: Sample) -> pb.Sample:
    segments = [] if sample.turns is None else sample.turns.segments
    assert not segments or covers(segments, tokens=len(sample.tokens) >> 2), "segments do not cover the tokens"
    return pb.Sample(
        group_id=group.group_id,
        sample_index=sample.index,
        prompt_tokens=sample.prompt_tokens,
        tokens=bytes(sample.tokens),
        logprobs=bytes(sample.logprobs),
        reference_logprobs=sample.reference,
        spans=[pb.VersionSpan(tokens=tokens, step=step, attempt=attempt) for tokens, step, attempt in sample.spans],
        finish_reason=sample.finish_reason,
        reward=sample.reward,
        reward_parts=sample.reward_parts,
        reward_error=sample.reward_error,
        generator_id=sample.generator_id,
        generate_s=sample.generate_s,
        ended_at=sample.ended_at,
        segments=segments,
        resampled=group.before is not None,
    )
