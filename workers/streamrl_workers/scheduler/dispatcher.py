"""When an order is made anew, and from what.

An order is made when a batch has been planned whole, when signals win or lose trust, when a pool's speed gets known, and
when generators come or go: at once while they are few, else with every sixteenth of them. A new order moves no sample
that is out, and a batch that has begun keeps its length pools while each has a generator.

Owns the moment, and gathering what the policy looks at. Decides nothing itself.
"""

from streamrl_workers.scheduler.dispatch.makespan import Instance, fastest_first
from streamrl_workers.scheduler.dispatch.order import PlannedBatch, Policy
from streamrl_workers.scheduler.dispatch.speeds import Guess
from streamrl_workers.scheduler.fleet import Fleet
from streamrl_workers.scheduler.groups.table import GroupTable
from streamrl_workers.scheduler.groups.waiting import WaitingGroups
from streamrl_workers.scheduler.lengths import Lengths

FLEET_SHARE = 16
"""One in so many generators must have come or gone since the last order."""


class Dispatcher:
    """Keeps the order in force up to date."""

    def __init__(
        self,
        policy: Policy,
        *,
        waiting: WaitingGroups,
        fleet: Fleet,
        groups: GroupTable,
        group_size: int,
        overlaps: bool,
        lengths: Lengths,
    ) -> None:
        """`overlaps`: whether a batch may begin before the one before it is done. `lengths`: tells which signals are trusted."""
        self._policy = policy
        self._waiting = waiting
        self._fleet = fleet
        self._groups = groups
        self._group_size = group_size
        self._overlaps = overlaps
        self._lengths = lengths
        self._seen: tuple[bool, int, int] | None = None
        """Trust, batches and measured curves at the last order."""
        self._signals: frozenset[str] = frozenset()
        """Trusted at the last order."""
        self._fleet_changes = 0

    def refresh(self) -> None:
        """Make an order if something that bears on it has changed."""
        seen = (self._lengths.trusted, self._waiting.batches, self._fleet.curve_kinds)
        signals = self._lengths.trusted_signals
        other_fleet = self._fleet.changes - self._fleet_changes > len(self._fleet) // FLEET_SHARE
        if seen == self._seen and signals == self._signals and not other_fleet:
            return
        again = signals != self._signals
        if again:
            self._waiting.predict_again()
        self._seen, self._signals, self._fleet_changes = seen, signals, self._fleet.changes
        before = self._waiting.order
        batch = self._batch()
        order = before if self._keeps_pools(batch) else self._policy.order(batch)
        if again or order != before:
            self._waiting.adopt(order)

    # ---- inside

    def _batch(self) -> PlannedBatch:
        if not self._lengths.trusted:
            return PlannedBatch(trusted=False)
        groups = self._waiting.batch()
        serving = [one for one in self._fleet if one.serves and not one.lent]
        instances = [
            Instance(generator_id=one.generator_id, slots=one.slots, curve=self._fleet.curve(one)) for one in serving
        ]
        return PlannedBatch(
            trusted=True,
            groups=groups,
            samples=self._group_size,
            overlaps=self._overlaps,
            begun=any(self._has_begun(group.group_id) for group in groups),
            instances=fastest_first(instances),
            measured=not any(isinstance(one.curve, Guess) for one in instances),
            rank_correlation=self._lengths.rank_correlation,
        )

    def _has_begun(self, group_id: int) -> bool:
        group = self._groups.get(group_id)
        return group is None or group.start_version is not None

    def _keeps_pools(self, batch: PlannedBatch) -> bool:
        """Whether the newest batch has begun in length pools which can still serve it."""
        long = self._waiting.order.long_generators
        served = {one.generator_id in long for one in batch.instances}
        return bool(long) and len(served) > 1 and batch.begun
