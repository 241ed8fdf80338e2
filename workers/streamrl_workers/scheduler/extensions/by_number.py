"""Delivery by the groups' numbers, for runs that must be repeatable bit by bit."""

from streamrl_workers.scheduler.delivery import ReadyGroups, TrainerLink, Why
from streamrl_workers.scheduler.model import Group, GroupTable


class ByNumber:
    """The lowest number first: a `DeliveryOrder` for staleness 0, where no group of the next step exists yet."""

    def __init__(self, *, groups: GroupTable, ready: ReadyGroups, link: TrainerLink) -> None:
        self._groups = groups
        self._ready = ready
        self._link = link
        self._lowest: tuple[int, int] | None = None
        """The connection, and a number below which no group is delivered in this step over it."""

    def next(self) -> Group | Why:
        """Return the group of the lowest number that is not delivered, if it is scored."""
        if not self._ready.total:
            return Why.NOTHING_SCORED
        connection = self._link.connections  # a trainer that connects may give groups back
        if self._lowest is None or self._lowest[0] != connection:
            self._lowest = connection, min(self._groups.by_id)
        number = self._lowest[1]
        while (group := self._groups.by_id.get(number)) is None or group.recorded or number in self._link.held:
            number += 1  # ends at a group that is ready
        self._lowest = connection, number
        return group if group in self._ready else Why.LOWER_NUMBER_FIRST
