"""An engine that only takes time: for tests of the other parts, and for scale. Imports no torch and does not sleep.

- A decode step takes `ptl(active) * time_scale`, read from the latency curve at the moment's batch size
  (`streamrl.latency`: above the last point it goes on with the slope of the last two).
  `step` gives what fits into the time since the last one, sequence ends and the faster steps behind them
  included. With time_scale 0 it gives everything at once.
- A sample is drawn from prompt and seed alone: the same request is always the same sample. Its length is log-normal with
  median `mean_tokens`, cut at max_tokens (finish reason "length"). Half of its log-variance comes from the prompt and
  half from the seed: samples of a group resemble each other.
- Tokens and log-probs are functions of (seed, position): a continuation of a prefix is the same sequence. A turn behind
  a context is a sample of its own; an observation has a token for each byte.
- A correct completion's text is its prompt, stripped: data sets for simulated runs have the prompt as the
  answer. Any other text is "wrong".
"""

import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import Final, TypeVar

from streamrl.latency import LatencyCurve
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import SimulatedEngineSpec as SimulatedSpec
from streamrl_workers.generator.engines.base import Delta, FinishReason, KvLoad, LoadPart
from streamrl_workers.stream.packing import count_32
from streamrl_workers.weights.hashing import TensorBytes

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
class SimulatedSample:
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


def draw_sample(request: pb.SampleRequest, *, context: int = 0, spec: SimulatedSpec, seed: int) -> SimulatedSample:
    """The turn that a request gets behind `context` tokens of earlier turns; `seed` is the engine's."""
    by_prompt, by_seed, verdict, start = _uniforms(request, context=context, seed=seed)
    z = (_NORMAL.inv_cdf(by_prompt) + _NORMAL.inv_cdf(by_seed)) * math.sqrt(0.5)
    length = max(1, round(math.exp(min(math.log(spec.mean_tokens) + spec.sigma * z, _MAX_EXPONENT))))
    limit = request.sampling.max_tokens
    correct = length <= limit and verdict * 100 < spec.correct_percent
    return SimulatedSample(
        start=int(start * _TABLE_TOKENS),
        length=min(length, limit),
        reason="stop" if length <= limit else "length",
        text=request.prompt.strip() if correct else WRONG_TEXT,
    )


def _uniforms(request: pb.SampleRequest, *, context: int, seed: int) -> tuple[float, float, float, float]:
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


_TIME_SLACK = 1e-9
"""Share of a step by which it may come early: sums of floats never miss the last step by rounding."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Active:
    request: pb.SampleRequest
    sample: SimulatedSample
    done: int  # tokens of this turn given, prefix included and context not
    observed: tuple[int, ...] = ()
    reported: bool = False

    @property
    def remaining(self) -> int:
        return self.sample.length - self.done


class SimulatedEngine:
    """Takes time, gives noise."""

    def __init__(
        self, *, spec: SimulatedSpec, slots: int, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.slots = slots
        self.version: int | None = None
        self.load_parts: Mapping[LoadPart, float] = {}
        self._spec = spec
        self._seed = seed
        self._clock = clock
        self._now_s = clock()  # the moment up to which tokens have been given
        self._paused_s: float | None = None  # since when it is paused
        self._active: dict[int, _Active] = {}  # by request, oldest first
        curve = LatencyCurve.of_milliseconds((point.batch, point.milliseconds) for point in spec.latency)
        # Seconds per step at 0..slots active sequences.
        self._step_s = [curve.at(batch) * spec.time_scale for batch in range(slots + 1)]

    def active(self) -> int:
        return len(self._active)

    def pinned_active(self) -> int:
        return sum(a.request.pinned for a in self._active.values())

    def free(self) -> int:
        return self.slots - len(self._active)

    def pause(self, *, paused: bool) -> None:
        """A paused engine does not save up time: what it had of a step is all it has when it goes on."""
        now_s = self._clock()
        if paused and self._paused_s is None:
            self._paused_s = now_s
        elif not paused and self._paused_s is not None:
            self._now_s += now_s - self._paused_s
            self._paused_s = None

    def step_seconds(self) -> float:
        """Time until the next token is due; 0 if it is, or if nothing is active."""
        if not self._active:
            return 0.0
        return max(0.0, self._now_s + self._step_s[len(self._active)] - self._clock())

    def kv_load(self) -> KvLoad | None:
        """A prompt has a token for each character. Nothing is refused, and nothing slows down where it is full."""
        capacity = self._spec.kv_cache_tokens
        if capacity is None:
            return None
        used = sum(len(a.request.prompt) + a.request.context_tokens + a.done for a in list(self._active.values()))
        return KvLoad(capacity_tokens=capacity, used_tokens=used)

    def metrics(self) -> bytes:
        return b""

    def close(self) -> None:
        pass

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[] for _ in sequences]  # it computes nothing

    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> list[Delta]:
        self.version = version
        return []

    def add(self, requests: Sequence[pb.SampleRequest]) -> list[Delta]:
        assert self.version is not None, "requests were added before weights"
        assert len(requests) <= self.free(), "more requests than free slots"
        if not self._active:
            self._now_s = self._clock()  # an idle engine does not save up time
        admitted = [self._admit(request) for request in requests]
        self._active.update({a.request.lease: a for a in admitted if a.remaining > 0})
        return [self._delta(a, tokens=0) for a in admitted if a.remaining <= 0]

    def step(self) -> list[Delta]:
        """What has become due since the last step; nothing if `step_seconds` is not over."""
        gained = self._advance()
        deltas = [self._delta(self._active[lease], tokens=tokens) for lease, tokens in gained.items()]
        for lease in gained:
            if self._active[lease].remaining == 0:
                del self._active[lease]
        return deltas

    def cancel(self, leases: Collection[int]) -> None:
        for lease in leases:
            self._active.pop(lease, None)

    def _advance(self) -> dict[int, int]:
        """Tokens that each request gains until now. Goes from one sequence's end to the next: in between the batch is constant."""
        now_s = self._clock()
        ends = sorted(a.remaining for a in self._active.values())
        given = 0  # decode steps
        for place, end in enumerate(ends):
            one_s = self._step_s[len(ends) - place]
            due = end - given if one_s == 0 else math.floor((now_s - self._now_s) / one_s + _TIME_SLACK)
            steps = min(end - given, max(due, 0))
            self._now_s += steps * one_s
            given += steps
            if given < end:
                break
        return {lease: min(given, a.remaining) for lease, a in self._active.items()} if given else {}

    def _admit(self, request: pb.SampleRequest) -> _Active:
        observed = tuple(request.observation.encode())
        context = request.context_tokens + len(observed)
        sample = draw_sample(request, context=context, spec=self._spec, seed=self._seed)
        done = count_32(request.prefix_tokens) + len(observed) - context
        return _Active(request=request, sample=sample, done=done, observed=observed)

    def _delta(self, active: _Active, *, tokens: int) -> Delta:
        """Give the next `tokens` of a sequence."""
        assert self.version is not None
        first, sample = active.done, active.sample
        active.done += tokens
        prompt_tokens = None if active.reported else tuple(active.request.prompt.encode())
        observation_tokens = active.observed if tokens and not active.reported else ()
        active.reported = True
        ended = active.remaining <= 0
        return Delta(
            lease=active.request.lease,
            tokens=sample.tokens(first=first, count=tokens),
            logprobs=sample.logprobs(first=first, count=tokens),
            version=self.version,
            finish_reason=sample.reason if ended else None,
            text=sample.text if ended else None,
            prompt_tokens=prompt_tokens,
            observation_tokens=observation_tokens,
        )
