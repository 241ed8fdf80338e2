"""Held-out evaluation of weight versions.

`Evaluator` is the `WorkSource` of a greedy answer, and sampled ones, to each of the first held-out prompts. Its samples go ahead of training
samples, only to generators at exactly that version, pinned. They are no groups: nothing of them is journaled but the result; an unfinished
evaluation starts again.

    due: version 0, every `interval` steps, and the last, unless already done
    deadline: PATIENCE_LEASES leases in which no sample gains a token; what is missing then counts as failed

Without generators the deadline holds only if the trainer waits for the evaluation.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.generators import Fleet, Generator, KvEstimate, KvSize, Lease, Version
from streamrl_workers.scheduler.records import Evaluated, EvaluatedTask
from streamrl_workers.scheduler.sample import Sample, ScoreFailures, Turns, validate_progress
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.tasks.values import FailureKind, NeedPrompts, Prompt, Score, TurnAnswer

PATIENCE_LEASES = 10
"""Leases without progress after which an evaluation ends: a version that no generator can load must not stop the run."""
GROUP_BASE = 1 << 62
"""Group numbers of evaluation samples: far above every training group."""
_STEP_SHIFT = 20
"""Bits of a held-out prompt's index (maxPrompts is at most 100 000)."""


_Answer = tuple[int, int]
"""Prompt index and sample index; sample 0 is the greedy answer."""


def is_evaluated(group_id: int) -> bool:
    """Return whether the group number is one of evaluation samples."""
    return group_id >= GROUP_BASE


def group_number(step: int, prompt_index: int) -> int:
    """Return the group number of one evaluation sample."""
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
        failures: ScoreFailures,
        kv: KvEstimate,
        trainer_waits: bool = False,
    ) -> None:
        """`done`: versions that have been evaluated. `failures`: scores that failed are counted there too."""
        self._trainer_waits = trainer_waits
        self._settings = settings
        self._of = settings.evaluation
        self._outbox = outbox
        self._fleet = fleet
        self._done = set(done)
        self._failures = failures
        self._kv = kv
        self.prompts: dict[int, Prompt] = {}
        """Held-out prompts that have arrived, by index."""
        self.version: Version | None = None
        self.queue: deque[_Answer] = deque()
        """Answers that wait for a generator at the version."""
        self._samples: dict[_Answer, Sample] = {}
        """Those that are with a generator, with the environment, or done."""
        self._rewards: dict[_Answer, float | None] = {}
        self._faults: Counter[_Answer] = Counter()
        """Refused messages."""
        self._patience_s = PATIENCE_LEASES * settings.lease_s
        self.progressed = False
        """Whether any sample has gained a token since the last tick; training samples count: their slots become free for those of the queue."""
        self._progress_s: float | None = None
        self._writing = False
        self.last: Evaluated | None = None

    # ---- which version

    def due(self, step: int) -> bool:
        """Return whether this version must be evaluated and has not been."""
        planned = step % self._of.interval == 0 or step >= self._settings.steps
        wanted = self._of.enabled and self._of.prompts > 0
        return planned and wanted and step not in self._done

    def need_prompts(self) -> None:
        """Ask for the held-out prompts."""
        if self._of.prompts:
            self._outbox.add(NeedPrompts(split="held_out", first_index=0, count=self._of.prompts))

    def arrived(self, prompt: Prompt) -> None:
        """Take a held-out prompt."""
        if prompt.index in self.prompts or not prompt.index < self._of.prompts:
            return
        self.prompts[prompt.index] = prompt
        self.progressed = True
        if self.version is not None and not self._writing:
            self.queue.extend((prompt.index, answer) for answer in self._answers)

    def begin(self, version: Version) -> None:
        """Evaluate this version now."""
        self.version = version
        self.queue = deque((index, answer) for answer in self._answers for index in sorted(self.prompts))
        self._samples, self._rewards, self._writing = {}, {}, False
        self._faults.clear()
        self.progressed = True

    def abandon(self) -> None:
        """Stop the evaluation: the trainer went back, or generators are past the version."""
        if self.version is None or self._writing:
            return
        self._revoke()
        self.version = None
        self.queue.clear()

    def _revoke(self) -> None:
        for generator in self._fleet:
            for lease in [lease for lease in generator.leases.values() if lease.source is self]:
                self._outbox.cancel(generator.generator_id, lease.number)
                self._fleet.end(lease.number)

    # ---- samples

    @property
    def _answers(self) -> range:
        return range(1 + self._of.sampled)

    def wants(self, generator: Generator) -> bool:
        """Return whether a sample waits that this generator can take."""
        return bool(self.queue) and generator.weights.version == self.version and generator.use == "any"

    def fits(self, generator: Generator) -> bool:
        """Return whether the generator's memory has room for the next sample."""
        assert self.version is not None
        index, _ = key = self.queue[0]
        return generator.kv.fits(group_number(self.version[1], index), self._size(key))

    def _size(self, key: _Answer) -> KvSize:
        held = (self._samples.get(key) or Sample(key[1])).held()
        return self._kv.size(
            self.prompts[key[0]].text, prompt_tokens=None, tokens=held.tokens, context=held.context, coming=held.coming
        )

    def issue(self, generator: Generator) -> int:
        """Issue the next sample to the generator; return the bytes of its prompt, about."""
        assert self.version is not None
        index, answer = key = self.queue.popleft()
        number = group_number(self.version[1], index)
        task = self._settings.tasks.of(index)
        turns = None if task.max_turns is None else Turns()
        sample = self._samples.setdefault(key, Sample(answer, turns=turns))
        size = self._size(key)
        lease = self._fleet.lend(generator, group_id=number, sample_index=answer, size=size, source=self)
        sampling = task.sampling if answer else _greedy(task.sampling)
        job_seed = self._settings.seed
        prompt = self.prompts[index].text
        request = sample.request(lease, prompt=prompt, sampling=sampling, job_seed=job_seed, pinned=True)
        self._outbox.issue(generator.generator_id, request)
        return len(request.prompt)

    def progress(self, lease: Lease, item: pb.Progress) -> None:
        """Take tokens, and perhaps the end, of one sample."""
        key = _answer(lease)
        sample = self._samples[key]
        if item.finish_reason == "error":
            self._fleet.end(lease.number)
            self._result(key, None)
            return
        max_tokens = self._settings.tasks.of(key[0]).sampling.max_tokens
        if validate_progress(lease, sample, item, newest_step=lease.version_step, max_tokens=max_tokens):
            self._refuse(lease, key)
            return
        self.progressed = True
        sample.add(item)
        if item.finish_reason:
            self._fleet.end(lease.number)
            prompt = self.prompts[key[0]].text
            self._outbox.add(sample.ended(item, lease, split="held_out", prompt_index=key[0], prompt=prompt))
        else:
            self._fleet.resize(lease, self._size(key))

    def _refuse(self, lease: Lease, key: _Answer) -> None:
        """Refuse a message: the sample is repeated, a bounded number of times."""
        self._outbox.cancel(lease.generator_id, lease.number)
        self.lost(lease)
        self._faults[key] += 1
        if self._faults[key] >= self._settings.max_issues:
            self.queue.remove(key)
            self._result(key, None)

    def answered(self, answer: TurnAnswer) -> None:
        """Take the environment's answer to a turn; ignore one of an older evaluation."""
        key = _answer(answer)
        sample = self._samples.get(key)
        if self.version is None or self._writing or sample is None or sample.turns is None:
            return
        if sample.turns.asked != answer.lease or key in self._rewards:
            return
        self.progressed = True
        if sample.answered(answer, max_turns=self._settings.tasks.of(key[0]).max_turns):
            self.queue.append(key)
        elif answer.error:
            self._result(key, None, kind=answer.kind, error=answer.error)
        else:
            self._outbox.add(sample.to_score(answer.group_id, split="held_out", prompt_index=key[0]))

    def lost(self, lease: Lease) -> None:
        """Take back the sample of a revoked lease: it is repeated from its start."""
        self._fleet.end(lease.number)
        key = _answer(lease)
        self._samples.pop(key, None)
        self.queue.appendleft(key)

    def scored(self, score: Score) -> None:
        """Take the reward of one sample; ignore one of an older evaluation."""
        key = _answer(score)
        if self.version is None or self._writing or score.group_id != group_number(self.version[1], key[0]):
            return
        if key in self._samples:
            self.progressed = True
            self._result(key, score.reward, kind=score.kind, error=score.error)

    # ---- the end

    def tick(self, now_s: float) -> None:
        """End an evaluation without progress for too long, while a generator could have made some."""
        is_possible = self._trainer_waits or any(not generator.paused for generator in self._fleet)
        if self.progressed or self._progress_s is None or not is_possible:
            self.progressed = False
            self._progress_s = now_s
        elif self.version is not None and not self._writing and now_s - self._progress_s > self._patience_s:
            self._revoke()
            self.queue.clear()
            self._finish()

    def _result(self, key: _Answer, reward: float | None, *, kind: FailureKind | None = None, error: str = "") -> None:
        if key in self._rewards:
            return
        self._failures.add(kind, error)
        self._rewards[key] = reward
        if len(self._rewards) == self._of.prompts * len(self._answers):
            self._finish()

    def _finish(self) -> None:
        assert self.version is not None
        prompts = range(self._of.prompts)
        of_task: dict[str, set[int]] = {name: set() for name in self._settings.tasks.names}
        for index in prompts if of_task else ():
            of_task[self._settings.tasks.of(index).name].add(index)
        result = Evaluated(
            step=self.version[1],
            **asdict(self._result_of(prompts)),
            tasks={name: self._result_of(indexes) for name, indexes in of_task.items()},
        )
        self._writing = True
        self._done.add(result.step)
        self._outbox.write(result, then=partial(self._recorded, result))

    def _result_of(self, prompts: Collection[int]) -> EvaluatedTask:
        """Return the result of the answers to these prompts."""
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
