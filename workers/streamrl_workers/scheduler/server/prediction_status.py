"""The parts `lengths` and `dispatch` of the scheduler's status endpoint.

Owns names and units. The key set is stable: every source and signal is there, zeros and nulls included.

    lengths.trusted          whether dispatch may use predictions
    lengths.predictions      source -> groups that began with its prediction, since the start
    lengths.signals          signal -> trusted, pairs (of the window), recall of the longest 20 % and its lower 95 % limit (shares of 1),
                             rank_correlation (-1 to 1)
    lengths.ranker           of the ranker's process (state `none`: it has none): deaths, prompts waiting, scored and dropped, pairs remembered,
                             rounds of tuning, cpu_s used
    dispatch.why             the order in force, and its reason, for people
    dispatch.longest_first   whether the longest predicted of a batch go first
    dispatch.long_generators those of the long pool; empty: there is one pool
    dispatch.pools           pool -> known (or guessed) and step_s: batch -> seconds of a decoding step; empty for a guess
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.dispatch.longest_first import longest_in_batch
from streamrl_workers.scheduler.dispatch.order import Order
from streamrl_workers.scheduler.dispatch.speeds import Guess
from streamrl_workers.scheduler.lengths import JUDGED, SOURCES, Lengths
from streamrl_workers.scheduler.lengths.trust import Quality
from streamrl_workers.scheduler.server.ranker_client import RankerStatus


def length_status(lengths: Lengths, ranker: RankerStatus) -> dict[str, Any]:
    """The part `lengths`."""
    return {
        "trusted": lengths.trusted,
        "predictions": {source: lengths.predictions.get(source, 0) for source in SOURCES},
        "signals": {signal: _signal(signal, lengths) for signal in JUDGED},
        "ranker": asdict(ranker),
    }


def dispatch_status(order: Order, speeds: Mapping[str, LatencyCurve]) -> dict[str, Any]:
    """The part `dispatch`."""
    return {
        "why": order.why,
        "longest_first": order.key is longest_in_batch,
        "long_generators": sorted(order.long_generators),
        "pools": {pool: _speed(curve) for pool, curve in speeds.items()},
    }


def _signal(signal: str, lengths: Lengths) -> dict[str, Any]:
    return {"trusted": signal in lengths.trusted_signals, **asdict(lengths.quality.get(signal, Quality()))}


def _speed(curve: LatencyCurve) -> dict[str, Any]:
    if isinstance(curve, Guess):
        return {"speed": "guessed", "step_s": {}}
    step_s = {str(batch): seconds for batch, seconds in zip(curve.batches, curve.seconds, strict=True)}
    return {"speed": "known", "step_s": step_s}
