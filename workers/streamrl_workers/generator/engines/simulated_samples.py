"""What a simulated sample is: its length, tokens, log-probs and text, all drawn from prompt and seed.

Owns: the distributions. Does not own: time, slots. No state: the same request is always the same sample.
"""

import hashlib
import math
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import Final, TypeVar

from streamrl.spec.generators import SimulatedEngine as SimulatedSpec
from streamrl_workers.generator.engine import FinishReason, Request

_T = TypeVar("_T")

WRONG_TEXT: Final = "wrong"

_TABLE_TOKENS = 8192
"""Sequences are slices of one random table, from a start that depends on the seed: a slice costs nothing."""

_VOCABULARY = 256
_NORMAL = NormalDist()
_TURN_STEP = 1 << 64
"""Sets the seeds of turns apart: above every request's own seed."""
_MAX_EXPONENT = 100.0
"""Far above the logarithm of any max_tokens, and below where exp overflows."""


def _table() -> tuple[tuple[int, ...], tuple[float, ...]]:
    random = Random(0)
    tokens = tuple(random.randrange(_VOCABULARY) for _ in range(_TABLE_TOKENS))
    return tokens, tuple(-random.expovariate(1.0) for _ in range(_TABLE_TOKENS))


_TOKENS, _LOGPROBS = _table()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A whole completion, known beforehand."""

    start: int  # place in the table
    length: int  # tokens
    reason: FinishReason
    text: str

    def tokens(self, *, first: int, count: int) -> tuple[int, ...]:
        """Tokens from a position on."""
        return _cut(_TOKENS, start=self.start + first, count=count)

    def logprobs(self, *, first: int, count: int) -> tuple[float, ...]:
        """Log-probs of these tokens."""
        return _cut(_LOGPROBS, start=self.start + first, count=count)


def draw_sample(request: Request, *, context: int = 0, spec: SimulatedSpec, seed: int) -> Sample:
    """The turn that a request gets behind `context` tokens of earlier turns; `seed` is the engine's."""
    by_prompt, by_seed, verdict, start = _uniforms(request, context=context, seed=seed)
    z = (_NORMAL.inv_cdf(by_prompt) + _NORMAL.inv_cdf(by_seed)) * math.sqrt(0.5)
    length = max(1, round(math.exp(min(math.log(spec.mean_tokens) + spec.sigma * z, _MAX_EXPONENT))))
    limit = request.sampling.max_tokens
    correct = length <= limit and verdict * 100 < spec.correct_percent
    return Sample(
        start=int(start * _TABLE_TOKENS),
        length=min(length, limit),
        reason="stop" if length <= limit else "length",
        text=request.prompt.strip() if correct else WRONG_TEXT,
    )


def _uniforms(request: Request, *, context: int, seed: int) -> tuple[float, float, float, float]:
    """Four numbers in (0, 1): one by the prompt alone, three by prompt, context and seed."""
    key = seed.to_bytes(16, "little", signed=True)
    prompt = hashlib.blake2b(request.prompt.encode(), digest_size=8, key=key).digest()
    sample_seed = (request.seed + context * _TURN_STEP).to_bytes(24, "little", signed=True)
    sample = hashlib.blake2b(prompt + sample_seed, digest_size=24, key=key).digest()
    first, second, third, fourth = (_uniform(raw) for raw in (prompt, sample[:8], sample[8:16], sample[16:]))
    return first, second, third, fourth


def _uniform(raw: bytes) -> float:
    """64 bits as a float64 that is neither 0 nor 1: 52 bits and a half."""
    return ((int.from_bytes(raw, "little") >> 12) + 0.5) / 2**52


def _cut(table: tuple[_T, ...], *, start: int, count: int) -> tuple[_T, ...]:
    """So many values from a place on; the table repeats for ever."""
    start %= _TABLE_TOKENS
    repeats = -(-(start + count) // _TABLE_TOKENS)
    return (table * repeats if repeats > 1 else table)[start : start + count]
