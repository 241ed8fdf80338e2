"""Scored groups that wait for the trainer, in the order of their scoring, by the version they began under.

Owns that order and the counts. Knows neither the staleness rule nor the barrier: it names the first
group of each version, `handover.py` picks. A group is in here exactly while it has a `serial`.
"""

from collections import deque
from collections.abc import Mapping

from streamrl_workers.scheduler.groups import Group, GroupTable


class ReadyGroups:
    """Groups that may be handed over as far as their own state goes."""

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups
        self._entries: dict[int, deque[tuple[int, int]]] = {}
        """Version -> (serial, group); entries of groups that have left since are skipped."""
        self._counts: dict[int, int] = {}
        self._serial = 0

    @property
    def counts(self) -> Mapping[int, int]:
        """Version -> groups; versions without a group are left out."""
        return self._counts

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self._counts.values())

    def put(self, group: Group) -> None:
        """The group goes to the end."""
        assert group.begun is not None, f"group {group.group_id} has not begun"
        assert group.serial is None, f"group {group.group_id} is ready already"
        group.serial = self._serial
        self._serial += 1
        self._entries.setdefault(group.begun, deque()).append((group.serial, group.group_id))
        self._counts[group.begun] = self._counts.get(group.begun, 0) + 1

    def take(self, group: Group) -> None:
        """The group goes to the trainer; one that is not in here (a recorded step's) is left alone."""
        if group.serial is None:
            return
        assert group.begun is not None, f"group {group.group_id} has not begun"
        group.serial = None
        self._counts[group.begun] -= 1
        if not self._counts[group.begun]:
            del self._counts[group.begun]
            del self._entries[group.begun]

    def first(self, version: int) -> tuple[int, int]:
        """Serial and group that come first among those of a version that `counts` names."""
        entries = self._entries[version]
        while (group := self._groups.get(entries[0][1])) is None or group.serial != entries[0][0]:
            entries.popleft()
        return entries[0]
