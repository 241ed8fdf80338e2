"""The part `lengths` of the scheduler's `/numbers`, and its gauges: what is predicted of lengths, and how well.

Owns names and units. The key set is stable: every source, signal and percentage is there, zeros and nulls included.

    trusted       whether dispatch may use predictions
    predictions   source -> groups that began with its prediction, since the start
    signals       signal -> trusted, pairs (of the window), rank_correlation (-1 to 1), calibration (mean distance of
                  places, 0 to 1), recall: percent -> value and lower (95 %), shares of 1
    ranker        of the ranker's process (`none`: it has none): state, deaths, prompts waiting, scored and dropped, pairs remembered,
                  rounds of tuning, cpu_s used
"""

import math
from typing import Any

from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.scheduler.lengths import JUDGED, SOURCES, LengthsView
from streamrl_workers.scheduler.lengths.quality import PERCENTS, Quality
from streamrl_workers.scheduler.shell.ranker_questions import RankerNumbers

_UNMEASURED = Quality()
_NO_PROCESS = RankerNumbers()


def length_numbers(view: LengthsView, ranker: RankerNumbers = _NO_PROCESS) -> dict[str, Any]:
    """The page's content."""
    return {
        "trusted": view.trusted,
        "predictions": {source: view.predictions.get(source, 0) for source in SOURCES},
        "signals": {signal: _signal(signal, view) for signal in JUDGED},
        "ranker": {"state": ranker.state, **_ranker(ranker)},
    }


def _ranker(ranker: RankerNumbers) -> dict[str, float]:
    return {
        "deaths": ranker.deaths,
        "waiting": ranker.waiting,
        "scored": ranker.scored,
        "dropped": ranker.dropped,
        "pairs": ranker.process.pairs,
        "rounds": ranker.process.rounds,
        "cpu_s": ranker.process.cpu_s,
    }


def _signal(signal: str, view: LengthsView) -> dict[str, Any]:
    quality = view.quality.get(signal, _UNMEASURED)
    return {
        "trusted": signal in view.trusted_signals,
        "pairs": quality.pairs,
        "rank_correlation": quality.rank_correlation,
        "calibration": quality.calibration,
        "recall": {str(percent): _recall(quality, percent) for percent in PERCENTS},
    }


def _recall(quality: Quality, percent: int) -> dict[str, float | None]:
    found = quality.recall.get(percent)
    return {"value": None if found is None else found.value, "lower": None if found is None else found.lower}


class LengthGauges:
    """`streamrl_length_*` of the scheduler's page; NaN is what is not known."""

    def __init__(self, metrics: Metrics) -> None:
        gauge = metrics.gauge
        self._trusted = gauge("length_trusted", help_text="1 if dispatch may use predicted lengths, else 0.")
        self._predictions = metrics.counts(
            "length_predictions", key="source", keys=SOURCES, help_text="Groups that began, by what predicted them."
        )
        self._gauges = {
            f"{signal}/{name}": gauge(f"length_{signal.lower()}_{name}", help_text=f"{text} Signal {signal}.")
            for signal in JUDGED
            for name, text in _GAUGES.items()
        }
        self._ready = gauge("ranker_ready", help_text="1 if the ranker's process answers, else 0; 0 where it has none.")
        self._ranker = {name: gauge(f"ranker_{name}", help_text=text) for name, text in _RANKER_GAUGES.items()}

    def set(self, view: LengthsView) -> None:
        """Take over what is."""
        self._trusted.set(view.trusted)
        self._predictions(view.predictions)
        for signal in JUDGED:
            quality = view.quality.get(signal, _UNMEASURED)
            for name, value in _values(quality, trusted=signal in view.trusted_signals).items():
                self._gauges[f"{signal}/{name}"].set(math.nan if value is None else value)

    def set_ranker(self, ranker: RankerNumbers) -> None:
        """Take over what its process has done."""
        self._ready.set(ranker.state == "ready")
        for name, value in _ranker(ranker).items():
            self._ranker[name].set(value)


_RANKER_GAUGES = {
    "deaths": "Ends of the ranker's process that nobody asked for.",
    "waiting": "Prompts that the ranker's process has not scored yet.",
    "scored": "Prompts that the ranker's process has scored.",
    "dropped": "Prompts that waited for a score until newer ones took their place.",
    "pairs": "Prompts with their lengths that the ranker's process remembers.",
    "rounds": "Rounds of tuning that are done.",
    "cpu_s": "CPU seconds of the ranker's process that lives.",
}
_GAUGES = {
    "trusted": "1 if the signal's predictions may be used, else 0.",
    "pairs": "Predictions in the window that are judged.",
    "rank_correlation": "Spearman's, of predicted places and lengths.",
    "calibration": "Mean distance of predicted and true place in the length distribution, 0 to 1.",
    **{f"recall_{percent}": f"Share of the longest {percent} % that were predicted to be so." for percent in PERCENTS},
    **{f"recall_{percent}_lower": f"Lower 95 % limit of the recall at {percent} %." for percent in PERCENTS},
}
"""Name behind the signal's -> what it says."""


def _values(quality: Quality, *, trusted: bool) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        "trusted": trusted,
        "pairs": quality.pairs,
        "rank_correlation": quality.rank_correlation,
        "calibration": quality.calibration,
    }
    for percent in PERCENTS:
        found = _recall(quality, percent)
        values[f"recall_{percent}"], values[f"recall_{percent}_lower"] = found["value"], found["lower"]
    return values
