"""The link over which other clusters fetch versions from the trainer: one copy for each cluster, shared equally while it is full.

A cluster's own link may take less than its share; what it leaves is the others'. Replicas of one cluster pass a version on to one
another in no time. Owns transfers and their ends. Does not own who asks for what.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_cli.simulation.clock import VirtualClock

_Key = tuple[str, int, int]
"""Cluster and version."""
_AT_ONCE = 1 + 1e-9
"""Ends so close to each other are one."""
_NO_BOUND = 1e18


@dataclass(slots=True)
class _Transfer:
    left_bytes: float
    most_bytes_per_s: float
    then: list[Callable[[pb.VersionName], None]] = field(default_factory=list)


class Uplink:
    """Transfers that are under way."""

    def __init__(self, timeline: VirtualClock, *, bytes_per_s: float) -> None:
        self._timeline = timeline
        self._bytes_per_s = min(bytes_per_s, _NO_BOUND)
        self._transfers: dict[_Key, _Transfer] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        """Newest that each cluster has."""
        self._at_s = 0.0
        self._revision = 0

    def fetch(
        self,
        version: pb.VersionName,
        *,
        cluster: str,
        size_bytes: int,
        most_bytes_per_s: float,
        then: Callable[[pb.VersionName], None],
    ) -> None:
        """`then(version)` when the cluster has it; `most_bytes_per_s`: what its own link takes."""
        key = (cluster, version.attempt, version.step)
        if self._versions.get(cluster) == key[1:]:
            self._timeline.after(0.0, then, version)
            return
        self._advance()
        transfer = self._transfers.setdefault(key, _Transfer(size_bytes, min(most_bytes_per_s, _NO_BOUND)))
        transfer.then.append(then)
        self._plan()

    def _advance(self) -> None:
        rates, passed_s = self._rates(), self._timeline.now_s - self._at_s
        for key, transfer in self._transfers.items():
            transfer.left_bytes -= rates[key] * passed_s
        self._at_s = self._timeline.now_s

    def _rates(self) -> Mapping[_Key, float]:
        """The narrowest first: each gets its own link or an equal share of what is left."""
        rates, left = {}, self._bytes_per_s
        narrowest = sorted(self._transfers, key=lambda key: self._transfers[key].most_bytes_per_s)
        for place, key in enumerate(narrowest):
            rates[key] = min(self._transfers[key].most_bytes_per_s, left / (len(narrowest) - place))
            left -= rates[key]
        return rates

    def _plan(self) -> None:
        """Whoever ends first does so unless another transfer begins before."""
        self._revision += 1
        rates = self._rates()
        ends = {key: max(0.0, one.left_bytes / rates[key]) for key, one in self._transfers.items()}
        if ends:
            first_s = min(ends.values())
            keys = [key for key, end_s in ends.items() if end_s <= first_s * _AT_ONCE]
            self._timeline.after(first_s, self._ended, (self._revision, keys))

    def _ended(self, what: tuple[int, Sequence[_Key]]) -> None:
        revision, keys = what
        if revision != self._revision:
            return
        self._advance()
        for key in keys:
            transfer = self._transfers.pop(key)
            cluster, attempt, step = key
            self._versions[cluster] = (attempt, step)
            for then in transfer.then:
                then(pb.VersionName(attempt=attempt, step=step, hash=b"simulated"))
        self._plan()
