"""Longest predicted first, within the batch that a group was planned in.

    key(g) = (group_id // B, -predicted tokens, group_id)

A long completion that begins last keeps one slot busy while all others are idle; begun first, it is
hidden behind the short ones. The order holds within one batch of B groups only: over all of them
short prompts would always wait behind newly planned long ones, and the end of the run would train on
short prompts alone. Prompts without a past count as the median; equal ones go in the order of planning.
"""

from streamrl.spec.scheduling import LateBinding
from streamrl_workers.scheduler.dispatch.policy import DISTRUST, LONGEST_FIRST, Plan, Work


class LateBindingPolicy:
    """Longest predicted first within a batch."""

    models = False

    def __init__(self, options: LateBinding) -> None:
        del options  # it has none

    def plan(self, work: Work, *, previous: Plan) -> Plan:
        """Longest first, if predictions are good."""
        return LONGEST_FIRST if work.trusted else DISTRUST
