"""How long completions will be: what is known of each prompt's, cheapest signal first.

    predictor.py   the ladder over all signals, and the past of each prompt
    trust.py       whether a signal may be used
    quantiles.py   from ranks to tokens

Tokens are predicted for one completion. A prediction is used to order and to place work, never to cut it short.
"""

from streamrl_workers.scheduler.lengths.predictor import (
    JUDGED,
    MAX_PROMPTS,
    SOURCES,
    WEIGHT,
    LengthHistory,
    Lengths,
    Prediction,
    prompt_key,
)

__all__ = [
    "JUDGED",
    "MAX_PROMPTS",
    "SOURCES",
    "WEIGHT",
    "LengthHistory",
    "Lengths",
    "Prediction",
    "prompt_key",
]
