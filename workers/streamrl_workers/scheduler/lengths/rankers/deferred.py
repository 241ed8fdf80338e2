"""The ranker `hashing` in a run: what takes long is put off and worked off in small portions, between other events.

To read a long prompt takes a millisecond, to learn from it two; sixty-four in one event would hold up everything else. So a prompt is
read when a portion of work gets to it, and kept as a vector; from then on its score is one short sum with the weights of that moment. Until
it has been read nothing is known of it. Prompts come before pairs, of prompts the newest first: they begin last, and can still be in time.

Owns the work that is put off and the vectors; bounded: of those that are learnt the oldest go, of those to come none before it begins. Deterministic: equal calls in equal order give equal scores.
"""

from array import array
from collections import OrderedDict, deque
from typing import NamedTuple

from streamrl_workers.scheduler.lengths.history import prompt_key
from streamrl_workers.scheduler.lengths.rankers.features import MAX_CHARS, features
from streamrl_workers.scheduler.lengths.rankers.hashing import HashingRanker

PORTION_CHARS = 3000
"""Characters read in one portion, at about 1 µs each; the prompt or pair that reaches it is finished, and no other is begun."""
LESSON_CHARS = 2
"""To learn from a character of a prompt that has been read costs so many times as much as to read it."""
ITEM_CHARS = 300
"""What a prompt or a pair costs beside its characters: counts for short ones."""
MAX_COMING = 16_384
"""Prompts that are read and to come: twice what the scheduler ever looks ahead, since the newest are read first. About 48 MB, in runs of such batches."""
MAX_LEARNT = 4096
"""Prompts that are learnt and may come again: about 12 MB."""
MAX_PROMPTS = 16_384
MAX_PAIRS = 4096


class _Vector(NamedTuple):
    """A prompt that has been read."""

    slots: "array[int]"
    values: "array[float]"


class DeferredRanker:
    """Reads and learns later."""

    def __init__(self, ranker: HashingRanker) -> None:
        self._ranker = ranker
        self._coming: OrderedDict[int, _Vector] = OrderedDict()
        self._learnt: OrderedDict[int, _Vector] = OrderedDict()
        self._prompts: deque[str] = deque(maxlen=MAX_PROMPTS)
        self._pairs: deque[tuple[str, float]] = deque(maxlen=MAX_PAIRS)

    @property
    def backlog(self) -> int:
        """Prompts and pairs that are put off."""
        return len(self._prompts) + len(self._pairs)

    def score(self, prompt: str) -> float | None:
        """None: not read yet, or nothing learnt yet."""
        vector = self._vector(prompt_key(prompt))
        return None if vector is None else self._score(vector)

    def learn(self, prompt: str, tokens: float) -> None:
        """Put it off."""
        self._pairs.append((prompt, tokens))

    def ask(self, prompt: str) -> None:
        """A group of it is to come: to be read."""
        key = prompt_key(prompt)
        if key in self._learnt:
            self._coming[key] = self._learnt.pop(key)
        elif key not in self._coming:
            self._prompts.append(prompt)

    def work(self) -> dict[int, float]:
        """One portion; what is known now of prompts that have been read in it."""
        left, read = PORTION_CHARS, []
        while left > 0 and self._prompts:
            prompt = self._prompts.pop()
            key = prompt_key(prompt)
            left -= ITEM_CHARS + self._read(key, prompt)
            read.append(key)
        while left > 0 and self._pairs:
            prompt, tokens = self._pairs.popleft()
            key = prompt_key(prompt)
            left -= ITEM_CHARS + self._read(key, prompt) + LESSON_CHARS * min(len(prompt), MAX_CHARS)
            self._ranker.learn_vector(dict(zip(*self._had(key), strict=True)), tokens)
        vectors = ((key, self._vector(key)) for key in read)
        scores = ((key, self._score(vector)) for key, vector in vectors if vector is not None)
        return {key: score for key, score in scores if score is not None}

    def _read(self, key: int, prompt: str) -> int:
        """Characters that had to be read."""
        if self._vector(key) is not None:
            return 0
        vector = features(prompt)
        self._coming[key] = _Vector(array("I", vector), array("f", vector.values()))
        if len(self._coming) > MAX_COMING:
            self._coming.popitem(last=False)
        return min(len(prompt), MAX_CHARS)

    def _vector(self, key: int) -> _Vector | None:
        return self._coming.get(key) or self._learnt.get(key)

    def _had(self, key: int) -> _Vector:
        """The vector of a prompt that has been read, which has come now."""
        vector = self._learnt[key] = self._coming.pop(key) if key in self._coming else self._learnt[key]
        if len(self._learnt) > MAX_LEARNT:
            self._learnt.popitem(last=False)
        return vector

    def _score(self, vector: _Vector) -> float | None:
        return self._ranker.score_vector(zip(*vector, strict=True))
