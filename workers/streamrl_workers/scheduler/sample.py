"""One completion of a prompt: its tokens, its turns with an environment, its score, until its group is scored.

Owns what a generator's progress does to a sample, and what cannot be: a count that does not fit, tokens of a version
that the generator cannot have, more tokens than were asked for. Does not own the environment (the task pool), nor what a
refused message means for the sample (`rollout.py`, `evaluation.py`).

Invariants: `segments` cover all tokens of the turns that have ended, in order; `context_tokens` is where the turn under
way begins, so a lost lease continues with the tokens of that turn that had arrived. A request has the newest context alone: its
prompt is text, and its tokens stand in the sample as the first generator tokenized them, before the tokens sampled after them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from streamrl.proto import stream_pb2 as pb
from streamrl.proto.literals import unmarked
from streamrl_workers.scheduler.generators import Lease
from streamrl_workers.stream.packing import all_finite_32, count_32, no_negative_32, unpack_int32
from streamrl_workers.tasks.values import FailureKind, PlayTurn, Score, ScoreSample, Split, TurnAnswer

_FINISH_REASONS = ("", "stop", "length", "error")
_OVERHEAD_BYTES = 96
"""What a sample takes beside its tokens: numbers and names of the message."""

Span = tuple[int, int, int]
"""Tokens, step, attempt."""


class IllegalEventError(AssertionError):
    """The event cannot happen in this state: a fault of the scheduler itself."""


def illegal_event(state: StrEnum, event: StrEnum, *, can: Iterable[StrEnum], who: str) -> IllegalEventError:
    """Return the error of an event that cannot happen in `state`, where `can` happens."""
    return IllegalEventError(f"a {state} {who} cannot {event}; it can {', '.join(can) or 'do nothing more'}")


@dataclass(frozen=True, slots=True)
class ScoreFailures:
    """Scores that failed since the start, of training samples and held-out ones."""

    counts: Counter[str] = field(default_factory=Counter)
    """By kind."""
    first: dict[str, str] = field(default_factory=dict)
    """Kind -> text of its first error."""

    def add(self, kind: FailureKind | None, error: str) -> None:
        """Count a score; `kind` None: it has not failed."""
        if kind is not None:
            self.counts[kind] += 1
            self.first.setdefault(kind, error)


@dataclass(slots=True, kw_only=True)
class Context:
    """A conversation that began after the sample's first: the model sees nothing of what stands before it."""

    prompt: str
    begin: int
    """Tokens of the sample before it."""
    prompt_tokens: bytes = b""
    """Empty: no generator has tokenized the prompt yet."""

    @property
    def prompt_end(self) -> int:
        """Tokens of the sample up to the end of its prompt."""
        return self.begin + count_32(self.prompt_tokens)


@dataclass(slots=True)
class Turns:
    """Of one sample."""

    completions: list[str] = field(default_factory=list)
    """Text of every turn of the model."""
    observations: list[str] = field(default_factory=list)
    """Answers of the environment, each after the turn of the same place."""
    finish_reasons: list[str] = field(default_factory=list)
    """Of every turn."""
    segments: list[pb.Segment] = field(default_factory=list)
    context_tokens: int = 0
    """Tokens of the sample before the turn under way, as far as they have been tokenized."""
    context: Context | None = None
    """The newest; None: the sample's first, whose prompt is that of the group."""
    contexts: list[int] = field(default_factory=list)
    """Places of observations that are the prompt of one."""
    prompts: int = 0
    """Tokens of such prompts."""
    observation: str = ""
    """The environment's answer that no generator has tokenized yet; it stands after the turns so far."""
    asked: int | None = None
    """Lease of the turn that is with the environment."""
    reward: float = 0.0
    """Sum over the turns."""

    @property
    def unopened(self) -> Context | None:
        """The newest context, if no generator has tokenized its prompt yet."""
        return None if self.context is None or self.context.prompt_tokens else self.context

    @property
    def awaits_text(self) -> bool:
        """Whether text of the environment must be tokenized before the next turn."""
        return bool(self.observation) or self.unopened is not None

    def read(self, item: pb.Progress) -> bytes:
        """Return the tokens that stand before those of `item`: of the observation, or of a context's prompt; may be empty."""
        if (context := self.unopened) is not None:
            data = context.prompt_tokens = item.prompt_tokens
            self.prompts += count_32(data)
        else:
            data, self.observation = item.observation_tokens, ""
        if data:
            self.segments.append(pb.Segment(tokens=count_32(data), observation=True, context=context is not None))
            self.context_tokens += count_32(data)
        return data

    def end(self, text: str, *, reason: str, tokens: int, lease: int) -> None:
        """Note the end of a turn, about which the environment is asked; the sample has `tokens` tokens now."""
        self.segments.append(pb.Segment(tokens=tokens - self.context_tokens))
        self.context_tokens = tokens
        self.completions.append(text)
        self.finish_reasons.append(reason)
        self.asked = lease

    def token_counts(self, *, prompt: int) -> tuple[tuple[int, int], ...]:
        """Return for each turn the tokens before it, and its own. `prompt`: tokens of the prompt."""
        counts, before = [], prompt
        for segment in self.segments:
            if segment.context:
                before = 0
            if not segment.observation:
                counts.append((before, segment.tokens))
            before += segment.tokens
        return tuple(counts)

    def answered(self, answer: TurnAnswer) -> None:
        """Take the answer of the environment."""
        self.asked = None
        if not answer.error:
            self.segments[-1].reward = answer.reward
            self.reward += answer.reward
            if answer.context:
                self.contexts.append(len(self.observations))
                self.context = Context(prompt=answer.observation, begin=self.context_tokens)
            else:
                self.observation = "" if answer.done else answer.observation
            self.observations.append(answer.observation)


def covers(segments: Sequence[pb.Segment], *, tokens: int) -> bool:
    """Return whether the segments together have this number of tokens."""
    return sum(segment.tokens for segment in segments) == tokens


class SampleState(StrEnum):
    """Where one sample is, until its group is scored."""

    WAITING = "waiting"
    OUT = "out"
    """With a generator, under a lease."""
    ANSWERING = "answering"
    """A turn of it is with the environment."""
    FINISHED = "finished"
    SCORED = "scored"


class SampleEvent(StrEnum):
    """What happens to a sample."""

    ISSUE = "issue"
    LOSE = "lose"
    ASK = "ask"
    """A turn has ended; the environment will answer it."""
    CONTINUE = "continue"
    """The environment has answered, and the model has another turn."""
    FINISH = "finish"
    SCORE = "score"


SAMPLE_LIFE: Mapping[SampleState, Mapping[SampleEvent, SampleState]] = MappingProxyType(
    {
        SampleState.WAITING: {SampleEvent.ISSUE: SampleState.OUT},
        SampleState.OUT: {
            SampleEvent.LOSE: SampleState.WAITING,
            SampleEvent.ASK: SampleState.ANSWERING,
            SampleEvent.FINISH: SampleState.FINISHED,
        },
        SampleState.ANSWERING: {SampleEvent.CONTINUE: SampleState.WAITING, SampleEvent.FINISH: SampleState.FINISHED},
        SampleState.FINISHED: {SampleEvent.SCORE: SampleState.SCORED},
        SampleState.SCORED: {},
    }
)


def sample_after(state: SampleState, event: SampleEvent) -> SampleState:
    """Return the state of a sample after `event`; raise `IllegalEventError` if it cannot happen in `state`."""
    following = SAMPLE_LIFE[state].get(event)
    if following is None:
        raise illegal_event(state, event, can=SAMPLE_LIFE[state], who="sample")
    return following


class HeldTokens(NamedTuple):
    """What an engine holds for one sample."""

    tokens: int
    """Including those of earlier turns."""
    context: int
    """Of these, tokens before the turn under way."""
    coming: str
    """Text of a context's prompt that no generator has tokenized yet."""


@dataclass(slots=True)
class Sample:
    """One completion of a group's prompt, until the group is scored."""

    index: int
    state: SampleState = SampleState.WAITING
    lease: int | None = None
    issues: int = 0
    """How often the turn under way was issued."""
    turns: Turns | None = None
    """With an environment."""
    min_version: int | None = None
    """Version of its first token, or the oldest that it can still be made under; None: waiting, no token."""
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    """Extended in place: a copy for each progress would make a long sample quadratic."""
    prompt_tokens: bytes = b""
    spans: list[Span] = field(default_factory=list)
    _outcome: pb.Sample | None = None
    awaits: frozenset[str] = frozenset()
    """Results that the finished sample lacks: its reward, and what extensions add."""
    prefix: bytes = b""
    """Tokens of an earlier sample between the prompt and this sample's tokens; int32."""
    text: str = ""
    """Text of the finished completion; with an environment: of the last turn."""

    @property
    def outcome(self) -> pb.Sample:
        """Fields of the result that are known: finish reason, reward, generator, times, what extensions add.

        Made at its first use: a message for each sample of a deep queue would take more memory than all else of the sample.
        """
        if self._outcome is None:
            self._outcome = pb.Sample()
        return self._outcome

    @property
    def completion_tokens(self) -> int:
        """Tokens of turns and observations, without prompts of later contexts."""
        return count_32(self.tokens) - (0 if self.turns is None else self.turns.prompts)

    def held(self) -> HeldTokens:
        """Return what an engine holds for the sample beside the group's prompt: of the newest context, including its prompt."""
        begin = self._begin
        context_tokens = 0 if self.turns is None else self.turns.context_tokens - begin
        unopened = None if self.turns is None else self.turns.unopened
        prefix = count_32(self.prefix)
        return HeldTokens(
            tokens=count_32(self.tokens) - begin + prefix,
            context=context_tokens + prefix,
            coming="" if unopened is None else unopened.prompt,
        )

    @property
    def read_tokens(self) -> int:
        """Tokens that an engine reads before it continues."""
        later = self.turns is not None and self.turns.context is not None
        return count_32(self.tokens) - self._begin + (0 if later else count_32(self.prompt_tokens))

    @property
    def _begin(self) -> int:
        context = None if self.turns is None else self.turns.context
        return 0 if context is None else context.begin

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in the buffer; 0 before its first token."""
        size = len(self.tokens) + len(self.logprobs) + len(self.prompt_tokens)
        size += 0 if self._outcome is None else len(self._outcome.reference_logprobs)
        return size and size + _OVERHEAD_BYTES

    def follow(self, event: SampleEvent) -> None:
        """Move to the state that follows `event`."""
        self.state = sample_after(self.state, event)

    def texts(self) -> pb.SampleTexts:
        """Return its turns, and the answers of the environment."""
        if self.turns is None:
            return pb.SampleTexts(turns=[self.text])
        turns = self.turns
        observations = map(unmarked, turns.observations)
        return pb.SampleTexts(turns=turns.completions, observations=observations, contexts=turns.contexts)

    @property
    def reward(self) -> float | None:
        """Its reward; None: it has none."""
        return self.outcome.reward if self.outcome.HasField("reward") else None

    def rewarded(self, score: Score) -> None:
        """Take the reward, or the reason why it is missing."""
        if score.reward is not None:
            self.outcome.reward = score.reward
        if score.parts:
            self.outcome.reward_parts.update(score.parts)
        self.outcome.reward_error = score.error

    def result(self) -> pb.Sample:
        """Return the finished sample as the trainer gets it, without the number of its group."""
        result = pb.Sample()
        result.CopyFrom(self.outcome)
        result.sample_index, result.prompt_tokens = self.index, self.prompt_tokens
        result.tokens, result.logprobs = bytes(self.tokens), bytes(self.logprobs)
        for tokens, step, attempt in self.spans:
            result.spans.add(tokens=tokens, step=step, attempt=attempt)
        if self.turns is not None:
            result.segments.extend(self.turns.segments)
        return result

    def issued(
        self, lease: Lease, *, prompt: str, sampling: pb.Sampling, job_seed: int, pinned: bool
    ) -> pb.SampleRequest:
        """Note that a generator has the sample under this lease, and return the request. `prompt`: the group's text."""
        self.follow(SampleEvent.ISSUE)
        self.lease = lease.number
        return self.request(lease, prompt=prompt, sampling=sampling, job_seed=job_seed, pinned=pinned)

    def request(
        self, lease: Lease, *, prompt: str, sampling: pb.Sampling, job_seed: int, pinned: bool
    ) -> pb.SampleRequest:
        """Return what a generator is asked: to continue from the tokens that have arrived. `prompt`: the group's text."""
        request = pb.SampleRequest(
            lease=lease.number,
            group_id=lease.group_id,
            sample_index=self.index,
            prompt=prompt,
            prefix_tokens=self.prefix + bytes(self.tokens),
            context_tokens=count_32(self.prefix),
            sampling=sampling,
            seed=sample_seed(job_seed, group_id=lease.group_id, sample_index=self.index),
            pinned=pinned,
        )
        if self.turns is not None:
            request.context_tokens = self.turns.context_tokens
            request.observation = self.turns.observation
            request.has_turns = bool(self.turns.completions)
            if (context := self.turns.context) is not None:
                request.prompt = context.prompt
                request.prefix_tokens = bytes(self.tokens[4 * context.prompt_end :])
                request.context_tokens -= context.prompt_end
                request.seed = _mix(request.seed ^ context.begin)  # the same prompt again is another draw
        return request

    def add(self, item: pb.Progress) -> int:
        """Append what has arrived; return the growth of `size_bytes`."""
        before = self.size_bytes
        if item.prompt_tokens and (self.turns is None or self.turns.context is None):
            self.prompt_tokens = item.prompt_tokens + self.prefix
        if self.turns is not None and (item.tokens or item.observation_tokens):
            self._add_read(item, turns=self.turns)
        self.tokens += item.tokens
        self.logprobs += item.logprobs
        for span in item.spans:
            self._add_span(_span(span))
        return self.size_bytes - before

    def reset(self) -> int:
        """Remove the tokens of the completion, or of the turn under way; return the change of `size_bytes`."""
        before = self.size_bytes
        kept = 0 if self.turns is None else self.turns.context_tokens
        del self.tokens[4 * kept :], self.logprobs[4 * kept :]
        spans, self.spans = self.spans, []
        for count, step, attempt in spans:
            if kept > 0:
                self.spans.append((min(count, kept), step, attempt))
            kept -= count
        return self.size_bytes - before

    def _add_read(self, item: pb.Progress, *, turns: Turns) -> None:
        """Add tokens of the environment, which were not sampled: log-probs 0, under the version of the token after them."""
        if data := turns.read(item):
            self.tokens += data
            self.logprobs += bytes(len(data))
            _, step, attempt = _span(item.spans[0]) if item.spans else self.spans[-1]
            self._add_span((count_32(data), step, attempt))

    def _add_span(self, span: Span) -> None:
        if self.spans and self.spans[-1][1:] == span[1:]:
            span = (self.spans.pop()[0] + span[0], span[1], span[2])
        self.spans.append(span)

    # ---- with an environment

    def awaits_observation(self, item: pb.Progress) -> bool:
        """Return whether `item` has the tokens of the observation that is awaited, and the token after them."""
        return bool(self.turns and self.turns.observation and item.spans and not len(item.observation_tokens) % 4)

    def ended_unrewarded(self, item: pb.Progress) -> None:
        """Note the end of a completion that gets no reward."""
        self.outcome.finish_reason = item.finish_reason
        self.outcome.generate_s += item.generate_s
        self.text = item.text

    def ended(
        self, item: pb.Progress, lease: Lease, *, split: Split, prompt_index: int, prompt: str
    ) -> PlayTurn | ScoreSample:
        """Note the end of a completion, and return what the environment is asked about the turn, or the reward about the sample.

        A turn without a token is none: the model has no positions left, the sample ends with the turn before.
        """
        self.outcome.finish_reason = item.finish_reason
        self.outcome.generate_s += item.generate_s
        if self.turns is not None and self.turns.context_tokens * 4 == len(self.tokens):
            return self.to_score(lease.group_id, split=split, prompt_index=prompt_index)
        self.text = item.text
        if self.turns is None:
            return self.to_score(lease.group_id, split=split, prompt_index=prompt_index)
        self.turns.end(self.text, reason=item.finish_reason, tokens=len(self.tokens) >> 2, lease=lease.number)
        return PlayTurn(
            group_id=lease.group_id,
            sample_index=self.index,
            lease=lease.number,
            split=split,
            prompt_index=prompt_index,
            completions=tuple(self.turns.completions),
            last_token=unpack_int32(bytes(self.tokens[-4:]))[0],
            prompt=prompt,
            observations=tuple(self.turns.observations),
            contexts=tuple(self.turns.contexts),
            finish_reasons=tuple(self.turns.finish_reasons),
            token_counts=self.turns.token_counts(prompt=len(self.prompt_tokens) >> 2),
        )

    def to_score(self, group_id: int, *, split: Split, prompt_index: int) -> ScoreSample:
        """Return the request for its reward."""
        return ScoreSample(
            group_id=group_id,
            sample_index=self.index,
            split=split,
            prompt_index=prompt_index,
            completion=self.text,
            environment_reward=0.0 if self.turns is None else self.turns.reward,
        )

    def answered(self, answer: TurnAnswer, *, max_turns: int | None) -> bool:
        """Take the environment's answer; whether the model has another turn. What a limit ends has finish reason `length`."""
        assert self.turns is not None
        self.turns.answered(answer)
        if answer.error or answer.done:
            return False
        goes_on = max_turns is None or len(self.turns.completions) < max_turns
        if not goes_on:
            self.outcome.finish_reason = "length"
        return goes_on


def _span(span: pb.VersionSpan) -> Span:
    return span.tokens, span.step, span.attempt


def validate_progress(lease: Lease, sample: Sample, item: pb.Progress, *, newest_step: int, max_tokens: int) -> str:
    """Return what is wrong with `item`; empty if nothing is.

    Args:
        lease: under which it was asked for.
        sample: as it is without `item`.
        item: what the generator has sent.
        newest_step: newest version that the generator can have.
        max_tokens: of a completion; with an environment: of a turn.
    """
    spans = [(span.tokens, span.step) for span in item.spans]
    tokens = sum(count for count, _ in spans)
    if not len(item.tokens) == len(item.logprobs) == 4 * tokens:
        return f"{len(item.tokens)} bytes of tokens, {len(item.logprobs)} of log-probs, versions for {tokens} tokens"
    if (made := _made(sample) + tokens) > max_tokens:
        return f"{made} tokens, at most {max_tokens} were asked for"
    if spans and not sample.spans and not lease.version_step <= spans[0][1] <= newest_step:
        return f"first token of version {spans[0][1]}, expected {lease.version_step} to {newest_step}"
    if any(step > newest_step or not count for count, step in spans):
        return f"tokens of a version above {newest_step}, or a version without a token"
    if item.observation_tokens and not sample.awaits_observation(item):
        return f"{len(item.observation_tokens)} bytes of an observation's tokens, which were not asked for"
    return _bad_prompt(sample, item) or _bad_numbers(item)


def _made(sample: Sample) -> int:
    """Tokens of the completion, or of the turn under way, so far."""
    return count_32(sample.tokens) - (0 if sample.turns is None else sample.turns.context_tokens)


def _bad_prompt(sample: Sample, item: pb.Progress) -> str:
    """Return what is wrong with a context's prompt, which is tokenized once: later generators must have the same tokens."""
    context = None if sample.turns is None else sample.turns.context
    if context is None:
        return ""
    if item.spans and not (context.prompt_tokens or item.prompt_tokens):
        return "tokens of a context whose prompt was not tokenized"
    if item.prompt_tokens and context.prompt_tokens not in (b"", item.prompt_tokens):
        return "a context's prompt in other tokens than before"
    return ""


def _bad_numbers(item: pb.Progress) -> str:
    for name, data in (("prompt", item.prompt_tokens), ("completion", item.tokens), ("turn", item.observation_tokens)):
        if not no_negative_32(data):
            return f"tokens of a {name} that are no token ids"
    if not all_finite_32(item.logprobs):
        return "log-probs that are no finite numbers"
    if item.finish_reason not in _FINISH_REASONS:
        return f"an end by {item.finish_reason[:32]!r}"
    return ""


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_seed(job_seed: int, *, group_id: int, sample_index: int) -> int:
    """Return the 64-bit seed of one sample, so that a run can be repeated; re-issues keep it.

    seed = mix(mix(mix(job seed) ^ group id) ^ sample index),   mix = the finaliser of SplitMix64
    """
    return _mix(_mix(_mix(job_seed) ^ group_id) ^ sample_index)
