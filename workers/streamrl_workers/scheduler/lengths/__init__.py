"""How long completions will be: what is known of each prompt's, cheapest signal first.

    history.py      past lengths of the same prompt          predictor.py    the ladder over all signals

Tokens are predicted for one completion. A prediction is used to order and to place work, never to cut it short.
"""

from streamrl_workers.scheduler.lengths.history import MAX_PROMPTS, WEIGHT, LengthHistory, prompt_key
from streamrl_workers.scheduler.lengths.predictor import Lengths, Prediction

__all__ = ["MAX_PROMPTS", "WEIGHT", "LengthHistory", "Lengths", "Prediction", "prompt_key"]
