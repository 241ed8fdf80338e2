"""Held-out evaluation of weight versions: greedy answers to the first held-out prompts.

Owns which version is being evaluated and its results. Its samples go ahead of training samples, only to
generators at exactly that version, pinned; while it runs no newer version is announced. It is no part
of the groups' life: nothing of it is journaled but the result, an unfinished one is done again.

    due: version 0, every `evaluation_interval` steps, and the last, unless already done.
    deadline: PATIENCE_LEASES leases in which no sample at all gains a token; what is missing then counts as failed.
"""

from collections import Counter, deque
from collections.abc import Callable

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Evaluated, NeedPrompts, Prompt, Score, ScoreSample, TurnAnswer
from streamrl_workers.scheduler.fleet import Fleet, Generator, Lease, Version
from streamrl_workers.scheduler.groups import Sample
from streamrl_workers.scheduler.outbox import Outbox
from streamrl_workers.scheduler.seeds import sample_seed
from streamrl_workers.scheduler.settings import Settings
from streamrl_workers.tasks.values import FailureKind

PATIENCE_LEASES = 10
"""A version that nobody can load must not stop the run."""
GROUP_BASE = 1 << 62
"""Group numbers of evaluation samples: far above every training group."""
_STEP_SHIFT = 20
"""Held-out prompts fit in so many bits (maxPrompts is at most 100 000)."""


def group_number(step: int, prompt_index: int) -> int:
    """Group number of one evaluation sample."""
    return GROUP_BASE | step << _STEP_SHIFT | prompt_index


class Evaluator:
    """At most one evaluation at a time."""

    def __init__(
        self, settings: Settings, outbox: Outbox, *, fleet: Fleet, done: frozenset[int], failures: Counter[str]
    ) -> None:
        """`failures`: samples that got no reward are counted there, by kind."""
        self._settings = settings
        self._outbox = outbox
        self._fleet = fleet
        self._done = set(done)
        self._failures = failures
        self._prompts: dict[int, str] = {}
        self._sampling = pb.Sampling(
            temperature=0.0, top_p=1.0, max_tokens=settings.sampling.max_tokens, stop=settings.sampling.stop
        )
        self.version: Version | None = None
        self._waiting: deque[int] = deque()
        self._samples: dict[int, Sample] = {}
        """By prompt index: those that are with a generator, with the environment, or done."""
        self._rewards: dict[int, float | None] = {}
        self._progressed = False
        self._progress_s: float | None = None
        self._writing = False
        self.last: Evaluated | None = None

    # ---- which version

    def due(self, step: int) -> bool:
        """Whether this version is to be evaluated and has not been."""
        planned = step % self._settings.evaluation_interval == 0 or step == self._settings.steps
        return planned and self._settings.evaluation_prompts > 0 and step not in self._done

    def need_prompts(self) -> None:
        """Ask for the held-out prompts."""
        if self._settings.evaluation_prompts:
            self._outbox.add(NeedPrompts(split="held_out", first_index=0, count=self._settings.evaluation_prompts))

    def arrived(self, prompt: Prompt) -> None:
        """A held-out prompt's text."""
        if prompt.index in self._prompts or not prompt.index < self._settings.evaluation_prompts:
            return
        self._prompts[prompt.index] = prompt.text
        if self.version is not None and not self._writing:
            self._waiting.append(prompt.index)

    def begin(self, version: Version) -> None:
        """Evaluate this version now."""
        self.version = version
        self._waiting = deque(sorted(self._prompts))
        self._samples, self._rewards, self._writing = {}, {}, False
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
    def waiting(self) -> int:
        """Samples that wait for a generator at the version."""
        return len(self._waiting)

    def wants(self, generator: Generator) -> bool:
        """Whether a sample waits that this generator can take."""
        return bool(self._waiting) and generator.version == self.version

    def issue(self, generator: Generator) -> None:
        """The next sample goes to the generator."""
        assert self.version is not None
        index = self._waiting.popleft()
        number = group_number(self.version[1], index)
        sample = self._samples.setdefault(index, Sample(0, turns=self._settings.new_turns()))
        lease = self._fleet.lend(generator, group_id=number, sample_index=0, evaluation=True)
        request = pb.SampleRequest(
            lease=lease.number,
            group_id=number,
            prompt=self._prompts[index],
            prefix_tokens=sample.tokens,
            context_tokens=0 if sample.turns is None else sample.turns.context_tokens,
            observation="" if sample.turns is None else sample.turns.observation,
            sampling=self._sampling,
            seed=sample_seed(self._settings.seed, group_id=number, sample_index=0),
            pinned=True,
        )
        self._outbox.issue(generator.generator_id, request)

    def progress(self, lease: Lease, item: pb.Progress) -> None:
        """Tokens, and perhaps the end, of one sample."""
        self._progressed = True
        index = _prompt_index(lease.group_id)
        sample = self._samples[index]
        sample.add(item)
        if not item.finish_reason:
            return
        self._fleet.end(lease.number)
        if item.finish_reason == "error":
            self._result(index, None)
        elif sample.ends_turn(item):
            self._outbox.add(sample.ask(lease.number, group_id=lease.group_id, split="held_out", prompt_index=index))
        else:
            self._ask_score(lease.group_id, sample)

    def _ask_score(self, group_id: int, sample: Sample) -> None:
        self._outbox.add(
            ScoreSample(
                group_id=group_id,
                sample_index=0,
                split="held_out",
                prompt_index=_prompt_index(group_id),
                completion=sample.text,
                environment_reward=0.0 if sample.turns is None else sample.turns.reward,
            )
        )

    def answered(self, answer: TurnAnswer) -> None:
        """The environment's answer to a turn; those of an older evaluation are left alone."""
        index = _prompt_index(answer.group_id)
        sample = self._samples.get(index)
        if self.version is None or self._writing or sample is None or sample.turns is None:
            return
        if sample.turns.asked != answer.lease or index in self._rewards:
            return
        self._progressed = True
        if sample.answered(answer, max_turns=self._settings.max_turns):
            self._waiting.append(index)
        elif answer.error:
            self._result(index, None, kind=answer.kind)
        else:
            self._ask_score(answer.group_id, sample)

    def slots_move(self) -> None:
        """Training samples gain tokens: their slots will be free for those that wait here."""
        self._progressed = True

    def lost(self, lease: Lease) -> None:
        """The lease is revoked: its sample is made again from the start."""
        self._fleet.end(lease.number)
        index = _prompt_index(lease.group_id)
        self._samples.pop(index, None)
        self._waiting.appendleft(index)

    def scored(self, score: Score) -> None:
        """The result for one sample; those of an older evaluation are left alone."""
        index = _prompt_index(score.group_id)
        if self.version is None or self._writing or score.group_id != group_number(self.version[1], index):
            return
        if index in self._samples:
            self._progressed = True
            self._result(index, score.reward, kind=score.kind)

    # ---- the end

    def tick(self, now_s: float, *, patience_s: float) -> None:
        """Give up what has made no progress for too long while somebody could have made it."""
        if self._progressed or self._progress_s is None or not len(self._fleet):
            self._progressed = False
            self._progress_s = now_s
        elif self.version is not None and not self._writing and now_s - self._progress_s > patience_s:
            self._revoke()
            self._waiting.clear()
            self._finish()

    def _result(self, index: int, reward: float | None, *, kind: FailureKind | None = None) -> None:
        if index in self._rewards:
            return
        if kind is not None:
            self._failures[kind] += 1
        self._rewards[index] = reward
        if len(self._rewards) == self._settings.evaluation_prompts:
            self._finish()

    def _finish(self) -> None:
        assert self.version is not None
        rewards = [reward for reward in self._rewards.values() if reward is not None]
        tokens = [len(self._samples[index].tokens) >> 2 if index in self._samples else 0 for index in self._rewards]
        result = Evaluated(
            step=self.version[1],
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            prompts=self._settings.evaluation_prompts,
            failed=self._settings.evaluation_prompts - len(rewards),
            mean_tokens=sum(tokens) / len(tokens) if tokens else 0.0,
        )
        self._writing = True
        self._done.add(result.step)
        self._outbox.write(result, then=self._recorded(result))

    def _recorded(self, result: Evaluated) -> Callable[[], None]:
        def then() -> None:
            self.last = result
            self._writing = False
            self.version = None

        return then


def _prompt_index(group_number: int) -> int:
    return group_number & ((1 << _STEP_SHIFT) - 1)
