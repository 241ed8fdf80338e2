"""Prompts held ready, and the planning of groups from them.

Owns the look-ahead: train prompts are asked for in order, a bounded number ahead; group n is made of
train prompt n, also after a recovery. Owns the admission of groups (`docs/staleness.md`): recorded +
live <= (step + 1 + S) * B, and never more than the run needs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.groups.sample import Sample
from streamrl_workers.scheduler.groups.staleness import Window
from streamrl_workers.scheduler.groups.table import Group, GroupTable
from streamrl_workers.scheduler.groups.waiting import WaitingGroups
from streamrl_workers.scheduler.lengths import prompt_key
from streamrl_workers.scheduler.records import Planned
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.packing import no_negative_32
from streamrl_workers.tasks.values import Demonstration, NeedPrompts, Prompt

PORTION = 64
"""Groups planned in one event: thousands at once would hold up everything else for a tenth of a second."""


class Planner:
    """Turns prompts into planned groups as admission allows."""

    def __init__(
        self,
        settings: SchedulerSettings,
        outbox: Outbox,
        *,
        groups: GroupTable,
        window: Window,
        waiting: WaitingGroups,
        first: int,
        on_demonstrated: Callable[[Group, Demonstration], None],
    ) -> None:
        """`on_demonstrated`: called where the data set has the planned group's sample."""
        self._settings = settings
        self._outbox = outbox
        self._groups = groups
        self._window = window
        self._waiting = waiting
        self._ready: dict[int, Prompt] = {}
        self._unprompted: defaultdict[int, list[Group]] = defaultdict(list)
        """Groups whose text is not known yet, by index of the prompt: found in the journal, or of states, behind theirs."""
        of_step = -(-settings.batch_groups * settings.resampled_percent // 100)
        self._states: deque[pb.TurnState] = deque(maxlen=(2 + settings.staleness) * of_step)
        """Where turns are to be drawn anew: of the newest steps."""
        self._next_group = first
        self._next_prompt = first
        self._on_demonstrated = on_demonstrated
        self.in_portions = False
        """Whether the last portion was a full one and more can be planned at once: the commit of its records brings the next."""

    @property
    def ready(self) -> int:
        """Prompts that can become groups."""
        return len(self._ready)

    def restore(self, groups: Sequence[Group]) -> None:
        """Groups of the journal that are to be generated again: ask for their texts."""
        for group in groups:
            self._unprompted[group.prompt_index].append(group)
        for first, count in _runs(sorted(self._unprompted)):
            self._outbox.add(NeedPrompts(split="train", first_index=first, count=count))

    def arrived(self, prompt: Prompt) -> None:
        """A train prompt's text."""
        if prompt.index in self._unprompted:
            for group in self._unprompted.pop(prompt.index):
                self._start(group, prompt)
        elif self._next_group <= prompt.index < self._next_prompt:
            self._ready[prompt.index] = prompt

    def plan(self) -> None:
        """Plan what admission allows, a portion at most, and look ahead. The commit of a portion's records brings the next."""
        planned = 0
        while planned < PORTION and self._can_plan():
            planned += 1
            prompt = self._ready.pop(self._next_group)
            if self._states and self._is_resampled(self._next_group):
                self._plan_state(self._next_group, self._states.popleft())
            else:
                group = Group(self._next_group, self._next_group)
                self._add(group, key=prompt_key(prompt.text))
                self._start(group, prompt)
            self._next_group += 1
        self.in_portions = planned == PORTION and self._can_plan()
        self._look_ahead()

    def take_states(self, states: Iterable[pb.TurnState]) -> None:
        """Groups to come are turns there."""
        self._states.extend(states)

    def knows(self, state: pb.TurnState) -> bool:
        """Whether it is one: behind a prompt of which there was a group."""
        is_tokens = not len(state.tokens) % 4 and no_negative_32(state.tokens)
        return state.prompt_index < self._next_group and is_tokens

    def _is_resampled(self, number: int) -> bool:
        share = self._settings.resampled_percent
        return number * share // 100 < (number + 1) * share // 100

    def _plan_state(self, number: int, state: pb.TurnState) -> None:
        """A group of turns behind an earlier prompt. After a restart of the scheduler it is a game, of its own prompt as any."""
        group = Group(number, number, before=state)
        self._add(group, key=0)
        if state.prompt_index not in self._unprompted:
            self._outbox.add(NeedPrompts(split="train", first_index=state.prompt_index, count=1))
        self._unprompted[state.prompt_index].append(group)

    def _add(self, group: Group, *, key: int) -> None:
        self._groups.add(group)
        self._outbox.write(Planned(group_id=group.group_id, prompt_index=group.prompt_index, prompt_key=key))

    def _can_plan(self) -> bool:
        return self.may_plan() and self._next_group in self._ready

    def may_plan(self) -> bool:
        """Whether admission leaves room for one more group."""
        return self._groups.live < (1 + self._settings.staleness) * self._settings.batch_groups and self._missing() > 0

    def all_planned(self) -> bool:
        """Whether the run needs no more groups than it has."""
        return self._missing() <= 0 and not self._unprompted

    def _missing(self) -> int:
        """Groups that the run still needs beyond the live ones."""
        return (self._settings.steps - self._window.step) * self._settings.batch_groups - self._groups.live

    def _start(self, group: Group, prompt: Prompt) -> None:
        size = self._settings.group_size
        group.prompt = prompt.text
        group.prompt_key = prompt_key(prompt.text)
        if prompt.demonstration is not None:
            self._on_demonstrated(group, prompt.demonstration)
            return
        if group.before is None:
            max_turns = self._settings.max_turns_of(group.prompt_index)
            group.samples = [Sample.new(index, max_turns=max_turns) for index in range(size)]
        else:
            group.samples = [Sample(index, before=group.before.tokens) for index in range(size)]
        group.unfinished = group.unscored = size
        self._waiting.put(group, list(reversed(range(size))))

    def _look_ahead(self) -> None:
        coming = self._next_prompt - self._next_group
        if coming * 2 > self._settings.prompt_look_ahead:
            return
        count = min(self._settings.prompt_look_ahead, self._missing()) - coming
        if count > 0:
            self._outbox.add(NeedPrompts(split="train", first_index=self._next_prompt, count=count))
            self._next_prompt += count


def _runs(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Rising numbers as (first, count) of each unbroken run."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
