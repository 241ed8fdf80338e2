"""The part `dispatch` of `/status`, whose key set is stable.

why               the order in force, and its reason, for people
longest_first     whether the longest predicted of a batch go first
long_generators   those of the long pool; empty: there is one pool
pools             pool -> known (or guessed) and step_s: batch -> seconds of a decoding step; empty for a guess
"""

from collections.abc import Mapping
from typing import Any

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.dispatch.order import Order, longest_in_batch
from streamrl_workers.scheduler.dispatch.speeds import Guess


def dispatch_status(order: Order, speeds: Mapping[str, LatencyCurve]) -> dict[str, Any]:
    """Return the part `dispatch`."""
    return {
        "why": order.why,
        "longest_first": order.key is longest_in_batch,
        "long_generators": sorted(order.long_generators),
        "pools": {pool: _curve(curve) for pool, curve in speeds.items()},
    }


def _curve(curve: LatencyCurve) -> dict[str, Any]:
    if isinstance(curve, Guess):
        return {"speed": "guessed", "step_s": {}}
    step_s = {str(batch): seconds for batch, seconds in zip(curve.batches, curve.seconds, strict=True)}
    return {"speed": "known", "step_s": step_s}
