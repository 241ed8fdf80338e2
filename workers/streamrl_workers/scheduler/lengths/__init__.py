"""How long completions will be: what is known of each prompt's, cheapest signal first.

    predictor.py   the ladder over all signals       history.py     past lengths of the same prompt
    trust.py       whether a signal may be used      quantiles.py   from ranks to tokens

Tokens are predicted for one completion. A prediction is used to order and to place work, never to cut it short.
"""

from streamrl_workers.scheduler.lengths.history import MAX_PROMPTS, WEIGHT, LengthHistory, prompt_key
from streamrl_workers.scheduler.lengths.predictor import JUDGED, SOURCES, Lengths, Prediction

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
