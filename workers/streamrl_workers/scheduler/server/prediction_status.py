"""The parts `lengths` and `dispatch` of the scheduler's status endpoint, and their gauges.

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

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from streamrl.latency import LatencyCurve
from streamrl_workers.metrics.signals import ProcessMetrics
from streamrl_workers.scheduler.dispatch.longest_first import longest_in_batch
from streamrl_workers.scheduler.dispatch.order import Order
from streamrl_workers.scheduler.dispatch.speeds import Guess
from streamrl_workers.scheduler.lengths import JUDGED, SOURCES, Lengths
from streamrl_workers.scheduler.lengths.trust import Quality
from streamrl_workers.scheduler.server.ranker_client import RankerStatus

_SIGNAL_GAUGES = {
    "trusted": "1 if the signal's predictions may be used, else 0.",
    "pairs": "Predictions in the window that are judged.",
    "recall": "Share of the longest 20 % that were predicted to be so.",
    "recall_lower": "Lower 95 % limit of that recall.",
    "rank_correlation": "Spearman's, of predicted places and lengths.",
}
"""Name behind the signal's -> what it says."""
_RANKER_GAUGES = {
    "deaths": "Ends of the ranker's process that nobody asked for.",
    "waiting": "Prompts that the ranker's process has not scored yet.",
    "scored": "Prompts that the ranker's process has scored.",
    "dropped": "Prompts that waited for a score until newer ones took their place.",
    "pairs": "Prompts with their lengths that the ranker's process remembers.",
    "rounds": "Rounds of tuning that are done.",
    "cpu_s": "CPU seconds of the ranker's process that lives.",
}


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


class PredictionGauges:
    """`streamrl_length_*` and `streamrl_ranker_*` of the metrics endpoint; NaN is what is not known."""

    def __init__(self, metrics: ProcessMetrics) -> None:
        gauge = metrics.gauge
        self._trusted = gauge("length_trusted", help_text="1 if dispatch may use predicted lengths, else 0.")
        self._predictions = metrics.counts(
            "length_predictions", key="source", keys=SOURCES, help_text="Groups that began, by what predicted them."
        )
        self._signals = {
            (signal, name): gauge(f"length_{signal.lower()}_{name}", help_text=f"{text} Signal {signal}.")
            for signal in JUDGED
            for name, text in _SIGNAL_GAUGES.items()
        }
        self._ready = gauge("ranker_ready", help_text="1 if the ranker's process answers, else 0; 0 where it has none.")
        self._ranker = {name: gauge(f"ranker_{name}", help_text=text) for name, text in _RANKER_GAUGES.items()}

    def set(self, lengths: Lengths, ranker: RankerStatus) -> None:
        """Take over what is."""
        self._trusted.set(lengths.trusted)
        self._predictions(lengths.predictions)
        for (signal, name), gauge in self._signals.items():
            value = _signal(signal, lengths)[name]
            gauge.set(math.nan if value is None else value)
        self._ready.set(ranker.state == "ready")
        for name, gauge in self._ranker.items():
            gauge.set(getattr(ranker, name))


def _signal(signal: str, lengths: Lengths) -> dict[str, Any]:
    return {"trusted": signal in lengths.trusted_signals, **asdict(lengths.quality.get(signal, Quality()))}


def _speed(curve: LatencyCurve) -> dict[str, Any]:
    if isinstance(curve, Guess):
        return {"speed": "guessed", "step_s": {}}
    step_s = {str(batch): seconds for batch, seconds in zip(curve.batches, curve.seconds, strict=True)}
    return {"speed": "known", "step_s": step_s}
