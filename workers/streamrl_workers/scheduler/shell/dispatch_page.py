"""The part `dispatch` of the scheduler's `/numbers`: which sample goes where, why, and how fast the pools are taken to be.

Owns names and units. The key set is stable.

    why              the plan in force, and its reason, for people
    longest_first    the order within a batch: longest predicted first, or as planned
    tail_generators  those that take the longest predicted alone; empty: no sides
    pools            pool -> speed (known | upperHalf: measured with more than half of the slots taken only | guessed) and
                     step_s: batch -> seconds of a decoding step; empty for a guess, which tells only what is faster
"""

from collections.abc import Mapping
from typing import Any

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.dispatch.measured import Guess, UpperHalf
from streamrl_workers.scheduler.dispatch.policy import Plan


def dispatch_numbers(plan: Plan, speeds: Mapping[str, LatencyCurve]) -> dict[str, Any]:
    """The page's content."""
    return {
        "why": plan.why,
        "longest_first": plan.longest_first,
        "tail_generators": sorted(plan.tail_generators),
        "pools": {pool: _speed(curve) for pool, curve in speeds.items()},
    }


def _speed(curve: LatencyCurve) -> dict[str, Any]:
    if isinstance(curve, Guess):
        return {"speed": "guessed", "step_s": {}}
    said = "upperHalf" if isinstance(curve, UpperHalf) else "known"
    step_s = {str(batch): seconds for batch, seconds in zip(curve.batches, curve.seconds, strict=True)}
    return {"speed": said, "step_s": step_s}
