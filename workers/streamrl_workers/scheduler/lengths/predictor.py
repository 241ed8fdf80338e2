"""The ladder of length signals: the first one that knows a prompt predicts its completions."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from streamrl_workers.scheduler.lengths.history import LengthHistory

Source = Literal["History", "Nothing"]
"""Which signal a prediction rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of one completion."""

    tokens: float
    """0 if nothing is known."""
    source: Source


class Lengths:
    """Predicts by the signals of the job, and learns from what becomes of the samples."""

    def __init__(self, history: LengthHistory, *, signals: Collection[str]) -> None:
        """`signals`: `scheduling.lengthSignals`; what is not among them is learnt all the same, and not used."""
        self._history = history
        self._signals = frozenset(signals)

    def predict(self, key: int) -> Prediction:
        """For a completion of the prompt with this key (`prompt_key`)."""
        tokens = self._history.predict(key) if "History" in self._signals else 0.0
        return Prediction(tokens=tokens, source="History" if tokens else "Nothing")

    def learn(self, key: int, *, mean_tokens: float) -> None:
        """A group of this prompt is finished; its completions had so many tokens on average."""
        self._history.learn(key, mean_tokens=mean_tokens)
