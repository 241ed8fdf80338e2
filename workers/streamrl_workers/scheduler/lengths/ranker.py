"""The signal `Ranker`: what the ladder asks, and what the scheduler knows of a ranker in a process of its own.

Questions go out with the effects of the event that they came up in, answers come back as events (`prompts_ranked`), so a
model that takes long never holds up a decision. Until a prompt's score has come nothing is known of it. Owns the
questions that have not gone out, the pairs that have not been passed on, and the newest score of each prompt; bounded.
Does not own who answers (`streamrl_workers/ranker`, asked by the scheduler's `RankerClient`).
"""

from collections import OrderedDict, deque
from typing import Protocol

from streamrl_workers.scheduler.lengths.history import prompt_key

MAX_SCORES = 65_536
"""Far above the prompts that live or are looked ahead to."""
MAX_PAIRS = 4096
"""Pairs that have not been passed on; they go with the next event."""


class Ranker(Protocol):
    """Orders prompts by the length of their completions. Only the order of its scores is used, never their size."""

    def score(self, prompt: str) -> float | None:
        """Higher = longer; None: nothing is known of this prompt. Fast: it is called while the scheduler decides."""

    def learn(self, prompt: str, tokens: float) -> None:
        """Completions of this prompt had so many tokens on average."""


class RemoteRanker:
    """Knows what it has been told."""

    def __init__(self) -> None:
        self._scores: OrderedDict[int, float] = OrderedDict()
        self._prompts: list[tuple[int, str]] = []
        self._pairs: deque[tuple[str, float]] = deque(maxlen=MAX_PAIRS)

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
