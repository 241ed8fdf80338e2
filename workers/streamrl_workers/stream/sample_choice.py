"""Which samples of some groups are looked at: by kinds, from what the archive's heads say of them. Reads no sample."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from streamrl.proto import stream_pb2 as pb

FAILED = "failed"
KINDS = {
    "best": "the highest rewards",
    "worst": "the lowest rewards",
    "longest": "the most tokens",
    "random": "at random, the same ones each time",
    FAILED: "samples whose score failed",
}
"""Kind -> which samples it picks."""


class HasHead(Protocol):
    """A group of which the head is known."""

    @property
    def head(self) -> pb.ArchivedGroup:
        """What is known of it."""


Group = TypeVar("Group", bound=HasHead)
_Place = tuple[pb.ArchivedGroup, int]
"""A group's head and which of its samples."""


def choose(
    groups: Iterable[Group],
    *,
    kinds: Sequence[str],
    count: int,
    takes: Callable[[Group, int], bool] = lambda group, index: True,
) -> list[tuple[Group, int, tuple[str, ...]]]:
    """(group, which of its samples, why): of each kind so many; one that is of several kinds comes once.

    `takes`: whether a sample counts, asked in the order of the kind until there are enough.
    """
    by_id = {group.head.group_id: group for group in groups}
    places = [(group.head, index) for group in by_id.values() for index in range(len(group.head.samples))]
    chosen: dict[tuple[int, int], list[str]] = {}
    for kind in kinds:
        taken = (place for place in _ORDER[kind](places) if takes(by_id[place[0].group_id], place[1]))
        for head, index in islice(taken, count):
            chosen.setdefault((head.group_id, index), []).append(kind)
    return [(by_id[group_id], index, tuple(names)) for (group_id, index), names in chosen.items()]


def _by_reward(places: Sequence[_Place], *, sign: int) -> list[_Place]:
    known = [(head, index) for head, index in places if head.samples[index].HasField("reward")]
    return sorted(known, key=lambda place: -sign * place[0].samples[place[1]].reward)


def _at_random(places: Sequence[_Place]) -> list[_Place]:
    order = list(places)
    random.Random(0).shuffle(order)
    return order


_ORDER: dict[str, Callable[[Sequence[_Place]], list[_Place]]] = {
    FAILED: lambda places: [(head, index) for head, index in places if head.samples[index].failed],
    "best": lambda places: _by_reward(places, sign=1),
    "worst": lambda places: _by_reward(places, sign=-1),
    "longest": lambda places: sorted(places, key=lambda place: -place[0].samples[place[1]].tokens),
    "random": _at_random,
}
