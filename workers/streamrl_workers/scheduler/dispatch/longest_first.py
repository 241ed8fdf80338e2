"""Longest predicted first, within the batch that a group was planned in, where that pays.

    key(g) = (batch, -predicted tokens, group_id)

A long completion that begins last keeps one slot busy while all others are idle; begun first, it is hidden behind the
short ones. Where all samples have a slot there is nothing to begin first. The modelled makespan decides where speeds
are measured; until then the order is that of planning.
"""

from streamrl.spec.scheduling import LongestFirst
from streamrl_workers.scheduler.dispatch.model import MakespanModel, gains
from streamrl_workers.scheduler.dispatch.order import IN_ORDER, Candidate, Key, Order, PlannedBatch, in_order


def longest_in_batch(candidate: Candidate) -> Key:
    """Batch by batch: else short prompts would wait behind newly planned long ones for ever."""
    return (candidate.batch, -candidate.predicted_tokens, candidate.group_id)


LONGEST_FIRST = Order(key=longest_in_batch, why="longest predicted first")


class LongestFirstPolicy:
    """Longest predicted first within a batch."""

    def __init__(self, options: LongestFirst) -> None:
        del options  # it has none

    def order(self, batch: PlannedBatch) -> Order:
        """Longest first, if predictions are trusted and it is faster."""
        return unmodelled(batch) or longest_if_faster(batch, MakespanModel(batch))


def unmodelled(batch: PlannedBatch) -> Order | None:
    """The order where nothing can be modelled: without trust, measured speeds, groups or generators; else None."""
    if not batch.trusted:
        return in_order("length predictions have not proved to be good")
    if not batch.groups or not batch.instances:
        return IN_ORDER
    return None if batch.measured else in_order("the speed of the generators has not been measured yet")


def longest_if_faster(batch: PlannedBatch, model: MakespanModel) -> Order:
    """Longest first or the order of planning, whichever is faster, and why."""
    if batch.fits:
        return in_order("there are slots for all samples")
    if not gains(model.seconds(LONGEST_FIRST), model.seconds(IN_ORDER)):
        return in_order("longest first would not be faster")
    return LONGEST_FIRST
