"""From whom each generator pulls weights: one of a cluster from the trainer, the others from one another.

    trainer ──▶ g0 ──▶ g1 ──▶ .. ──▶ g7      one chain of those that serve, in the order in which they came;
                          └▶ g8, g9 ..       behind it a tree, so that nobody sends more than three copies

A tensor is passed on while the rest still comes, so a chain is as fast as one link, and each byte enters a cluster once. Generators that
serve nobody take from those that do.

Owns the order, which is the whole decision. Does not own versions (`weights.py`), addresses' reach, or moving bytes.

Invariants: in a cluster where somebody serves exactly one generator has the trainer as its source; a source serves, and is of the same
cluster; from every generator the sources lead to the trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb

_CHAIN = 8
"""So many in a row; with more the last would wait for as many tensors one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPeer:
    """A generator, as far as others are concerned."""

    generator_id: str
    cluster: str  # "": the trainer's
    address: str  # host:port at which it serves weights; "": it does not


def choose_sources(peers: Sequence[WeightPeer]) -> dict[str, WeightPeer | None]:
    """Generator -> the one that it pulls from; None: the trainer. `peers`: in their order."""
    sources: dict[str, WeightPeer | None] = {}
    for cluster in {peer.cluster for peer in peers}:
        members = [peer for peer in peers if peer.cluster == cluster]
        serving = [peer for peer in members if peer.address]
        for place, peer in enumerate(serving):
            sources[peer.generator_id] = serving[_before(place)] if place else None
        for place, peer in enumerate(peer for peer in members if not peer.address):
            sources[peer.generator_id] = serving[place % len(serving)] if serving else None
    return sources


def _before(place: int) -> int:
    return place - 1 if place < _CHAIN else place // 2


class WeightSources:
    """The order of those that are connected, and what follows from it."""

    def __init__(self) -> None:
        self._order: dict[str, WeightPeer] = {}
        self._waiting: set[str] = set()
        """Those that have nothing from their source, of what they were told last."""
        self._sources: dict[str, WeightPeer | None] = {}
        self._is_new = False
        """Whether the order is another than that of the sources."""

    def joined(self, hello: pb.GeneratorHello) -> None:
        """A generator is there, behind all others."""
        self._order[hello.generator_id] = WeightPeer(
            generator_id=hello.generator_id, cluster=hello.cluster, address=hello.weights_address
        )
        self._is_new = True

    def left(self, generator_id: str) -> None:
        """A generator is gone, or says no word any more."""
        self._is_new |= self._order.pop(generator_id, None) is not None
        self._waiting.discard(generator_id)

    def of(self, generator_id: str) -> WeightPeer | None:
        """Its source; None: the trainer."""
        return self._chosen().get(generator_id)

    def stalled(self, generator_id: str) -> None:
        """Nothing comes from its source. The first of a row that gets nothing is put behind the others; who waits for one that waits is not asked."""
        if generator_id not in self._order:
            return
        source = self._chosen()[generator_id]
        self._waiting.add(generator_id)
        guilty = generator_id if source is None else source.generator_id
        if source is not None and guilty in self._waiting:
            return
        self._order[guilty] = self._order.pop(guilty)
        self._is_new = True

    def advanced(self, generator_id: str) -> None:
        """It has what it was told of."""
        self._waiting.discard(generator_id)

    def _chosen(self) -> dict[str, WeightPeer | None]:
        """Chosen when somebody asks: thousands come at once, and each choice is for all."""
        if self._is_new:
            before, self._sources, self._is_new = self._sources, choose_sources(list(self._order.values())), False
            self._waiting &= {one for one, source in self._sources.items() if one in before and before[one] == source}
        return self._sources
