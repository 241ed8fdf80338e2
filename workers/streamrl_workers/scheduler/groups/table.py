"""Groups and samples in memory, and the table of all of them.

Owns the state of every group that is live or not yet covered by a checkpoint, its place in the
staleness window, and the counts that metrics read. Every change of a group's state goes through
`GroupTable`, which follows the table in `life.py`.

A group's `min_versions` say under which versions its first token was made, or will be made at the earliest:
one entry for each sample that has a token (its version) or is out without one (the version that its
generator had at issue). The smallest is its `start_version`.

`restore` says which state a group of the journal starts in:
    in the record of a step            consumed, or scored where the step is to be repeated
    scored, in no record               scored, ready for delivery
    only planned                       planned; its text is asked for and it is generated again
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.groups.life import GroupEvent, GroupState, after
from streamrl_workers.scheduler.groups.sample import Sample
from streamrl_workers.scheduler.groups.staleness import Window
from streamrl_workers.scheduler.records import Recovered, SampleStats


@dataclass(slots=True)
class Group:
    """One prompt and its samples."""

    group_id: int
    prompt_index: int
    prompt_key: int = 0
    prompt: str = ""
    before: pb.TurnState | None = None
    """Where its samples are one turn each, until it is scored; None: they begin with the prompt."""
    state: GroupState = GroupState.PLANNED
    samples: list[Sample] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Samples that wait for a slot, next one last."""
    entry: tuple[tuple[float, ...], int] | None = None
    """Its entry in the central queue; an entry that is not this one is out of date."""
    min_versions: dict[int, int] = field(default_factory=dict)
    """Version -> samples whose `min_version` it is."""
    start_version: int | None = None
    """Smallest of `min_versions`; once scored, the version of the first token."""
    unfinished: int = 0
    unscored: int = 0
    buffered_bytes: int = 0
    prompt_tokens: bytes = b""
    """Once a generator has tokenized it. Its samples share this one copy."""
    trajectories: tuple[bytes, ...] = ()
    """Once scored, until the group is delivered: serialized, by sample index."""
    size_bytes: int = 0
    stats: SampleStats | None = None
    serial: int | None = None
    """Its place in the order of delivery, while it may be delivered in the step that has no record yet."""
    recorded: bool = False
    """In the record of a step, also of one that is being repeated."""

    def count_min_version(self, *, old: int | None, new: int | None) -> None:
        """A sample's `min_version` has changed."""
        if old is not None:
            self.min_versions[old] -= 1
            if not self.min_versions[old]:
                del self.min_versions[old]
        if new is not None:
            self.min_versions[new] = self.min_versions.get(new, 0) + 1


class GroupTable:
    """All groups in memory; the only place where their states change."""

    def __init__(self, window: Window, *, task_name: Callable[[int], str] = lambda _index: "") -> None:
        """`task_name`: of the task that a prompt is of."""
        self.window = window
        self._task_name = task_name
        self._groups: dict[int, Group] = {}
        self.counts: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        self.buffered_bytes = 0
        """Samples, running ones too, of groups that have not been delivered."""
        self.dropped: Counter[str] = Counter()
        """Groups by reason."""
        self.dropped_of: Counter[str] = Counter()
        """The same groups by task."""
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
        return self.window.step

    @property
    def live(self) -> int:
        """Groups that are in no step's record (and not dropped)."""
        return len(self._groups) - self._recorded

    def awaits_scores(self, groups: int) -> bool:
        """Return whether so many groups lack scores alone; with a frozen pool also its log-probs may be missing."""
        scored = self.counts[GroupState.SCORED]
        return scored < groups <= scored + self.counts[GroupState.FINISHED]

    def add(self, group: Group) -> None:
        """A group that has been planned, or was found in the journal."""
        assert group.group_id not in self._groups, f"group {group.group_id} exists"
        self._groups[group.group_id] = group
        self.counts[group.state] += 1
        if group.recorded:
            self._recorded += 1
        elif group.start_version is not None:
            self.window.begin(group.start_version)
            self.buffer(group, group.size_bytes)

    def follow(self, group: Group, event: GroupEvent) -> None:
        """Go on in the group's life."""
        following = after(group.state, event)
        self.counts[group.state] -= 1
        self.counts[following] += 1
        group.state = following

    def begin(self, group: Group) -> None:
        """The group begins now, in the step that is being filled, with all that it has."""
        group.start_version = self.filling_step
        self.window.begin(group.start_version)

    def record(self, group: Group) -> None:
        """The group is in the record of a step now; it no longer counts as waiting for the trainer."""
        self._recorded += not group.recorded
        group.recorded = True
        self.release(group)
        group.samples, group.min_versions, group.prompt = [], {}, ""

    def release(self, group: Group) -> None:
        """The group's samples leave the memory, since the trainer has been sent them.

        The journal has them until a checkpoint covers the step, and whoever delivers the group again reads them there.
        """
        self.unbuffer(group)
        group.trajectories = ()

    def drop(self, group: Group, event: GroupEvent) -> None:
        """The group will never be trained; it leaves the memory."""
        self.follow(group, event)
        self.counts[GroupState.DROPPED] -= 1
        self.count_drop(group, event)
        self.drops_in_a_row[event.value] += 1
        if group.start_version is not None:
            self.window.end(group.start_version)
        self.unbuffer(group)
        del self._groups[group.group_id]

    def count_drop(self, group: Group, event: GroupEvent) -> None:
        """Of a group that is not in memory any more, or never was."""
        self.dropped[event.value] += 1
        self.dropped_of[self._task_name(group.prompt_index)] += 1

    def forget(self, group_id: int) -> None:
        """A checkpoint covers the consumed group."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self.counts[group.state] -= 1
            self._recorded -= group.recorded

    def buffer(self, group: Group, size_bytes: int) -> None:
        """So many bytes more of the group have arrived; fewer than none: they are made again."""
        group.buffered_bytes += size_bytes
        self.buffered_bytes += size_bytes

    def unbuffer(self, group: Group) -> None:
        """None of its bytes count any more."""
        self.buffered_bytes -= group.buffered_bytes
        group.buffered_bytes = 0

    def set_min_version(self, group: Group, sample: Sample, *, to: int | None) -> None:
        """Set the sample's `min_version` and keep the window right."""
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


def frontier(recovered: Recovered) -> int:
    """First step without a record."""
    return max(recovered.step, max(recovered.compositions, default=-1) + 1)


def restore(recovered: Recovered) -> Iterator[Group]:
    """The journal's groups, each in the state that it starts in."""
    steps = {group_id: step for step, group_ids in recovered.compositions.items() for group_id in group_ids}
    for found in recovered.groups:
        step = steps.get(found.group_id)
        is_scored = step is not None or bool(found.trajectories)
        assert not is_scored or found.start_version is not None, f"group {found.group_id} is scored, but has no version"
        state = GroupState.SCORED if is_scored else GroupState.PLANNED
        yield Group(
            found.group_id,
            found.prompt_index,
            state=GroupState.CONSUMED if step is not None and step < recovered.step else state,
            start_version=found.start_version if is_scored else None,
            trajectories=found.trajectories,
            size_bytes=found.size_bytes if is_scored else 0,
            stats=found.stats,
            recorded=step is not None,
        )
