"""When a plan is made anew, and from what.

A plan is made when a batch has been planned whole, when predictions become trusted or lose it, when a pool's speed gets known,
and when the generators that may take samples change: at once while they are few, else with every sixteenth of them, so that a thousand that
join one by one do not cost a thousand plans. A new plan moves no sample that is out.

Owns the moment, and gathering what the policy looks at. Decides nothing itself.
"""

from streamrl_workers.scheduler.dispatch.makespan import Instance, fastest_first
from streamrl_workers.scheduler.dispatch.policy import Policy, Work
from streamrl_workers.scheduler.fleet import Fleet, Generator
from streamrl_workers.scheduler.groups import GroupTable
from streamrl_workers.scheduler.lengths import Lengths
from streamrl_workers.scheduler.lengths.quality import rank_correlation_lower
from streamrl_workers.scheduler.waiting import WaitingGroups

FLEET_SHARE = 16
"""One in so many generators must have come or gone since the last plan."""
OUTLIVED_SHARE = 0.1
"""A sample that is longer than was predicted is taken to go on for this share of what it has: long ones tend to."""
UNMEASURED_CORRELATION = 0.5
"""Of predictions that are trusted and whose correlation nobody tells: about the least that passes the guard."""


class Replanning:
    """Keeps the plan in force up to date."""

    def __init__(
        self,
        policy: Policy,
        *,
        waiting: WaitingGroups,
        fleet: Fleet,
        groups: GroupTable,
        group_size: int,
        overlap: int,
        lengths: Lengths,
    ) -> None:
        """`overlap`: batches that may begin before the one before them is done. `lengths`: tells how good predictions are, and which signals are trusted."""
        self._policy = policy
        self._waiting = waiting
        self._fleet = fleet
        self._groups = groups
        self._group_size = group_size
        self._overlap = overlap
        self._lengths = lengths
        self._planned: tuple[bool, int, int] | None = None
        """Trust, batches and which curves were guesses at the last plan."""
        self._signals: frozenset[str] = frozenset()
        """Trusted at the last plan."""
        self._fleet_changes = 0

    def refresh(self) -> None:
        """Make a plan if something that bears on it has changed."""
        now = (self._waiting.trusted, self._waiting.batches, self._fleet.curve_kinds if self._policy.models else 0)
        signals = self._lengths.trusted_signals
        if now == self._planned and signals == self._signals and not self._fleet_differs():
            return
        again = signals != self._signals
        if again:
            self._waiting.predict_again()
        self._planned, self._signals, self._fleet_changes = now, signals, self._fleet.changes
        before = self._waiting.plan
        plan = self._policy.plan(self._work(), previous=before)
        if plan != before or again:
            self._waiting.adopt(plan)

    # ---- inside

    def _fleet_differs(self) -> bool:
        if not self._policy.models:
            return False
        return self._fleet.changes - self._fleet_changes > len(self._fleet) // FLEET_SHARE

    def _work(self) -> Work:
        if not (self._policy.models and self._waiting.trusted):
            return Work(trusted=self._waiting.trusted)
        batch = self._waiting.batch()
        return Work(
            trusted=True,
            groups=batch,
            samples=self._group_size,
            begun=any(self._has_begun(candidate.group_id) for candidate in batch),
            overlap=self._overlap,
            instances=fastest_first(self._instance(generator) for generator in self._fleet if generator.serves),
            load_spread_s=self._fleet.load_spread_s,
            rank_correlation=self._rank_correlation(),
        )

    def _has_begun(self, group_id: int) -> bool:
        group = self._groups.get(group_id)
        return group is None or group.begun is not None

    def _rank_correlation(self) -> float:
        """Lower limit of that of the worst trusted signal: any of them may have predicted the batch."""
        view = self._lengths.view()
        known = [view.quality[signal] for signal in view.trusted_signals if signal in view.quality]
        limits = [
            rank_correlation_lower(quality.rank_correlation, pairs=quality.pairs)
            for quality in known
            if quality.rank_correlation is not None
        ]
        return min(limits, default=UNMEASURED_CORRELATION)

    def _instance(self, generator: Generator) -> Instance:
        running = [
            left
            for lease in generator.leases.values()
            if (left := self._left(lease.group_id, lease.sample_index)) is not None
        ]
        return Instance(
            generator_id=generator.generator_id,
            slots=generator.slots,
            curve=self._fleet.curve(generator),
            pool=generator.pool,
            running=tuple(running),
        )

    def _left(self, group_id: int, sample_index: int) -> float | None:
        """Tokens that a running sample of an earlier batch is expected to have before it; finished siblings tell most."""
        predicted = self._waiting.running_before(group_id)
        if predicted is None:
            return None
        group = self._groups[group_id]
        finished = [len(sample.tokens) >> 2 for sample in group.samples if sample.finish_reason]
        if finished:
            predicted = self._waiting.expected(group, siblings=finished)
        tokens = len(group.samples[sample_index].tokens) >> 2
        return max(predicted - tokens, tokens * OUTLIVED_SHARE)
