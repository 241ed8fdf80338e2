"""The barrier of whole batches: when the hand-over of a step may begin.

Modes that hand over whole batches wait until one is complete; then all of it may go, as fast as the
trainer's credit lets it. Owns this decision alone, pure.

A batch is complete when r = `room` scored groups are there and, for every version j, at least as many of
them began at <= j as the staleness rule wants in this step (`due`, docs/staleness.md). From then on the
rule never stops the hand-over before the step is full: it hands a group over only where the others still
fit, and the oldest scored one always does.

Once open, a barrier stays open: a step of which the trainer holds a group is not asked again, and scored
groups are not taken away. So the answer follows from what is seen now, also after a restart; nothing is
remembered.
"""

from collections.abc import Mapping


def batch_complete(ready: Mapping[int, int], *, room: int, due: Mapping[int, int]) -> bool:
    """Whether a whole batch can be handed over.

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
