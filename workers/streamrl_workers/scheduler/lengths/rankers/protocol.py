"""What the ladder asks of a ranker."""

from typing import Protocol


class Ranker(Protocol):
    """Orders prompts by the length of their completions. Only the order of its scores is used, never their size."""

    def score(self, prompt: str) -> float | None:
        """Higher = longer; None: nothing is known of this prompt. Must be fast: it is called while the scheduler decides.

        One that takes longer is asked and answers later (`answered.py`).
        """

    def learn(self, prompt: str, tokens: float) -> None:
        """Completions of this prompt had so many tokens on average."""
