"""How long completions will be: what is known of each prompt's, cheapest signal first.

    history.py      past lengths of the same prompt          predictor.py    the ladder over all signals
    siblings.py     finished completions of the group        quantiles.py    from ranks to tokens
    rankers/        learned, for prompts never seen           quality.py      how good predictions were
                                                             guard.py        whether they may be used

Tokens are predicted for one completion. A prediction is used to order and to place work, never to cut it short.
"""

from streamrl_workers.scheduler.lengths.history import MAX_PROMPTS, WEIGHT, LengthHistory, prompt_key
from streamrl_workers.scheduler.lengths.predictor import JUDGED, SOURCES, Lengths, LengthsView, Prediction

__all__ = [
    "JUDGED",
    "MAX_PROMPTS",
    "SOURCES",
    "WEIGHT",
    "LengthHistory",
    "Lengths",
    "LengthsView",
    "Prediction",
    "prompt_key",
]
