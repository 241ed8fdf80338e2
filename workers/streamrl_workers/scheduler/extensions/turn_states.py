"""Groups of single turns at states of earlier samples (ArCHer's resampling, decision 0070).

The trainer names states with each step; a share of the groups that follow are turns there, and their samples get no reward. After a restart of
the scheduler such a group is generated from its own prompt, as any other.
"""

from collections import deque

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.model import Group
from streamrl_workers.scheduler.planning import WaitingGroups
from streamrl_workers.scheduler.sample import Sample
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.packing import no_negative_32
from streamrl_workers.tasks.values import Prompt


class TurnStates:
    """Stored turn states: a `GroupSource`."""

    is_rewarded = False

    def __init__(self, settings: SchedulerSettings, *, waiting: WaitingGroups, first: int) -> None:
        """`first`: number of the next group."""
        self._waiting = waiting
        self._group_size = settings.group_size
        self._percent = settings.extensions.resampled_percent
        of_step = -(-settings.batch_groups * self._percent // 100)
        self._states: deque[pb.TurnState] = deque(maxlen=(2 + settings.staleness) * of_step)
        """States of the newest steps."""
        self._of: dict[int, pb.TurnState] = {}
        """By group, until its prompt has arrived."""
        self._next = first

    def check(self, done: pb.StepDone) -> str:
        """Return why the states of a step cannot be: a state follows a prompt of which there was a group; empty: they can."""
        return "" if all(map(self._is_known, done.states)) else f"step {done.step} names a state that no group had"

    def _is_known(self, state: pb.TurnState) -> bool:
        is_tokens = not len(state.tokens) % 4 and no_negative_32(state.tokens)
        return state.prompt_index < self._next and is_tokens

    def take(self, done: pb.StepDone) -> None:
        """Take the states of a step."""
        self._states.extend(done.states)

    def claim(self, number: int) -> int | None:
        """Claim the share of the groups for which a state is known."""
        self._next = number + 1
        if not self._states or not number * self._percent // 100 < (number + 1) * self._percent // 100:
            return None
        state = self._of[number] = self._states.popleft()
        return state.prompt_index

    def start(self, group: Group, prompt: Prompt) -> None:
        """Let samples wait that continue from the state."""
        state = self._of.pop(group.group_id)
        group.prompt.tokens_hash = state.prompt_hash
        self._waiting.begin(group, [Sample(index, prefix=state.tokens) for index in range(self._group_size)])
