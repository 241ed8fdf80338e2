"""The values of a run: groups with their states, the table of all groups, and the staleness window.

Owns which event may follow which state of a group, the state of every group that is live or not yet covered by a checkpoint, its place
in the staleness window, and the counts that metrics read. Knows no I/O and no clock. An event that the table of states does not list
raises `IllegalEventError` and changes nothing.

    planned -> issued -> running -> finished -> scored -> delivered -> consumed
       ^---------'  lose                           ^---------'----------'  roll_back
    planned -> scored, if the source has the samples
    every state before `delivered` -> dropped

A group's `min_versions` are the versions of its samples' first tokens: one entry for each sample that has a token (its version) or is
with a generator without one (the version that its generator had at issue). The smallest is its `start_version`.

The staleness rule (`docs/reference/staleness.md` proves that it is necessary and sufficient): a group begun under version b must be consumed in a
step <= b + S; a step takes exactly B groups. Invariant: for every version j of the window k-S .. k

    slack_j = room + (j + S - k) * B - n_j  >=  0,     n_j = live groups begun at <= j,

and no live group began before k-S. k is the step being filled and `room` the groups that it lacks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from streamrl.proto import stream_pb2 as pb
from streamrl.proto.literals import unmarked
from streamrl_workers.scheduler.records import SampleStats
from streamrl_workers.scheduler.sample import Sample, illegal_event
from streamrl_workers.scheduler.settings import TaskSettings
from streamrl_workers.stream.segments import completion_tokens
from streamrl_workers.tasks.values import Prompt, Reference


class GroupState(StrEnum):
    """Where a group is in its life."""

    PLANNED = "planned"
    """No sample is with a generator, no token has arrived."""
    ISSUED = "issued"
    """A sample is with a generator, no token has arrived."""
    RUNNING = "running"
    """A token has arrived."""
    FINISHED = "finished"
    """All samples are finished."""
    SCORED = "scored"
    """All samples are scored."""
    DELIVERED = "delivered"
    """With the trainer."""
    CONSUMED = "consumed"
    """In the record of a step."""
    DROPPED = "dropped"


class GroupEvent(StrEnum):
    """What happens to a group."""

    ISSUE = "issue"
    BEGIN = "begin"
    """The first token of the group has arrived."""
    LOSE = "lose"
    """The last sample that was with a generator has been lost without a token."""
    SUPPLY = "supply"
    """Its source has the samples: nothing is generated."""
    FINISH = "finish"
    """The last sample is finished."""
    SCORE = "score"
    """The last sample is scored."""
    DELIVER = "deliver"
    CONSUME = "consume"
    ROLL_BACK = "roll_back"
    """The trainer does not have it (any more)."""
    REWARD_FAILED = "reward_failed"
    GENERATION_FAILED = "generation_failed"
    ZERO_VARIANCE = "zero_variance"
    """Its rewards are all equal, and another group takes its place."""
    RUN_ENDED = "run_ended"
    TOO_STALE = "too_stale"
    """Found in a journal that was written under a larger staleness."""


_END = {GroupEvent.RUN_ENDED: GroupState.DROPPED}
_FAIL = {GroupEvent.GENERATION_FAILED: GroupState.DROPPED, **_END}

GROUP_LIFE: Mapping[GroupState, Mapping[GroupEvent, GroupState]] = MappingProxyType(
    {
        GroupState.PLANNED: {GroupEvent.ISSUE: GroupState.ISSUED, GroupEvent.SUPPLY: GroupState.SCORED, **_FAIL},
        GroupState.ISSUED: {GroupEvent.BEGIN: GroupState.RUNNING, GroupEvent.LOSE: GroupState.PLANNED, **_FAIL},
        GroupState.RUNNING: {GroupEvent.FINISH: GroupState.FINISHED, **_FAIL},
        GroupState.FINISHED: {
            GroupEvent.SCORE: GroupState.SCORED,
            GroupEvent.REWARD_FAILED: GroupState.DROPPED,
            GroupEvent.ZERO_VARIANCE: GroupState.DROPPED,
            **_FAIL,
        },
        GroupState.SCORED: {GroupEvent.DELIVER: GroupState.DELIVERED, GroupEvent.TOO_STALE: GroupState.DROPPED, **_END},
        GroupState.DELIVERED: {GroupEvent.CONSUME: GroupState.CONSUMED, GroupEvent.ROLL_BACK: GroupState.SCORED},
        GroupState.CONSUMED: {GroupEvent.ROLL_BACK: GroupState.SCORED},
        GroupState.DROPPED: {},
    }
)


def after(state: GroupState, event: GroupEvent) -> GroupState:
    """Return the state of a group after `event`; raise `IllegalEventError` if it cannot happen in `state`."""
    following = GROUP_LIFE[state].get(event)
    if following is None:
        raise illegal_event(state, event, can=GROUP_LIFE[state], who="group")
    return following


@dataclass(slots=True, kw_only=True)
class GroupPrompt:
    """The prompt of a group."""

    index: int
    key: int = 0
    """Stable hash of the text; 0: unknown."""
    text: str = ""
    tokens: bytes = b""
    """int32, once a generator has tokenized the text. The samples of the group share this copy."""
    reference: Reference | None = None
    """What its reward sees beside the text."""
    tokens_hash: bytes = b""
    """What the tokens must have; empty: any tokens will do."""

    def texts(self, samples: Sequence[pb.SampleTexts]) -> bytes:
        """Return what the archive stores of the group's texts."""
        answer, metadata = self.reference or (None, "")
        stored = pb.GroupTexts(prompt=unmarked(self.text), samples=samples, answer=answer, metadata=metadata)
        return stored.SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """What remains of a group's samples once it is scored."""

    samples: tuple[bytes, ...]
    """Serialized `Sample`, by sample index. Empty after the delivery: the journal has them."""
    size_bytes: int
    stats: SampleStats | None
    """None: not known, of a group that the journal has as planned."""


class GroupSource(Protocol):
    """Where groups come from, such as prompts."""

    @property
    def is_rewarded(self) -> bool:
        """Whether samples of these groups get a reward."""

    def claim(self, number: int) -> int | None:
        """Return the index of the prompt from which group `number` is made; None: another source makes this group."""

    def start(self, group: "Group", prompt: Prompt) -> None:
        """Make the samples of a planned group, whose prompt has arrived."""


@dataclass(slots=True, kw_only=True)
class Group:
    """One prompt and its samples."""

    group_id: int
    prompt: GroupPrompt
    source: GroupSource
    task: TaskSettings
    state: GroupState = GroupState.PLANNED
    samples: list[Sample] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Indices of samples that wait for a slot, next one last."""
    min_versions: dict[int, int] = field(default_factory=dict)
    """Version -> samples whose `min_version` it is."""
    start_version: int | None = None
    """Smallest of `min_versions`; once scored, the version of the first token."""
    unfinished: int = 0
    unscored: int = 0
    buffered_bytes: int = 0
    result: ScoredGroup | None = None
    """Once scored."""
    recorded: bool = False
    """In the record of a step, including one that is being repeated."""

    def begin_with(self, samples: list[Sample]) -> None:
        """Set the samples that will be generated."""
        self.samples = samples
        self.unfinished = self.unscored = len(samples)

    def count_min_version(self, *, old: int | None, new: int | None) -> None:
        """Replace one sample's `min_version`."""
        if old is not None:
            self.min_versions[old] -= 1
            if not self.min_versions[old]:
                del self.min_versions[old]
        if new is not None:
            self.min_versions[new] = self.min_versions.get(new, 0) + 1


class GroupFilter(Protocol):
    """Drops scored groups, such as those that teach nothing."""

    reason: GroupEvent

    def drops(self, rewards: Sequence[float | None], *, step: int) -> bool:
        """Return whether to drop a group with these rewards (None: no reward) while `step` is filled."""


class SampleStage(Protocol):
    """Adds a result to each finished sample, beside its reward."""

    def put(self, group: Group, sample: Sample) -> None:
        """Take a sample that has all its tokens, and add to its `awaits`."""

    def forget(self, group: Group) -> None:
        """Drop the samples of a group that will not be trained."""

    def settle(self) -> None:
        """Do what the last event has made possible."""


class GroupTable:
    """All groups in memory; the only place where their states change."""

    def __init__(self, window: "Window", *, rewards_alone: bool = True) -> None:
        """`rewards_alone`: whether finished samples await nothing but rewards."""
        self.window = window
        self._rewards_alone = rewards_alone
        self.by_id: dict[int, Group] = {}
        self.counts: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        self.buffered_bytes = 0
        """Bytes of samples, including running ones, of groups that have not been delivered."""
        self.live = 0
        """Groups that are in no step's record and not dropped."""
        self.dropped: Counter[str] = Counter()
        """Reason -> groups."""
        self.dropped_of: Counter[str] = Counter()
        """Task -> groups."""
        self.drops_in_a_row: Counter[str] = Counter()
        """Reason -> groups dropped since one could last be scored."""

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self.by_id.values()))

    def __getitem__(self, group_id: int) -> Group:
        return self.by_id[group_id]

    def awaits_scores(self, groups: int) -> bool:
        """Return whether `groups` groups lack rewards alone."""
        scored = self.counts[GroupState.SCORED]
        return self._rewards_alone and scored < groups <= scored + self.counts[GroupState.FINISHED]

    def add(self, group: Group) -> None:
        """Add a group that has been planned or was found in the journal."""
        assert group.group_id not in self.by_id, f"group {group.group_id} exists"
        self.by_id[group.group_id] = group
        self.counts[group.state] += 1
        if group.recorded:
            return
        self.live += 1
        if group.start_version is not None:
            self.window.begin(group.start_version)
            self.buffer(group, 0 if group.result is None else group.result.size_bytes)

    def follow(self, group: Group, event: GroupEvent) -> None:
        """Move the group to the state that follows `event`."""
        following = after(group.state, event)
        self.counts[group.state] -= 1
        self.counts[following] += 1
        group.state = following

    def begin(self, group: Group) -> None:
        """Begin the group under the version of the step that is being filled."""
        group.start_version = self.window.step
        self.window.begin(group.start_version)

    def store(self, group: Group, result: ScoredGroup) -> None:
        """Replace the group's samples by what is trained."""
        group.result, group.samples = result, []
        group.prompt.text, group.prompt.tokens, group.prompt.reference = "", b"", None
        self.unbuffer(group)
        self.buffer(group, result.size_bytes)

    def consume(self, group: Group) -> None:
        """Put the group into the record of a step; it no longer counts as waiting for the trainer."""
        self.follow(group, GroupEvent.CONSUME)
        self.live -= not group.recorded
        group.recorded = True
        self._release(group)
        group.samples, group.min_versions = [], {}
        group.prompt.text, group.prompt.reference = "", None

    def deliver(self, group: Group) -> None:
        """Note that the trainer has the group, and drop its samples from memory.

        The journal has them until a checkpoint covers the step; a later delivery reads them there.
        """
        self.follow(group, GroupEvent.DELIVER)
        self._release(group)

    def _release(self, group: Group) -> None:
        self.unbuffer(group)
        if group.result is not None and group.result.samples:
            group.result = replace(group.result, samples=())

    def drop(self, group: Group, event: GroupEvent) -> None:
        """Remove a group that will never be trained."""
        self.follow(group, event)
        self.counts[GroupState.DROPPED] -= 1
        self.count_drop(group, event)
        self.drops_in_a_row[event.value] += 1
        if group.start_version is not None:
            self.window.end(group.start_version)
        self.unbuffer(group)
        del self.by_id[group.group_id]
        self.live -= not group.recorded

    def count_drop(self, group: Group, event: GroupEvent) -> None:
        """Count a drop of a group that is no longer in memory, or never was."""
        self.dropped[event.value] += 1
        self.dropped_of[group.task.name] += 1

    def forget(self, group_id: int) -> None:
        """Remove a consumed group that a checkpoint covers."""
        group = self.by_id.pop(group_id, None)
        if group is not None:
            self.counts[group.state] -= 1
            self.live -= not group.recorded

    def buffer(self, group: Group, size_bytes: int) -> None:
        """Add bytes of the group; negative if they are regenerated."""
        group.buffered_bytes += size_bytes
        self.buffered_bytes += size_bytes

    def unbuffer(self, group: Group) -> None:
        """Stop counting the group's bytes."""
        self.buffered_bytes -= group.buffered_bytes
        group.buffered_bytes = 0

    def set_min_version(self, group: Group, sample: Sample, *, to: int | None) -> None:
        """Set the sample's `min_version`, and move the group in the window."""
        group.count_min_version(old=sample.min_version, new=to)
        sample.min_version = to
        start = min(group.min_versions, default=None)
        if start == group.start_version:
            return
        if group.start_version is None and start is not None:
            self.window.begin(start)
        elif group.start_version is not None and start is None:
            self.window.end(group.start_version)
        elif group.start_version is not None and start is not None:
            self.window.move(group.start_version, to=start)
        group.start_version = start


class Window:
    """Live (begun, not delivered) groups by version, and the room left in the step being filled."""

    def __init__(self, *, batch_groups: int, staleness: int, step: int) -> None:
        self._batch = batch_groups
        self._staleness = staleness
        self._counts: dict[int, int] = {}
        self._tight_versions: tuple[int, ...] | None = None
        """Versions whose slack is used up, rising; None: not computed since the last change."""
        self.step = step
        self.room = batch_groups
        self.live = 0
        """Groups begun and not delivered."""

    @property
    def oldest(self) -> int:
        """Oldest version under which a group of the current step may have begun."""
        return self.step - self._staleness

    # ---- questions

    def may_begin(self, version: int) -> bool:
        """Return whether one more group may begin under `version`."""
        if not self.oldest <= version <= self.step:
            return False
        tight = self._tight()
        return not tight or version > tight[-1]

    def may_continue(self, begun: int, *, at: int) -> bool:
        """Return whether a group that has begun under version `begun` may continue under version `at`."""
        return at >= begun or self.may_lower(begun, to=at)

    def may_lower(self, version: int, *, to: int) -> bool:
        """Return whether a live group begun under `version` may count as begun under the older version `to`."""
        return to >= self.oldest and not any(to <= tight < version for tight in self._tight())

    def may_deliver(self, version: int) -> bool:
        """Return whether a live group begun under `version` may take a place in the current step."""
        tight = self._tight()
        return self.room > 0 and (not tight or version <= tight[0])

    def due(self) -> dict[int, int]:
        """Version j -> live groups begun at <= j that must be in the current step; versions without one are left out."""
        due, begun, later = {}, 0, 0
        for version in range(self.oldest, self.step):
            begun += self._counts.get(version, 0)
            if begun > later:
                due[version] = begun - later
            later += self._batch
        return due

    def situation(self) -> tuple[object, ...]:
        """Return a value that is equal at two moments with equal answers of `may_begin` and `may_lower`."""
        return self.step, self._tight()

    # ---- changes

    def begin(self, version: int) -> None:
        """Count one more live group."""
        self._change(version, by=1)

    def end(self, version: int) -> None:
        """Stop counting a live group that was dropped or is planned again."""
        self._change(version, by=-1)

    def move(self, version: int, *, to: int) -> None:
        """Change the version of a live group."""
        self._change(version, by=-1)
        self._change(to, by=1)

    def deliver(self, version: int) -> None:
        """Give a live group a place in the current step."""
        assert self.room > 0, "no room in the step"
        self.room -= 1
        self._change(version, by=-1)

    def take_back(self, version: int) -> None:
        """Make a group of the current step live again."""
        self.room += 1
        self._change(version, by=1)

    def advance(self) -> None:
        """Begin the next step, because the current one is full."""
        assert self.room == 0, f"step {self.step} still has room for {self.room} groups"
        self.step += 1
        self.room = self._batch
        self._tight_versions = None
        assert not self._counts or min(self._counts) >= self.oldest, "a live group is too old"

    # ---- inside

    def _change(self, version: int, *, by: int) -> None:
        count = self._counts.get(version, 0) + by
        assert count >= 0, f"no live group began under version {version}"
        if count:
            self._counts[version] = count
        else:
            del self._counts[version]
        self.live += by
        self._tight_versions = None

    def _tight(self) -> tuple[int, ...]:
        """Return the tight versions; computed once after each change, in O(S)."""
        if self._tight_versions is None:
            self._tight_versions = tuple(self._find_tight())
        return self._tight_versions

    def _find_tight(self) -> Iterator[int]:
        begun, capacity = 0, self.room
        for version in range(self.oldest, self.step + 1):
            begun += self._counts.get(version, 0)
            assert begun <= capacity, f"{begun} groups begun at <= {version} have {capacity} places left"
            if begun == capacity:
                yield version
            capacity += self._batch


def batch_complete(ready: Mapping[int, int], *, room: int, due: Mapping[int, int]) -> bool:
    """Return whether a whole batch can be delivered.

    Args:
        ready: version -> scored groups begun under it.
        room: groups that the step still takes.
        due: version j -> groups begun at <= j that must be in this step.
    """
    if sum(ready.values()) < room:
        return False
    return all(
        sum(count for begun, count in ready.items() if begun <= version) >= must for version, must in due.items()
    )


# ---- what scored samples add up to


def stats_of(samples: Iterable[pb.Sample]) -> SampleStats:
    """Of the samples of one group."""
    return add_up(_stats_of_one(sample) for sample in samples)


def stats_of_stored(trajectories: Iterable[bytes]) -> SampleStats:
    """The same of serialized samples."""
    return stats_of(map(pb.Sample.FromString, trajectories))


def _stats_of_one(sample: pb.Sample) -> SampleStats:
    has_reward, tokens = sample.HasField("reward"), completion_tokens(sample)
    return SampleStats(
        samples=1,
        reward_sum=sample.reward if has_reward else 0.0,
        reward_count=int(has_reward),
        unrewarded=int(sample.resampled),
        truncated=int(sample.finish_reason == "length" and not any(s.observation for s in sample.segments)),
        lengths=(tokens,),
        turns_sum=sum(not segment.observation for segment in sample.segments) or 1,
        part_sums=dict(sample.reward_parts) if has_reward else {},
    )


def add_up(stats: Iterable[SampleStats]) -> SampleStats:
    """Of all of them."""
    some = list(stats)
    part_sums: defaultdict[str, float] = defaultdict(float)
    for one in some:
        for name, value in one.part_sums.items():
            part_sums[name] += value
    return SampleStats(
        samples=sum(one.samples for one in some),
        reward_sum=sum(one.reward_sum for one in some),
        reward_count=sum(one.reward_count for one in some),
        unrewarded=sum(one.unrewarded for one in some),
        truncated=sum(one.truncated for one in some),
        lengths=tuple(tokens for one in some for tokens in one.lengths),
        turns_sum=sum(one.turns_sum for one in some),
        part_sums=dict(sorted(part_sums.items())),
    )
