"""The ranker `hashing`: a linear model of the logarithm of tokens on hashed features of the prompt. Needs no model and no GPU.

    score(x) = w . x                      x = features(prompt)
    target   = log(1 + tokens) - m        m: moving mean of the logarithms, so that growing lengths need no relearning
    g_i      = clip(score - target) x_i   the gradient of Huber's loss
    h_i      = F h_i + g_i^2              AdaGrad (Duchi 2011) that forgets slowly: the policy changes
    w_i     -= RATE g_i / sqrt(h_i + e)

Each new pair is followed by `REPLAYS` old ones out of a bounded memory, drawn with a fixed seed: few pairs are then
learnt nearly as well as by several passes. Deterministic and bounded.

Features are three blocks, so that long texts and short ones weigh alike; the same text gives the same vector in every
process (crc32, not `hash`):

    words      words, pairs of words, letter triples of very long words; digits are masked: it is the form that repeats.
               log1p of the count, the block scaled to length 1
    surface    how long, how many numbers, how large, ..: as a number and as a bucket of its logarithm
    family     the surface features again, apart for each opening of a prompt (its first words): tasks that are
               written from a template differ by their numbers, and each task in its own way
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import log1p, nan, sqrt
from random import Random
from zlib import crc32

RATE = 0.15
FORGET = 0.9995
"""Weight of the past in h at each touch of a feature: half of it is gone after 1,400 pairs."""
MAX_ERROR = 1.0
"""A factor of e; one absurd length must not undo what many have taught."""
REPLAYS = 2
MEMORY_PAIRS = 1024
"""At some 200 features of 12 bytes about 2.5 MB."""
MEAN_WEIGHT = 0.01
_TINY = 1e-6
SLOTS = 1 << 15
"""Length of the vector. 2,000 prompts have some thousand different features; few share a slot."""
MAX_CHARS = 3000
"""Of a longer prompt the first and the last half of so many are read."""

_TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s]|_")
_OPENING_WORDS = 3
_TRIPLE_FROM = 13
"""Words of so many letters are taken apart into triples: scripts without spaces, and names made of several words."""
_BUCKETS_PER_E = 3
"""Buckets per factor of e: a factor of 1.4 is told apart."""
_SURFACE_SCALE = 0.25
_CACHED_WORDS = 16_384
_MAX_DIGITS = 400
"""int() refuses thousands of digits; nobody means such numbers as numbers."""

Vector = dict[int, float]
"""Slot -> value."""


class HashingRanker:
    """Learns from the run itself."""

    def __init__(self) -> None:
        self._weights = array("d", bytes(8 * SLOTS))
        self._squares = array("d", bytes(8 * SLOTS))
        self._mean_log = 0.0
        self._pairs = 0
        self._memory: list[tuple[array[int], array[float], float]] = []
        self._draw = Random(0)

    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Logarithm of the expected tokens, less the mean; not a number before the first pair."""
        return [self._score(features(prompt)) if self._pairs else nan for prompt in prompts]

    def learn(self, prompt: str, tokens: float) -> None:
        """One more pair; `tokens` is at least 0."""
        vector, log_tokens = features(prompt), self._see(tokens)
        self._touch(vector, log_tokens)
        for _ in range(min(REPLAYS, len(self._memory))):
            slots, values, old_log_tokens = self._memory[self._draw.randrange(len(self._memory))]
            self._touch(dict(zip(slots, values, strict=True)), old_log_tokens)
        entry = (array("I", vector), array("f", vector.values()), log_tokens)
        if len(self._memory) < MEMORY_PAIRS:
            self._memory.append(entry)
        else:
            self._memory[self._pairs % MEMORY_PAIRS] = entry

    # ---- inside

    def _score(self, vector: Vector) -> float:
        return sum(self._weights[slot] * value for slot, value in vector.items())

    def _see(self, tokens: float) -> float:
        log_tokens = log1p(tokens)
        self._pairs += 1
        self._mean_log += max(MEAN_WEIGHT, 1 / self._pairs) * (log_tokens - self._mean_log)
        return log_tokens

    def _touch(self, vector: Vector, log_tokens: float) -> None:
        error = self._score(vector) - (log_tokens - self._mean_log)
        error = min(max(error, -MAX_ERROR), MAX_ERROR)
        for slot, value in vector.items():
            slope = error * value
            square = self._squares[slot] = FORGET * self._squares[slot] + slope * slope
            self._weights[slot] -= RATE * slope / sqrt(square + _TINY)


def features(prompt: str) -> Vector:
    """The vector of a prompt; never empty."""
    text = prompt if len(prompt) <= MAX_CHARS else f"{prompt[: MAX_CHARS // 2]} {prompt[-MAX_CHARS // 2 :]}"
    tokens = _TOKEN.findall(text)
    numbers = [token for token in tokens if token[0].isdecimal()]
    masked = [_mask(token) for token in tokens] if numbers else [token.lower() for token in tokens]
    words = Counter(masked)
    vector = _words(words, pairs=Counter(pairwise(masked)))
    opening = " ".join(masked[:_OPENING_WORDS])
    for name, value in _surface(prompt, tokens, words, numbers):
        bucket = f"{name}={int(value * _BUCKETS_PER_E)}"
        for slot, amount in (
            (_slot(name), value),
            (_slot(bucket), 1.0),
            (_slot(f"{opening}|{name}"), value),
            (_slot(f"{opening}|{bucket}"), 1.0),
        ):
            vector[slot] = vector.get(slot, 0.0) + _SURFACE_SCALE * amount
    return vector


def _words(words: Counter[str], *, pairs: Counter[tuple[str, str]]) -> Vector:
    counts: dict[int, int] = {}
    for word, count in words.items():
        for slot in _slots_of(word):
            counts[slot] = counts.get(slot, 0) + count
    for (before, word), count in pairs.items():
        slot = _slot(f"{before} {word}")
        counts[slot] = counts.get(slot, 0) + count
    values = {slot: log1p(count) for slot, count in counts.items()}
    length = sqrt(sum(value * value for value in values.values())) or 1.0
    return {slot: value / length for slot, value in values.items()}


def _surface(prompt: str, tokens: list[str], words: Counter[str], numbers: list[str]) -> Iterator[tuple[str, float]]:
    """Name and logarithm of each count or size."""
    whole = [min(int(number.partition(".")[0]), 10**15) for number in numbers if len(number) < _MAX_DIGITS]
    yield "characters", log1p(len(prompt))
    yield "tokens", log1p(len(tokens))
    yield "different", log1p(len(words))
    yield "lines", log1p(prompt.count("\n"))
    yield "numbers", log1p(len(numbers))
    yield "digits", log1p(sum(map(len, numbers)))
    yield "largest", log1p(max(whole, default=0))
    yield "last", log1p(whole[-1] if whole else 0)
    yield "sum", log1p(sum(whole))
    yield "longest-word", log1p(max(map(len, tokens), default=0))
    yield "operators", log1p(sum(words[mark] for mark in "+-*/^=<>%&|~"))
    yield "brackets", log1p(sum(words[mark] for mark in "()[]{}"))


def _mask(token: str) -> str:
    return f"#{len(token)}" if token[0].isdecimal() else token.lower()


@lru_cache(maxsize=_CACHED_WORDS)
def _slots_of(word: str) -> tuple[int, ...]:
    """A word's own slot and those of its triples."""
    triples = [word[at : at + 3] for at in range(len(word) - 2)] if len(word) >= _TRIPLE_FROM else []
    return (_slot(word), *(_slot(f"~{triple}") for triple in triples))


def _slot(name: str) -> int:
    return crc32(name.encode("utf-8", "surrogatepass")) % SLOTS
