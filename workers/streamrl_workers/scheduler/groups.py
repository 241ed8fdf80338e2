"""Groups and samples in memory, and the table of all of them.

Owns the state of every group that is live or not yet covered by a checkpoint, its place in the
staleness window, and the counts that metrics read. Every change of a group's state goes through
`GroupTable`, which follows the table in `life.py`.

A group's `bounds` say under which versions its first token was made, or will be made at the earliest:
one entry for each sample that has a token (its version) or is out without one (the version that its
generator had at issue). The group counts as begun at the smallest.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.dispatch import Key
from streamrl_workers.scheduler.effects import PlayTurn, Split, TurnAnswer
from streamrl_workers.scheduler.group_stats import GroupStats
from streamrl_workers.scheduler.life import Event, SampleEvent, SampleState, State, after, sample_after
from streamrl_workers.scheduler.staleness import Window
from streamrl_workers.scheduler.turns import Turns
from streamrl_workers.stream.packing import unpack_int32

_OVERHEAD_BYTES = 96
"""What a sample takes beside its tokens: numbers and names of the message."""

Span = tuple[int, int, int]
"""Tokens, step, attempt."""


@dataclass(slots=True)
class Sample:
    """One completion of a group's prompt, until the group is scored."""

    index: int
    state: SampleState = SampleState.WAITING
    lease: int | None = None
    issues: int = 0
    """Of the turn under way."""
    turns: Turns | None = None
    """With an environment."""
    bound: int | None = None
    """Version of its first token, or the oldest that it can still be made under; None: waiting, no token."""
    tokens: bytes = b""
    logprobs: bytes = b""
    prompt_tokens: bytes = b""
    spans: list[Span] = field(default_factory=list)
    generator_id: str = ""
    finish_reason: str = ""
    generate_s: float = 0.0
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_error: str = ""

    text: str = ""
    """Of the completion, when it has ended; with an environment: of the last turn."""

    @property
    def size_bytes(self) -> int:
        """What it takes in the buffer."""
        return len(self.tokens) + len(self.logprobs) + len(self.prompt_tokens) + _OVERHEAD_BYTES

    def follow(self, event: SampleEvent) -> None:
        """Go on in its life."""
        self.state = sample_after(self.state, event)

    def add(self, item: pb.Progress) -> None:
        """Append what has arrived."""
        if self.turns is not None and (item.tokens or item.observation_tokens):
            self._add_observation(item, turns=self.turns)
        self.tokens += item.tokens
        self.logprobs += item.logprobs
        if item.prompt_tokens:
            self.prompt_tokens = item.prompt_tokens
        for span in item.spans:
            self._add_span(_span(span))

    def begin_anew(self) -> None:
        """Forget the tokens that have arrived; with an environment they stay, since turns before may have ended."""
        if self.turns is None:
            self.tokens = self.logprobs = b""
            self.spans.clear()

    def _add_observation(self, item: pb.Progress, *, turns: Turns) -> None:
        """Nobody drew the environment's tokens: log-probs 0, under the version of the token behind them, with which they come."""
        count = len(item.observation_tokens) >> 2
        turns.observed(count)
        if count:
            self.tokens += item.observation_tokens
            self.logprobs += bytes(len(item.observation_tokens))
            _, step, attempt = _span(item.spans[0]) if item.spans else self.spans[-1]
            self._add_span((count, step, attempt))

    def _add_span(self, span: Span) -> None:
        if self.spans and self.spans[-1][1:] == span[1:]:
            span = (self.spans.pop()[0] + span[0], span[1], span[2])
        self.spans.append(span)

    # ---- with an environment

    def awaits_observation(self, item: pb.Progress) -> bool:
        """Whether the observation's tokens in `item` are the ones that are to come, with the token behind them."""
        return bool(self.turns and self.turns.observation and item.spans and not len(item.observation_tokens) % 4)

    def ends_turn(self, item: pb.Progress) -> bool:
        """The completion has ended with `item`; whether that is a turn for the environment.

        A turn without a token is none: the model has no positions left, the sample ends with the turn before.
        """
        if self.turns is not None and self.turns.context_tokens * 4 == len(self.tokens):
            return False
        self.text = item.text
        return self.turns is not None

    def ask(self, lease: int, *, group_id: int, split: Split, prompt_index: int) -> PlayTurn:
        """What the environment is asked about the turn that ended under `lease`."""
        assert self.turns is not None
        self.turns.end(self.text, tokens=len(self.tokens) >> 2, lease=lease)
        return PlayTurn(
            group_id=group_id,
            sample_index=self.index,
            lease=lease,
            split=split,
            prompt_index=prompt_index,
            completions=tuple(self.turns.completions),
            last_token=unpack_int32(self.tokens[-4:])[0],
        )

    def answered(self, answer: TurnAnswer, *, max_turns: int | None) -> bool:
        """Take the environment's answer; whether the model has another turn. What a limit ends has finish reason `length`."""
        assert self.turns is not None
        self.turns.answered(answer)
        if answer.error or answer.done:
            return False
        goes_on = max_turns is None or len(self.turns.completions) < max_turns
        if not goes_on:
            self.finish_reason = "length"
        return goes_on


def _span(span: pb.VersionSpan) -> Span:
    return span.tokens, span.step, span.attempt


@dataclass(slots=True)
class Group:
    """One prompt and its samples."""

    group_id: int
    prompt_index: int
    prompt_key: int = 0
    prompt: str = ""
    state: State = State.PLANNED
    samples: list[Sample] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Samples that wait for a slot, next one last."""
    entry: tuple[Key, int] | None = None
    """Its entry in the central queue; an entry that is not this one is out of date."""
    bounds: dict[int, int] = field(default_factory=dict)
    """Version -> samples whose `bound` it is."""
    begun: int | None = None
    """Smallest of `bounds`; once scored, the version of the first token."""
    unfinished: int = 0
    unscored: int = 0
    buffered_bytes: int = 0
    trajectories: tuple[bytes, ...] = ()
    """Once scored, until a step's record has the group: serialized, by sample index."""
    size_bytes: int = 0
    stats: GroupStats | None = None
    serial: int | None = None
    """Its place in the order of hand-over, while it may be handed over in the step that has no record yet."""
    recorded: bool = False
    """In the record of a step, also of one that is being repeated."""

    def rebound(self, *, old: int | None, new: int | None) -> None:
        """A sample's bound has changed."""
        if old is not None:
            self.bounds[old] -= 1
            if not self.bounds[old]:
                del self.bounds[old]
        if new is not None:
            self.bounds[new] = self.bounds.get(new, 0) + 1


class GroupTable:
    """All groups in memory; the only place where their states change."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._groups: dict[int, Group] = {}
        self.counts: dict[State, int] = dict.fromkeys(State, 0)
        self.buffered_bytes = 0
        """Finished samples of groups that no step has consumed."""
        self.dropped: Counter[str] = Counter()
        self._recorded = 0
        self.drops_in_a_row: Counter[str] = Counter()
        """Reason -> groups dropped since one could last be scored."""

    def get(self, group_id: int) -> Group | None:
        """The group, if it is in memory."""
        return self._groups.get(group_id)

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    @property
    def filling_step(self) -> int:
        """The step that is being filled: the first without a record."""
        return self._window.step

    @property
    def live(self) -> int:
        """Groups that are in no step's record (and not dropped)."""
        return len(self._groups) - self._recorded

    def add(self, group: Group) -> None:
        """A group that has been planned, or was found in the journal."""
        assert group.group_id not in self._groups, f"group {group.group_id} exists"
        self._groups[group.group_id] = group
        self.counts[group.state] += 1
        if group.recorded:
            self._recorded += 1
        elif group.begun is not None:
            self._window.begin(group.begun)
            self.buffer(group, group.size_bytes)

    def follow(self, group: Group, event: Event) -> None:
        """Go on in the group's life."""
        following = after(group.state, event)
        self.counts[group.state] -= 1
        self.counts[following] += 1
        group.state = following

    def record(self, group: Group) -> None:
        """The group is in the record of a step now; it no longer counts as waiting for the trainer.

        Its samples leave the memory: the journal has them until a checkpoint covers the step, and whoever hands the
        group over again reads them there.
        """
        self._recorded += not group.recorded
        group.recorded = True
        self.unbuffer(group)
        group.trajectories = ()
        group.samples, group.bounds, group.prompt = [], {}, ""

    def drop(self, group: Group, event: Event) -> None:
        """The group will never be trained; it leaves the memory."""
        self.follow(group, event)
        self.counts[State.DROPPED] -= 1
        self.dropped[event.value] += 1
        self.drops_in_a_row[event.value] += 1
        if group.begun is not None:
            self._window.end(group.begun)
        self.unbuffer(group)
        del self._groups[group.group_id]

    def forget(self, group_id: int) -> None:
        """A checkpoint covers the consumed group."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self.counts[group.state] -= 1
            self._recorded -= group.recorded

    def buffer(self, group: Group, size_bytes: int) -> None:
        """So many bytes of the group are finished."""
        group.buffered_bytes += size_bytes
        self.buffered_bytes += size_bytes

    def unbuffer(self, group: Group) -> None:
        """None of its bytes count any more."""
        self.buffered_bytes -= group.buffered_bytes
        group.buffered_bytes = 0

    def rebound(self, group: Group, sample: Sample, *, to: int | None) -> None:
        """Set the sample's bound and keep the window right."""
        group.rebound(old=sample.bound, new=to)
        sample.bound = to
        begun = min(group.bounds, default=None)
        if begun == group.begun:
            return
        if group.begun is None and begun is not None:
            self._window.begin(begun)
        elif group.begun is not None and begun is None:
            self._window.end(group.begun)
        elif group.begun is not None and begun is not None:
            self._window.move(group.begun, to=begun)
        group.begun = begun
