"""A prompt as a sparse vector of hashed features.

Owns which features there are and where they lie; the same text gives the same vector in every process and
version of Python (crc32, not `hash`). Three blocks, so that long texts and short ones weigh alike:

    words      words, pairs of words, letter triples of very long words; digits are masked: it is the form that repeats.
               log1p of the count, the block scaled to length 1
    surface    how long, how many numbers, how large, ..: as a number and as a bucket of its logarithm
    family     the surface features again, apart for each opening of a prompt (its first words): tasks that are
               written from a template differ by their numbers, and each task in its own way
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from math import log1p, sqrt
from zlib import crc32

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
