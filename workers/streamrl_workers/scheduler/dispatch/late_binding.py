"""Longest predicted first, within the batch that a group was planned in, where that pays.

    key(g) = (group_id // B, -predicted tokens, group_id)

A long completion that begins last keeps one slot busy while all others are idle; begun first, it
is hidden behind the short ones. The order holds within one batch of B groups only: over all of them
short prompts would always wait behind newly planned long ones, and the end of the run would train on
short prompts alone. Prompts without a past count as the median; equal ones go in the order of planning.

Where there are slots for all samples there is nothing to begin first: the order would only say who shares a generator
with whom, and longest first puts the longest of all together on the fastest (up to 1.6 times slower over unequal pools).
What waits there waits for samples of the batch before. So it is the order of planning there, and where the model says that
longest first is slower for the lengths that are likely; over pools that are too unequal: the longest then go first to
whoever has a free slot, and there one of them may take longer than all the rest; over generators that make hardly more
tokens/s with all slots taken than with half of them; and until speeds are measured, also with half of the slots or fewer: where
no such readings come, nothing ever waits for the end of a batch.
"""

from collections.abc import Sequence

from streamrl.spec.scheduling import LateBinding
from streamrl_workers.scheduler.dispatch.makespan import Instance
from streamrl_workers.scheduler.dispatch.measured import ends_in_a_guess
from streamrl_workers.scheduler.dispatch.modelled import Model, gains
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, LONGEST_FIRST, Plan, Work, in_order, unmodelled

MOST_UNEQUAL = 3.0
"""Times that a full batch's step may take longer on one generator than on another; devices of two generations differ by less."""
LEAST_WORTH = 1.05
"""Times the tokens/s that all generators make with half of their slots taken which they must make with all of them. Longest first keeps slots
taken to the end; where the last ones make nothing faster that is worth nothing, and who shares a generator with whom decides."""


class LateBindingPolicy:
    """Longest predicted first within a batch."""

    models = True

    def __init__(self, options: LateBinding) -> None:
        del options  # it has none

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """Longest first, if predictions are good and the order pays."""
        return unmodelled(work) or ordered(Model(work))


def ordered(model: Model) -> Plan:
    """Longest first or the order of planning, whichever is faster, and why."""
    if model.fits:
        return in_order("there are slots for all samples")
    instances = model.work.instances
    if any(ends_in_a_guess(one.curve) for one in instances):
        return in_order("the speed of the generators has not been measured yet")
    full_s = [instance.curve.at(instance.slots) for instance in instances]
    if max(full_s) > MOST_UNEQUAL * min(full_s):
        return in_order("the speeds of the generators differ too much")
    if _worth_of_full(instances) < LEAST_WORTH:
        return in_order("generators make hardly more tokens/s with all slots taken than with half of them")
    if not gains(model.seconds(LONGEST_FIRST), model.seconds(IN_ORDER)):
        return in_order("longest first would not be faster")
    return LONGEST_FIRST


def _worth_of_full(instances: Sequence[Instance]) -> float:
    """How many times the tokens/s that they make with half of their slots taken they make with all: 2 where batches cost nothing."""
    half, full = (sum(one.curve.tokens_per_s(share * one.slots) for one in instances) for share in (0.5, 1.0))
    return full / half
