"""What is predicted, and how well: of the part `lengths` of `/status`, whose key set is stable.

trusted       whether dispatch may use predictions
predictions   source -> groups that began with its prediction, since the start
signals       signal -> trusted, pairs (of the window), recall of the longest 20 % and its lower 95 % limit (shares of 1),
              rank_correlation (-1 to 1)
"""

from dataclasses import asdict
from typing import Any

from streamrl_workers.scheduler.lengths.predictor import JUDGED, SOURCES, Lengths
from streamrl_workers.scheduler.lengths.trust import Quality


def length_status(lengths: Lengths) -> dict[str, Any]:
    """Return the part `lengths`, without the ranker's process."""
    return {
        "trusted": lengths.trusted,
        "predictions": {source: lengths.predictions.get(source, 0) for source in SOURCES},
        "signals": {signal: _signal(signal, lengths) for signal in JUDGED},
    }


def _signal(signal: str, lengths: Lengths) -> dict[str, Any]:
    return {"trusted": signal in lengths.trusted_signals, **asdict(lengths.quality.get(signal, Quality()))}
