"""The staleness rule: which groups may begin, and which may be delivered, so that none gets too old.

Owns the counts of live groups by the version they began under, for the step that is being filled.
A group begun under version b must be consumed in a step <= b + S; a step takes exactly B groups.
`docs/staleness.md` proves that the rule is necessary and sufficient.

Owns as well when a mode with whole batches may begin to deliver a step (`batch_complete`): r = `room` scored groups are
there and, for every version j, at least as many of them began at <= j as the rule wants in this step (`due`). From then
on the rule never stops the delivery before the step is full. A step of which the trainer holds a group is not asked
again, so the answer follows from what is seen now, also after a restart.

Invariant (feasible): for every version j of the window k-S .. k
    slack_j = room + (j + S - k) * B - n_j  >=  0,     n_j = live groups begun at <= j,
and no live group began before k-S. Here k is the step being filled and `room` what is still missing in it.
"""

from collections.abc import Iterator, Mapping


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
        """Whether one more group may begin under `version`."""
        if not self.oldest <= version <= self.step:
            return False
        tight = self._tight()
        return not tight or version > tight[-1]

    def may_go_on(self, begun: int, *, at: int) -> bool:
        """Whether a group that has begun under a version may go on under this one."""
        return at >= begun or self.may_lower(begun, to=at)

    def may_lower(self, version: int, *, to: int) -> bool:
        """Whether a live group begun under `version` may count as begun under the older version `to`."""
        return to >= self.oldest and not any(to <= tight < version for tight in self._tight())

    def may_deliver(self, version: int) -> bool:
        """Whether a live group begun under `version` may take a place in the current step."""
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
        """Two moments with an equal situation give equal answers to `may_begin` and `may_lower`."""
        return self.step, self._tight()

    # ---- changes

    def begin(self, version: int) -> None:
        """One more live group."""
        self._change(version, by=1)

    def end(self, version: int) -> None:
        """A live group is gone (dropped, or back to planned)."""
        self._change(version, by=-1)

    def move(self, version: int, *, to: int) -> None:
        """A live group's version is now known to be `to`."""
        self._change(version, by=-1)
        self._change(to, by=1)

    def deliver(self, version: int) -> None:
        """A live group takes a place in the current step."""
        assert self.room > 0, "no room in the step"
        self.room -= 1
        self._change(version, by=-1)

    def take_back(self, version: int) -> None:
        """A group of the current step is live again."""
        self.room += 1
        self._change(version, by=1)

    def advance(self) -> None:
        """The current step is full: go on to the next."""
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
        """Computed once after each change, in O(S)."""
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
    """Whether a whole batch can be delivered.

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
