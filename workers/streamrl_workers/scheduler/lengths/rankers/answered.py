"""A ranker that answers later: what it is asked goes out, what it answers comes back as an event.

So a model that takes long, in a process of its own or in small portions on the event loop, never holds up a decision. Until a
prompt's score has come nothing is known of it. Owns the questions that have not gone out, the pairs that have not been passed on, and
the newest score of each prompt; bounded. Does not own who answers (`scheduler/shell`).
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

from streamrl_workers.scheduler.lengths.history import prompt_key

MAX_SCORES = 65_536
"""Far above the prompts that live or are looked ahead to."""
MAX_PAIRS = 4096
"""Pairs that have not been passed on; they go with the next event."""


class AnsweredRanker:
    """Knows what it has been told."""

    def __init__(self) -> None:
        self._scores: OrderedDict[int, float] = OrderedDict()
        self._prompts: list[tuple[int, str]] = []
        self._pairs: deque[tuple[str, float]] = deque(maxlen=MAX_PAIRS)

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> "AnsweredRanker":
        """Its state is elsewhere. Raises `ValueError` for any."""
        if state is not None:
            raise ValueError("is a file, and must be the folder of a ranker with a model")
        return cls()

    def score(self, prompt: str) -> float | None:
        """The newest answer."""
        return self._scores.get(prompt_key(prompt))

    def learn(self, prompt: str, tokens: float) -> None:
        """To be passed on."""
        self._pairs.append((prompt, tokens))

    def ask(self, prompt: str) -> None:
        """To be scored, also if an answer is known: it is of an older model."""
        self._prompts.append((prompt_key(prompt), prompt))

    def told(self, key: int, score: float) -> None:
        """An answer."""
        self._scores.pop(key, None)
        self._scores[key] = score
        if len(self._scores) > MAX_SCORES:
            self._scores.popitem(last=False)

    def take(self) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[str, float], ...]]:
        """(prompts to score by key, pairs to learn) since the last call."""
        prompts, pairs = tuple(self._prompts), tuple(self._pairs)
        self._prompts.clear()
        self._pairs.clear()
        return prompts, pairs
