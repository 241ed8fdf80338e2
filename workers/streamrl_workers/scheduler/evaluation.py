"""Weight versions on their way to the generators: which one is announced, and its held-out evaluation.

`Announcer` owns the versions that the trainer has published and which of them generators are told to use. A version is
announced only
  - when the step that made it is recorded: so no token is ever of a version that history may not have;
  - when no evaluation of the announced version is unfinished; versions that are to be evaluated are announced one after
    the other, all others give way to the newest;
  - to a generator that is not at a higher number, nor was told to load one that it has not said it cannot. After a
    trainer's restart the generators are at versions of a history that is being repeated with the same groups; they go
    on with those until the repetition has caught up. Hence the number of a generator's version never falls.

`Evaluator` owns a greedy answer, and sampled ones, to each of the first held-out prompts. Its samples go ahead of training samples, only to
generators at exactly that version, pinned. It is no part of the groups' life: nothing of it is journaled but the
result, an unfinished one is done again.
    due: version 0, every `evaluation_interval` steps, and the last, unless already done.
    deadline: PATIENCE_LEASES leases in which no sample at all gains a token; what is missing then counts as failed. Without generators it
    runs in supervised jobs alone: their trainer waits.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.fleet import Fleet, Generator, Lease, Version
from streamrl_workers.scheduler.groups.sample import Sample, fault
from streamrl_workers.scheduler.kv_memory import KvEstimate, KvSize
from streamrl_workers.scheduler.records import Evaluated, EvaluatedTask
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.scheduler.versions.sources import WeightSources
from streamrl_workers.scheduler.versions.turns import WeightTurns
from streamrl_workers.tasks.values import FailureKind, NeedPrompts, Prompt, Score, TurnAnswer

PATIENCE_LEASES = 10
"""A version that nobody can load must not stop the run."""
GROUP_BASE = 1 << 62
"""Group numbers of evaluation samples: far above every training group."""
_STEP_SHIFT = 20
"""Held-out prompts fit in so many bits (maxPrompts is at most 100 000)."""


_Answer = tuple[int, int]
"""Prompt index and sample index; sample 0 is the greedy answer."""


def group_number(step: int, prompt_index: int) -> int:
    """Group number of one evaluation sample."""
    return GROUP_BASE | step << _STEP_SHIFT | prompt_index


class Evaluator:
    """At most one evaluation at a time."""

    def __init__(
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        fleet: Fleet,
        done: frozenset[int],
        failures: Counter[str],
        kv: KvEstimate,
    ) -> None:
        """`failures`: samples that got no reward are counted there, by kind. `kv`: what a sample takes of a generator's memory."""
        self._settings = settings
        self._outbox = outbox
        self._fleet = fleet
        self._done = set(done)
        self._failures = failures
        self._kv = kv
        self._prompts: dict[int, str] = {}
        self.version: Version | None = None
        self._waiting: deque[_Answer] = deque()
        self._samples: dict[_Answer, Sample] = {}
        """Those that are with a generator, with the environment, or done."""
        self._rewards: dict[_Answer, float | None] = {}
        self._faults: Counter[_Answer] = Counter()
        """What was not believed."""
        self._patience_s = PATIENCE_LEASES * settings.lease_s
        self._progressed = False
        self._progress_s: float | None = None
        self._writing = False
        self.last: Evaluated | None = None

    # ---- which version

    def due(self, step: int) -> bool:
        """Whether this version is to be evaluated and has not been."""
        planned = step % self._settings.evaluation_interval == 0 or step >= self._settings.steps
        wanted = self._settings.evaluates and self._settings.evaluation_prompts > 0
        return planned and wanted and step not in self._done

    def need_prompts(self) -> None:
        """Ask for the held-out prompts."""
        if self._settings.evaluation_prompts:
            self._outbox.add(NeedPrompts(split="held_out", first_index=0, count=self._settings.evaluation_prompts))

    def arrived(self, prompt: Prompt) -> None:
        """A held-out prompt's text."""
        if prompt.index in self._prompts or not prompt.index < self._settings.evaluation_prompts:
            return
        self._prompts[prompt.index] = prompt.text
        self._progressed = True
        if self.version is not None and not self._writing:
            self._waiting.extend((prompt.index, answer) for answer in self._answers)

    def begin(self, version: Version) -> None:
        """Evaluate this version now."""
        self.version = version
        self._waiting = deque((index, answer) for answer in self._answers for index in sorted(self._prompts))
        self._samples, self._rewards, self._writing = {}, {}, False
        self._faults.clear()
        self._progressed = True

    def abandon(self) -> None:
        """The version is no longer wanted (the trainer went back) or can no longer be had."""
        if self.version is None or self._writing:
            return
        self._revoke()
        self.version = None
        self._waiting.clear()

    def _revoke(self) -> None:
        for generator in self._fleet:
            for lease in [lease for lease in generator.leases.values() if lease.evaluation]:
                self._outbox.cancel(generator.generator_id, lease.number)
                self._fleet.end(lease.number)

    # ---- samples

    @property
    def _answers(self) -> range:
        return range(1 + self._settings.evaluation_sampled)

    @property
    def waiting(self) -> int:
        """Samples that wait for a generator at the version."""
        return len(self._waiting)

    def wants(self, generator: Generator) -> bool:
        """Whether a sample waits that this generator can take."""
        return bool(self._waiting) and generator.version == self.version and not generator.lent

    def fits(self, generator: Generator) -> bool:
        """Whether the generator's memory has room for the next sample."""
        assert self.version is not None
        index, _ = key = self._waiting[0]
        return generator.kv.fits(group_number(self.version[1], index), self._size(key))

    def _size(self, key: _Answer) -> KvSize:
        sample = self._samples.get(key) or Sample(key[1])
        return self._kv.size(
            self._prompts[key[0]],
            prompt_tokens=None,
            tokens=sample.held_tokens,
            context=sample.held_context,
            coming=sample.coming_prompt,
        )

    def issue(self, generator: Generator) -> int:
        """The next sample goes to the generator. Returns the bytes of its prompt, about."""
        assert self.version is not None
        index, answer = key = self._waiting.popleft()
        number = group_number(self.version[1], index)
        sample = self._samples.setdefault(key, Sample.new(answer, max_turns=self._settings.max_turns_of(index)))
        size = self._size(key)
        lease = self._fleet.lend(generator, group_id=number, sample_index=answer, size=size, evaluation=True)
        sampling = self._settings.sampling_of(index)
        sampling = sampling if answer else _greedy(sampling)
        job_seed = self._settings.seed
        prompt = self._prompts[index]
        request = sample.request(lease, prompt=prompt, sampling=sampling, job_seed=job_seed, pinned=True)
        self._outbox.issue(generator.generator_id, request)
        return len(request.prompt)

    def progress(self, lease: Lease, item: pb.Progress) -> None:
        """Tokens, and perhaps the end, of one sample."""
        key = _answer(lease)
        sample = self._samples[key]
        if item.finish_reason == "error":
            self._fleet.end(lease.number)
            self._result(key, None)
            return
        max_tokens = self._settings.sampling_of(key[0]).max_tokens
        if fault(lease, sample, item, newest_step=lease.version_step, max_tokens=max_tokens):
            self._refuse(lease, key)
            return
        self._progressed = True
        sample.add(item)
        if item.finish_reason:
            self._fleet.end(lease.number)
            prompt = self._prompts[key[0]]
            self._outbox.add(sample.ended(item, lease, split="held_out", prompt_index=key[0], prompt=prompt))
        else:
            self._fleet.resize(lease, self._size(key))

    def _refuse(self, lease: Lease, key: _Answer) -> None:
        """What came is not believed: it is made again, but not for ever."""
        self._outbox.cancel(lease.generator_id, lease.number)
        self.lost(lease)
        self._faults[key] += 1
        if self._faults[key] >= self._settings.max_issues:
            self._waiting.remove(key)
            self._result(key, None)

    def answered(self, answer: TurnAnswer) -> None:
        """The environment's answer to a turn; those of an older evaluation are left alone."""
        key = _answer(answer)
        sample = self._samples.get(key)
        if self.version is None or self._writing or sample is None or sample.turns is None:
            return
        if sample.turns.asked != answer.lease or key in self._rewards:
            return
        self._progressed = True
        if sample.answered(answer, max_turns=self._settings.max_turns_of(key[0])):
            self._waiting.append(key)
        elif answer.error:
            self._result(key, None, kind=answer.kind)
        else:
            self._outbox.add(sample.to_score(answer.group_id, split="held_out", prompt_index=key[0]))

    def slots_move(self) -> None:
        """Training samples gain tokens: their slots will be free for those that wait here."""
        self._progressed = True

    def lost(self, lease: Lease) -> None:
        """The lease is revoked: its sample is made again from the start."""
        self._fleet.end(lease.number)
        key = _answer(lease)
        self._samples.pop(key, None)
        self._waiting.appendleft(key)

    def scored(self, score: Score) -> None:
        """The result for one sample; those of an older evaluation are left alone."""
        key = _answer(score)
        if self.version is None or self._writing or score.group_id != group_number(self.version[1], key[0]):
            return
        if key in self._samples:
            self._progressed = True
            self._result(key, score.reward, kind=score.kind)

    # ---- the end

    def tick(self, now_s: float) -> None:
        """Give up what has made no progress for too long while somebody could have made it."""
        somebody = any(not generator.paused for generator in self._fleet)
        could_be_made = somebody or self._settings.supervised  # a supervised job's trainer waits for this
        if self._progressed or self._progress_s is None or not could_be_made:
            self._progressed = False
            self._progress_s = now_s
        elif self.version is not None and not self._writing and now_s - self._progress_s > self._patience_s:
            self._revoke()
            self._waiting.clear()
            self._finish()

    def _result(self, key: _Answer, reward: float | None, *, kind: FailureKind | None = None) -> None:
        if key in self._rewards:
            return
        if kind is not None:
            self._failures[kind] += 1
        self._rewards[key] = reward
        if len(self._rewards) == self._settings.evaluation_prompts * len(self._answers):
            self._finish()

    def _finish(self) -> None:
        assert self.version is not None
        prompts = range(self._settings.evaluation_prompts)
        of_task: dict[str, set[int]] = {task.name: set() for task in self._settings.mixture}
        for index in prompts if of_task else ():
            of_task[self._settings.task_name(index)].add(index)
        result = Evaluated(
            step=self.version[1],
            **asdict(self._result_of(prompts)),
            tasks={name: self._result_of(indexes) for name, indexes in of_task.items()},
        )
        self._writing = True
        self._done.add(result.step)
        self._outbox.write(result, then=partial(self._recorded, result))

    def _result_of(self, prompts: Collection[int]) -> EvaluatedTask:
        """Of the answers to these prompts."""
        ended = [key for key in self._rewards if key[0] in prompts]
        scored = [(answer, reward) for index, answer in ended if (reward := self._rewards[index, answer]) is not None]
        greedy = [reward for answer, reward in scored if answer == 0]
        tokens = [self._samples[key].completion_tokens if key in self._samples else 0 for key in ended if key[1] == 0]
        return EvaluatedTask(
            mean_reward=_mean(greedy),
            sampled_reward=_mean([reward for answer, reward in scored if answer > 0]),
            prompts=len(prompts),
            failed=len(prompts) - len(greedy),
            mean_tokens=_mean(tokens) or 0.0,
        )

    def _recorded(self, result: Evaluated) -> None:
        self.last = result
        self._writing = False
        self.version = None


def _answer(event: Lease | TurnAnswer | Score) -> _Answer:
    return event.group_id & ((1 << _STEP_SHIFT) - 1), event.sample_index


def _greedy(given: pb.Sampling) -> pb.Sampling:
    return pb.Sampling(temperature=0.0, top_p=1.0, max_tokens=given.max_tokens, stop=given.stop)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class Announcer:
    """Tells generators about weights."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        fleet: Fleet,
        evaluator: Evaluator,
        turns: WeightTurns | None = None,
        only_due: bool = False,
    ) -> None:
        """`turns`: of other clusters; None: all are told at once. `only_due`: versions that are not to be evaluated are told to nobody."""
        self._outbox = outbox
        self._fleet = fleet
        self._evaluator = evaluator
        self._only_due = only_due
        self._published: dict[int, tuple[pb.VersionName, str]] = {}
        """Step -> name and address, of the current attempt, not older than the announced one."""
        self.announced: Version | None = None
        self.sources = WeightSources()
        self.turns = turns
        self._changes = 0
        self._last: tuple[object, ...] = ()

    def changed(self) -> None:
        """A generator has come, or its version is another: look again."""
        self._changes += 1

    def clear(self) -> None:
        """A new attempt: nothing is published yet."""
        self.changed()
        self._published.clear()
        self.announced = None
        self.turns = None if self.turns is None else WeightTurns()
        self._evaluator.abandon()
        for generator in self._fleet:
            generator.told = None

    def published(self, name: pb.VersionName, *, address: str) -> None:
        """The trainer serves this version."""
        self.changed()
        if self._only_due:
            self._published = {step: entry for step, entry in self._published.items() if self._is_wanted(step)}
        if self.announced is None or name.step >= self.announced[1]:
            self._published[name.step] = (name, address)
        for generator in self._fleet:
            if generator.told == (name.attempt, name.step) != generator.version:
                generator.told = None  # the trainer may be somewhere else now

    def _is_wanted(self, step: int) -> bool:
        """Whether somebody may be told of this version, or was."""
        told = [self.announced, *(generator.told for generator in self._fleet)]
        return self._evaluator.due(step) or any(version is not None and version[1] == step for version in told)

    def hash_of(self, step: int) -> bytes:
        """Of the version that the trainer serves as `step`; empty: there is none."""
        entry = self._published.get(step)
        return b"" if entry is None else entry[0].hash

    def advance(self, *, recorded_steps: int) -> None:
        """Announce the next version, if there is one and nothing is in the way."""
        if self._situation(recorded_steps) == self._last:
            return
        if self._evaluator.version is not None and self._outrun(self._evaluator.version[1]):
            self._evaluator.abandon()
        if self._evaluator.version is None:
            self._choose(recorded_steps)
        if self.announced is not None:
            self._tell(self.announced)
        self._last = self._situation(recorded_steps)

    def _situation(self, recorded_steps: int) -> tuple[object, ...]:
        now_s = self._fleet.now_s
        turns = None if self.turns is None else (self.turns.is_taken(now_s=now_s), self.turns.is_late(now_s=now_s))
        return recorded_steps, self._evaluator.version, self._changes, turns

    def _choose(self, recorded_steps: int) -> None:
        current = -1 if self.announced is None else self.announced[1]
        coming = [step for step in self._published if current < step <= recorded_steps]
        coming = [step for step in coming if self.is_due(step) or not self._only_due]
        if not coming:
            return
        step = min((step for step in coming if self.is_due(step)), default=max(coming))
        self.announced = (self._published[step][0].attempt, step)
        oldest = min(
            (one.told[1] for one in self._fleet if one.told is not None and one.told != one.version), default=step
        )
        self._published = {kept: entry for kept, entry in self._published.items() if kept >= min(step, oldest)}
        if self.is_due(step):
            self._evaluator.begin(self.announced)

    def is_due(self, step: int) -> bool:
        """Whether this version is to be evaluated, and can be."""
        return self._evaluator.due(step) and not self._outrun(step)

    def _outrun(self, step: int) -> bool:
        """Whether a generator is at a higher number: a repeated step, its evaluation can no longer be made."""
        return any(generator.step is not None and generator.step > step for generator in self._fleet)

    def _tell(self, version: Version) -> None:
        waits = self._waiting_clusters(version)
        for generator in self._fleet:
            is_new = generator.told != version and generator.cluster not in waits and _may_load(generator, version)
            wanted = version if is_new else generator.told
            if wanted is None or wanted == generator.version or generator.failed:
                continue
            entry = self._published.get(wanted[1])
            if entry is None or entry[0].attempt != wanted[0]:
                continue
            peer = self.sources.of(generator.generator_id)
            address = entry[1] if peer is None else peer.address
            if not is_new and generator.told_address == address:
                continue
            if is_new:
                self._fleet.tell(generator, version)
            generator.told_address = address
            command = pb.WeightsAvailable(version=entry[0], address=address, peer=peer is not None)
            self._outbox.to_generator(generator.generator_id, pb.GeneratorCommand(weights=command))

    def _waiting_clusters(self, version: Version) -> frozenset[str]:
        """Those whose turn has not come."""
        if self.turns is None:
            return frozenset()
        slots = Counter[str]()
        others = [one for one in self._fleet if one.cluster]
        for generator in others:
            slots[generator.cluster] += generator.slots * (generator.serves and _may_have(generator, version))
        holders = {one.cluster for one in others if version in (one.version, one.told)}
        return frozenset(slots) - self.turns.look(version, slots, holders=holders, now_s=self._fleet.now_s)

    def weights_loaded(self, generator: Generator, version: Version) -> None:
        """It has the version."""
        if self.turns is not None:
            self.turns.loaded(generator.cluster, version, now_s=self._fleet.now_s)
        self.sources.advanced(generator.generator_id)
        self.changed()

    def weights_failed(self, generator: Generator) -> None:
        """What it was told to load does not come."""
        if self.turns is not None and self.sources.of(generator.generator_id) is None:
            self.turns.failed(generator.cluster, now_s=self._fleet.now_s)


def _may_have(generator: Generator, version: Version) -> bool:
    """Whether it has the version, or loads it when it is told: not one that is ahead of a trainer that went back."""
    return version in (generator.version, generator.told) or _may_load(generator, version)


def _may_load(generator: Generator, version: Version) -> bool:
    return generator.version != version and generator.highest_step <= version[1]
