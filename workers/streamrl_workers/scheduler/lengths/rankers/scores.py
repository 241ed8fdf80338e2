"""The ranker `scores`: a table from prompts to scores, made before the run.

So a ranker that is too heavy for the scheduler's process (a fine-tuned language model) can order a data set that is
known in advance. Learns nothing; knows nothing of prompts that are not in the table.

State: {"scores": {prompt key: score}}, the keys in decimal, since JSON's keys are texts.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from streamrl_workers.scheduler.lengths.history import prompt_key


class ScoresRanker:
    """Scores by prompt key."""

    def __init__(self, scores: Mapping[int, float]) -> None:
        self._scores = dict(scores)

    def score(self, prompt: str) -> float | None:
        """The table's score, if it has the prompt."""
        return self._scores.get(prompt_key(prompt))

    def learn(self, prompt: str, tokens: float) -> None:
        """The table stays as it is."""

    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"scores": {str(key): score for key, score in self._scores.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> "ScoresRanker":
        """The table of a file. Raises `ValueError` for what is none."""
        table = {} if state is None else state.get("scores")
        if not isinstance(table, Mapping):
            raise ValueError("is not a table of scores")  # noqa: TRY004 - a bad file, not a bug of the caller
        try:
            scores = {int(key): float(score) for key, score in table.items()}
        except (TypeError, ValueError):
            raise ValueError("holds a prompt key or a score that is no number") from None
        if not all(map(isfinite, scores.values())):
            raise ValueError("holds a score that is not finite")
        return cls(scores)
