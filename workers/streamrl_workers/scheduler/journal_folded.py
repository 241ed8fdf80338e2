"""What the journal keeps of steps that are long settled: one summary of constant size. Pure.

Owns the value and how a step, or dropped groups, enter it. Does not own which steps are folded and when
(`journal_compact.py`) nor what must hold (`journal_check.py`).

Invariant: a group enters once; `settled` holds exactly the `consumed` groups and the `dropped` ones. Group
ids are dense, so that the settled ones are a few intervals: at most one more than there are younger groups
between them.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

from streamrl_workers.stream.history import EMPTY_CHAIN, composition_digest, extend_chain

Interval = tuple[int, int]
"""First and last, both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Steps 0 .. `steps` - 1 and the groups that ended with them."""

    steps: int = 0
    chain: str = EMPTY_CHAIN
    """Of the compositions of those steps (`stream/history.py`)."""
    consumed: int = 0
    """Groups in those steps."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> groups."""
    settled: tuple[Interval, ...] = ()
    """Ids of all these groups, rising, with gaps between."""
    step_groups: Interval | None = None
    """Fewest and most groups of one step."""
    staleness: Interval | None = None
    """Smallest and largest staleness of a consumed group, in steps."""

    def __contains__(self, group_id: int) -> bool:
        """Whether the group has been folded."""
        return any(first <= group_id <= last for first, last in self.settled)

    @property
    def groups(self) -> int:
        """How many there are."""
        return sum(last - first + 1 for first, last in self.settled)

    @property
    def next_group_id(self) -> int:
        """First id above all of them."""
        return self.settled[-1][1] + 1 if self.settled else 0

    def with_step(self, group_ids: Sequence[int], *, begun_steps: Iterable[int]) -> "Folded":
        """One more step, and the version that each of its groups was begun under."""
        staleness = [self.steps - begun for begun in begun_steps]
        return replace(
            self,
            steps=self.steps + 1,
            chain=extend_chain(self.chain, digests=[composition_digest(group_ids)]),
            consumed=self.consumed + len(group_ids),
            settled=_merged([*self.settled, *((group_id, group_id) for group_id in group_ids)]),
            step_groups=_wider(self.step_groups, [len(group_ids)]),
            staleness=_wider(self.staleness, staleness),
        )

    def with_dropped(self, reasons: Mapping[int, str]) -> "Folded":
        """More dropped groups: id -> reason."""
        dropped = Counter(self.dropped)
        dropped.update(reasons.values())
        settled = _merged([*self.settled, *((group_id, group_id) for group_id in reasons)])
        return replace(self, dropped=dict(dropped), settled=settled)

    def to_text(self) -> str:
        """As the journal stores it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> "Folded":
        """From `to_text`."""
        document = json.loads(text)
        pairs = {name: _pair(document[name]) for name in ("step_groups", "staleness")}
        return cls(**(document | pairs | {"settled": tuple(map(tuple, document["settled"]))}))


def _pair(values: Sequence[int] | None) -> Interval | None:
    return None if values is None else (values[0], values[1])


def _merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    ordered = sorted(intervals)
    assert all(before[1] < after[0] for before, after in pairwise(ordered)), "a group is folded twice"
    merged: list[Interval] = []
    for first, last in ordered:
        if merged and merged[-1][1] + 1 == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _wider(span: Interval | None, values: Sequence[int]) -> Interval | None:
    known = [*(span or ()), *values]
    return (min(known), max(known)) if known else None
