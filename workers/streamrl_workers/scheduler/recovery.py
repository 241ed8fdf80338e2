"""From `Recovered` to groups in memory.

Owns which state a group of the journal starts in:
    in the record of a step            consumed, or scored where the step is to be repeated
    scored, in no record               scored, ready for hand-over
    only planned                       planned; its text is asked for and it is generated again
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrl_workers.scheduler.effects import Recovered, RecoveredGroup
from streamrl_workers.scheduler.groups import Group
from streamrl_workers.scheduler.life import State


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredGroups:
    """The journal's groups, by what is to be done with them."""

    recorded: Sequence[Group]
    scored: Sequence[Group]
    planned: Sequence[Group]


def frontier(recovered: Recovered) -> int:
    """First step without a record."""
    return max(recovered.step, max(recovered.compositions, default=-1) + 1)


def restore(recovered: Recovered) -> RestoredGroups:
    """Sort the journal's groups."""
    steps = {group_id: step for step, group_ids in recovered.compositions.items() for group_id in group_ids}
    recorded, scored, planned = [], [], []
    for found in recovered.groups:
        step = steps.get(found.group_id)
        if step is not None:
            recorded.append(_group(found, State.CONSUMED if step < recovered.step else State.SCORED, recorded=True))
        elif found.trajectories:
            scored.append(_group(found, State.SCORED))
        else:
            planned.append(Group(found.group_id, found.prompt_index))
    return RestoredGroups(recorded=recorded, scored=scored, planned=planned)


def _group(found: RecoveredGroup, state: State, *, recorded: bool = False) -> Group:
    assert found.begun_step is not None, f"group {found.group_id} is in a step or scored, but has no version"
    return Group(
        found.group_id,
        found.prompt_index,
        state=state,
        begun=found.begun_step,
        trajectories=found.trajectories,
        size_bytes=found.size_bytes,
        stats=found.stats,
        recorded=recorded,
    )
