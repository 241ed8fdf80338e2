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
whoever has a free slot, and there one of them may take longer than all the rest; and until speeds are measured: where
steps get much slower with the last few slots, the order of planning may be the one that ends sooner. It stays so over generators
that make less than half of their tokens/s with all slots taken. Where batches overlap
that takes readings with half of the slots or fewer; where none come, nothing ever waits for the end of a batch.
"""

from streamrl.spec.scheduling import LateBinding
from streamrl_workers.scheduler.dispatch.makespan import Instance
from streamrl_workers.scheduler.dispatch.measured import Guess, UpperHalf
from streamrl_workers.scheduler.dispatch.modelled import Model, gains
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, LONGEST_FIRST, Plan, Work, in_order, unmodelled

MOST_UNEQUAL = 3.0
"""Times that a full batch's step may take longer on one generator than on another; devices of two generations differ by less."""


MOST_CROWDED = 2.0
"""Times that tokens/s of a generator may be below those with fewer slots taken, when all are. An order is worth something where slots that
are full are worth something."""


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
    guesses = (Guess, UpperHalf) if model.work.overlap else Guess
    if any(isinstance(one.curve, guesses) for one in instances):
        return in_order("the speed of the generators has not been measured yet")
    full_s = [instance.curve.at(instance.slots) for instance in instances]
    if max(full_s) > MOST_UNEQUAL * min(full_s):
        return in_order("the speeds of the generators differ too much")
    if any(_crowded(instance) for instance in instances):
        return in_order("generators make less than half of their tokens/s when all slots are taken")
    if not gains(model.seconds(LONGEST_FIRST), model.seconds(IN_ORDER)):
        return in_order("longest first would not be faster")
    return LONGEST_FIRST


def _crowded(instance: Instance) -> bool:
    """Whether its slots are so many that it makes far fewer tokens/s with all of them taken than with some."""
    curve, slots = instance.curve, instance.slots
    best = max((curve.tokens_per_s(batch) for batch in curve.batches if batch < slots), default=0.0)
    return best > MOST_CROWDED * curve.tokens_per_s(slots)
