"""When each other cluster is told of a new version, where all of them take it over one uplink: one after the other.

Together they would have it later than the last of them has it in turn, and the first much later. Those with the least seconds of a
version for each slot come first. One is left out of a version that it would not have before the next one comes: it would hold up those
before it, and what it then began would be almost too old. The first is never left out, and where the next version is late nobody is.

    version 7 ─▶ near ████                    next version expected
                 far      ██████                    │
                 slow            ██████████████████████  left out of 7

Owns the turns, and the seconds that a version takes each cluster, which it measures. Does not own who in a cluster pulls from whom
(`sources.py`), nor the words to generators (`weights.py`). Pure: `now_s` comes with the call.

Invariants: a turn ends; whoever is told of a version stays told of it; a cluster that is left out is tried again, since what is known of it fades.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

PATIENCE = 2.0
"""A turn lasts at most so many times what the quickest cluster takes: who is slower is so by a link of its own, and leaves room for others."""
FIRST_PATIENCE_S = 60.0
"""The same while nothing is known."""
LATE = 2.0
"""A version that has not come after so many times what the one before it took to come is late."""
FADING = 0.95
"""Of the seconds that a version takes a cluster, with each version that it is left out of."""

Version = tuple[int, int]
"""Attempt, step."""
TurnState = Literal["told", "fetching", "waiting", "left_out"]


@dataclass(slots=True)
class _Link:
    """What is known of a cluster."""

    told: Version | None = None
    """What it was told last."""
    told_s: float | None = None
    """When, in its turn; None: it had none, or has that version by now."""
    fetching: bool = False
    """Whether its turn goes on."""
    took_s: float | None = None
    left_out_versions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTurn:
    """A cluster and the newest version, for people."""

    state: TurnState
    version_s: float | None
    """Seconds that a version takes it; None: not known yet."""
    next_s: float | None
    """Seconds between the last two versions; None: there was one."""
    left_out_versions: int
    """Since the scheduler or the attempt began."""


class WeightTurns:
    """The turns for one version after the other."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._version: Version | None = None
        self._since_s = 0.0
        self._interval_s: float | None = None
        self._left_out: frozenset[str] = frozenset()

    def look(
        self, version: Version, slots: Mapping[str, int], *, holders: Collection[str] = (), now_s: float
    ) -> frozenset[str]:
        """Clusters that may be told of the version by now.

        Args:
            version: the newest.
            slots: of each cluster; 0: nobody there can be told now.
            holders: clusters in which somebody has it already.
            now_s: seconds, never less than before.
        """
        if version != self._version:
            self._begin(version, now_s=now_s)
        self._links = {name: self._links.get(name, _Link()) for name in slots}
        for link in (self._links[name] for name in self._links.keys() & holders if self._links[name].told != version):
            link.told, link.told_s, link.fetching = version, None, False
        while (first := self._next(slots, now_s=now_s)) is not None:
            link = self._links[first]
            link.told, link.told_s, link.fetching = version, now_s, True
        return frozenset(name for name, link in self._links.items() if link.told == version)

    def is_taken(self, *, now_s: float) -> bool:
        """Whether somebody has his turn now."""
        return any(self._holds(link, now_s) for link in self._links.values())

    def is_late(self, *, now_s: float) -> bool:
        """Whether the next version should long be there."""
        return self._interval_s is not None and now_s >= self._since_s + LATE * self._interval_s

    def loaded(self, cluster: str, version: Version, *, now_s: float) -> None:
        """Somebody in the cluster has this version: its turn is over, if it was for this one."""
        link = self._links.get(cluster)
        if link is not None and link.told == version and link.told_s is not None:
            link.took_s, link.told_s, link.fetching = now_s - link.told_s, None, False

    def failed(self, cluster: str, *, now_s: float) -> None:
        """Nothing comes there from the trainer: the turn is over, and the cluster counts as one that takes as long as there is between two versions."""
        link = self._links.get(cluster)
        if link is not None and link.told_s is not None and link.fetching:
            link.fetching = False
            link.took_s = max(link.took_s or 0.0, self._interval_s or now_s - link.told_s)

    def view(self) -> dict[str, ClusterTurn]:
        """Each cluster's."""
        return {name: self._turn(name, link) for name, link in sorted(self._links.items())}

    # ---- inside

    def _next(self, slots: Mapping[str, int], *, now_s: float) -> str | None:
        """Whose turn begins now."""
        links = self._links
        waiting = [
            name for name, link in links.items() if slots[name] and link.told != self._version and not link.fetching
        ]
        waiting.sort(key=lambda name: ((links[name].took_s or 0.0) / slots[name], name))
        self._left_out = frozenset(name for name in waiting if not self._is_in_time(name, now_s=now_s))
        coming = [name for name in waiting if name not in self._left_out]
        return coming[0] if coming and not self.is_taken(now_s=now_s) else None

    def _holds(self, link: _Link, now_s: float) -> bool:
        known = [one.took_s for one in self._links.values() if one.took_s is not None]
        patience_s = PATIENCE * min(known) if known else FIRST_PATIENCE_S
        return link.fetching and link.told_s is not None and now_s < link.told_s + patience_s

    def _begin(self, version: Version, *, now_s: float) -> None:
        if self._version is not None:
            self._interval_s = now_s - self._since_s
        for link in (self._links[name] for name in self._left_out):
            link.left_out_versions += 1
            link.took_s = FADING * (link.took_s or 0.0)
        self._version, self._since_s = version, now_s

    def _is_in_time(self, cluster: str, *, now_s: float) -> bool:
        took_s, interval_s = self._links[cluster].took_s, self._interval_s
        if took_s is None or interval_s is None or self.is_late(now_s=now_s):
            return True
        is_first = all(link.told != self._version for link in self._links.values())
        return is_first or now_s + took_s <= self._since_s + interval_s

    def _turn(self, name: str, link: _Link) -> ClusterTurn:
        state: TurnState = "waiting"
        if link.fetching:
            state = "fetching"
        elif link.told == self._version:
            state = "told"
        elif name in self._left_out:
            state = "left_out"
        return ClusterTurn(
            state=state, version_s=link.took_s, next_s=self._interval_s, left_out_versions=link.left_out_versions
        )
