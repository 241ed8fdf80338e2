"""Scale of the curve and cost of a trained token, from what the rule may look at: ColocationRL, the curve, Fig. 10's even split.

    T_col(L) = s G_random(L, n) + k N(L) / n + o        n all GPUs, N tokens of a batch, o the overhead of the rule
    even split (20K): k N / (n/2) = rho s G(n/2)        G by the scheduler with Algorithm 2; 32B and 72B only
    7B: s = 1, since the curve is its own

The one that is left (s, or k >= 0 for 7B) has the least sum of squared relative errors over the three lengths. Pure but for the runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from paper.facts import BATCH, EVEN_SPLIT, LENGTHS, THROUGHPUT
from paper.profile import Case, makespan_s, random_s
from paper.rule import QWEN, RULE, Knobs, Lengths, overhead_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A model on its hardware."""

    scale: float
    train_gpu_s: float
    """GPU-seconds of one trained token."""
    overhead_s: float
    """Of switching between stages, each step."""

    def training_s(self, lengths: Lengths, *, gpus: int) -> float:
        """Of a batch."""
        return self.train_gpu_s * lengths.trained_tokens / gpus


@cache
def calibrate(name: str, knobs: Knobs = RULE) -> Calibrated:
    """By the rule above."""
    model = QWEN[name]
    overhead_s = overhead_seconds(model, knobs=knobs)
    variants = [Lengths.of(length, mode_tokens=knobs.mode_tokens) for length in LENGTHS]
    cases = [Case(model=name, lengths=lengths, gpus=model.gpus, knobs=knobs) for lengths in variants]
    observed_s = [BATCH / rate for rate in THROUGHPUT["ColocationRL"][name]]
    generation_s = [random_s(case) for case in cases]
    tokens = [lengths.trained_tokens for lengths in variants]
    if name not in EVEN_SPLIT:
        fixed = [g + overhead_s for g in generation_s]
        per_gpu_s = max(0.0, _factor([n / model.gpus for n in tokens], fixed, observed_s))
        return Calibrated(scale=1.0, train_gpu_s=per_gpu_s, overhead_s=overhead_s)
    half = model.gpus // 2
    even_s = makespan_s(Case(model=name, lengths=variants[-1], gpus=half, knobs=knobs))
    token_s = EVEN_SPLIT[name] * even_s * half / tokens[-1]  # GPU-seconds of a token at scale 1
    slopes = [g + token_s * n / model.gpus for g, n in zip(generation_s, tokens, strict=True)]
    scale = _factor(slopes, [overhead_s] * len(slopes), observed_s)
    return Calibrated(scale=scale, train_gpu_s=scale * token_s, overhead_s=overhead_s)


def colocated_s(name: str, length: str, knobs: Knobs = RULE) -> float:
    """A step of ColocationRL as calibrated."""
    model, found = QWEN[name], calibrate(name, knobs)
    lengths = Lengths.of(length, mode_tokens=knobs.mode_tokens)
    generation_s = found.scale * random_s(Case(model=name, lengths=lengths, gpus=model.gpus, knobs=knobs))
    return generation_s + found.training_s(lengths, gpus=model.gpus) + found.overhead_s


def _factor(slopes: Sequence[float], fixed: Sequence[float], observed: Sequence[float]) -> float:
    """x with the least sum of ((x slope + fixed - observed) / observed)^2."""
    rows = list(zip(slopes, fixed, observed, strict=True))
    return sum(a * (t - b) / t**2 for a, b, t in rows) / sum((a / t) ** 2 for a, _, t in rows)
