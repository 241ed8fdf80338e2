"""The ranker `hashing`: a linear model of the logarithm of tokens on hashed features of the prompt.

    score(x) = w . x                      x = features(prompt)
    target   = log(1 + tokens) - m        m: moving mean of the logarithms, so that growing lengths need no relearning
    g_i      = clip(score - target) x_i   the gradient of Huber's loss
    h_i      = F h_i + g_i^2              AdaGrad (Duchi 2011) that forgets slowly: the policy changes
    w_i     -= RATE g_i / sqrt(h_i + e)

Each new pair is followed by `REPLAYS` old ones out of a bounded memory, drawn with a fixed seed: few pairs are then
learnt nearly as well as by several passes. `fit` makes those passes over pairs at hand.

Deterministic: equal pairs in equal order give equal weights. Bounded: `SLOTS` weights, `MEMORY_PAIRS` vectors.
State: weights and their h, not the memory. Not safe for threads.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, log1p, sqrt
from random import Random
from typing import Any

from streamrl_workers.scheduler.lengths.rankers.features import SLOTS, Vector, features

RATE = 0.15
FORGET = 0.9995
"""Weight of the past in h at each touch of a feature: half of it is gone after 1,400 pairs."""
MAX_ERROR = 1.0
"""A factor of e; one absurd length must not undo what many have taught."""
REPLAYS = 2
MEMORY_PAIRS = 1024
"""At some 200 features of 12 bytes about 2.5 MB."""
MEAN_WEIGHT = 0.01
PASSES = 12
"""Of `fit`; more begin to learn single prompts by heart."""
_TINY = 1e-6
_FORMAT = 1


class HashingRanker:
    """Learns from the run itself, within a few hundred microseconds a prompt."""

    def __init__(self) -> None:
        self._weights = array("d", bytes(8 * SLOTS))
        self._squares = array("d", bytes(8 * SLOTS))
        self._mean_log = 0.0
        self._pairs = 0
        self._memory: list[tuple[array[int], array[float], float]] = []
        self._draw = Random(0)

    def score(self, prompt: str) -> float | None:
        """Logarithm of the expected tokens, less the mean; None before the first pair."""
        return self.score_vector(features(prompt).items()) if self._pairs else None

    def score_vector(self, vector: Iterable[tuple[int, float]]) -> float | None:
        """Of a prompt that has been read: (slot, value) of its features."""
        if not self._pairs:
            return None
        weights = self._weights
        return sum(weights[slot] * value for slot, value in vector)

    def learn(self, prompt: str, tokens: float) -> None:
        """One more pair; `tokens` is at least 0."""
        self.learn_vector(features(prompt), tokens)

    def learn_vector(self, vector: Vector, tokens: float) -> None:
        """One more pair, whose prompt has been read."""
        log_tokens = self._see(tokens)
        self._touch(vector, log_tokens)
        for _ in range(min(REPLAYS, len(self._memory))):
            slots, values, old_log_tokens = self._memory[self._draw.randrange(len(self._memory))]
            self._touch(dict(zip(slots, values, strict=True)), old_log_tokens)
        entry = (array("I", vector), array("f", vector.values()), log_tokens)
        if len(self._memory) < MEMORY_PAIRS:
            self._memory.append(entry)
        else:
            self._memory[self._pairs % MEMORY_PAIRS] = entry

    def fit(self, pairs: Sequence[tuple[str, float]], *, passes: int = PASSES, seed: int = 0) -> None:
        """Learn pairs (prompt, tokens) that are all at hand, in `passes` shuffled passes."""
        seen = [(features(prompt), self._see(tokens)) for prompt, tokens in pairs]
        draw = Random(seed)
        for _ in range(passes):
            draw.shuffle(seen)
            for vector, log_tokens in seen:
                self._touch(vector, log_tokens)

    def _see(self, tokens: float) -> float:
        log_tokens = log1p(tokens)
        self._pairs += 1
        self._mean_log += max(MEAN_WEIGHT, 1 / self._pairs) * (log_tokens - self._mean_log)
        return log_tokens

    def _touch(self, vector: Vector, log_tokens: float) -> None:
        weights, squares = self._weights, self._squares
        error = sum(weights[slot] * value for slot, value in vector.items()) - (log_tokens - self._mean_log)
        error = min(max(error, -MAX_ERROR), MAX_ERROR)
        for slot, value in vector.items():
            slope = error * value
            square = squares[slot] = FORGET * squares[slot] + slope * slope
            weights[slot] -= RATE * slope / sqrt(square + _TINY)

    # ---- its state

    def state(self) -> dict[str, Any]:
        """As JSON has it; `from_state` goes on from it."""
        used = [slot for slot in range(SLOTS) if self._squares[slot]]
        return {
            "format": _FORMAT,
            "slots": SLOTS,
            "pairs": self._pairs,
            "meanLogTokens": self._mean_log,
            "weights": [[slot, self._weights[slot], self._squares[slot]] for slot in used],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> "HashingRanker":
        """A new one, or one that goes on. Raises `ValueError` for what no `state` gave."""
        ranker = cls()
        if state is None:
            return ranker
        if (state.get("format"), state.get("slots")) != (_FORMAT, SLOTS):
            raise ValueError(f"is not a hashing ranker of format {_FORMAT} with {SLOTS} slots")
        try:
            ranker._pairs, ranker._mean_log = int(state["pairs"]), float(state["meanLogTokens"])
            for slot, weight, square in state["weights"]:
                ranker._put(int(slot), float(weight), float(square))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"is damaged: {type(error).__name__}: {error}") from None
        return ranker

    def _put(self, slot: int, weight: float, square: float) -> None:
        if not (0 <= slot < SLOTS and isfinite(weight) and isfinite(square) and square >= 0):
            raise ValueError(f"slot {slot} cannot hold {weight}, {square}")
        self._weights[slot], self._squares[slot] = weight, square
