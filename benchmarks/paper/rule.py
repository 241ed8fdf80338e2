"""The rule: how the paper's hardware becomes a scenario. Written before any run was compared with the hold-out; never tuned on it.

1. Lengths: log-normal, mode 2,500 tokens, and the limit of 20,000 is the quantile 1 - 1/1024: sigma^2 + 3.10 sigma = ln 8. 10K and 5K: all lengths times
   1/2 and 1/4. Every batch has the quantiles at (i + 1/2)/512 in an order of its own, so batches differ in order alone and the longest is the limit.
   Prompts: 512 tokens. Groups of two equal samples (the scheduler drops groups with fewer rewards).
2. An instance has the fewest GPUs (1, 2, 4, 8) of which the weights (bf16) take at most a third of the usable memory (90 %).
3. Slots: what is left of the memory holds so many samples of the greatest length, with their prompts: none is ever evicted. At most 512, where the curve ends.
4. A decoding step takes s (PTL(b) - c2 1024 b + c2 K): the measured curve is taken to be that of 1,024 tokens of context each; c2 is the time to read
   one token's KV cache of 7B from memory (17 ns). One scale s for each larger model, s = 1 for 7B.
5. Training takes k / y seconds a token, prompts included, on y GPUs.
6. Colocation: the state of actor and critic (16 bytes a parameter each) goes to host memory and back once a step, 25 GB/s a GPU.
7. Weights reach an instance at 25 GB/s (one link of 200 Gb/s), another datacenter at 10 GB/s.

Pure values; does not own running (`profile.py`, `runs.py`) nor calibration (`calibration.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from paper.facts import BATCH, PTL_MS

GB = 1e9
GROUP = 2
MODE_TOKENS = 2500.0
LONGEST_TOKENS = 20_000
FACTORS = {"5K": 0.25, "10K": 0.5, "20K": 1.0}
PROMPT_TOKENS = 512
USABLE_MEMORY = 0.9
WEIGHT_BYTES_PER_PARAMETER = 2
STATE_BYTES_PER_PARAMETER = 2 * 16
"""Actor and critic: weights, gradients, master weights, two moments."""
HOST_BYTES_PER_S = 25 * GB
LINK_BYTES_PER_S = 25 * GB
REMOTE_BYTES_PER_S = 10 * GB
MOST_SLOTS = max(PTL_MS)
MOST_GPUS = 8
"""Of one instance: a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of GPU."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flop_per_s: float


H800 = Hardware(name="H800", memory_bytes=80 * GB, bytes_per_s=3.35e12, flop_per_s=989.5e12)
H20 = Hardware(name="H20", memory_bytes=96 * GB, bytes_per_s=4.0e12, flop_per_s=148e12)
COMPUTE_EFFICIENCY = 0.7
"""Share of the peak that large matrix products reach; matters for H20 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One of the paper's models on its GPUs."""

    name: str
    gpus: int
    parameters: float
    kv_bytes: int
    """Of one token: 2 (K, V) · layers · KV heads · 128 · 2 bytes."""

    @property
    def weight_bytes(self) -> float:
        """In bf16."""
        return self.parameters * WEIGHT_BYTES_PER_PARAMETER


QWEN = {
    "7B": Model(name="7B", gpus=32, parameters=7.62e9, kv_bytes=2 * 28 * 4 * 128 * 2),
    "32B": Model(name="32B", gpus=64, parameters=32.8e9, kv_bytes=2 * 64 * 8 * 128 * 2),
    "72B": Model(name="72B", gpus=128, parameters=72.7e9, kv_bytes=2 * 80 * 8 * 128 * 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What the rule leaves open: the band is over these."""

    slots: float = 1.0
    """Factor on the slots of an instance."""
    context_tokens: int = 1024
    """At which the latency curve was measured."""
    overhead: float = 1.0
    """Factor on the time of switching stages."""
    weights_share: float = 1 / 3
    """Of an instance's memory, at most."""
    mode_tokens: float = MODE_TOKENS


RULE = Knobs()
"""As the rule has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A log-normal distribution, cut."""

    median_tokens: float
    sigma: float
    longest_tokens: int

    @classmethod
    def of(cls, name: str, *, mode_tokens: float = MODE_TOKENS, factor: float | None = None) -> "Lengths":
        """Of a variant; `factor` instead of the paper's own."""
        reach = NormalDist().inv_cdf(1 - 1 / BATCH)
        sigma = (-reach + math.sqrt(reach * reach + 4 * math.log(LONGEST_TOKENS / mode_tokens))) / 2
        scale = FACTORS[name] if factor is None else factor
        median = mode_tokens * math.exp(sigma * sigma)
        return cls(median_tokens=median * scale, sigma=sigma, longest_tokens=round(LONGEST_TOKENS * scale))

    @property
    def batch(self) -> Sequence[int]:
        """Tokens of each group of a batch, rising."""
        normal, groups = NormalDist(), BATCH // GROUP
        places = (normal.inv_cdf((number + 0.5) / groups) for number in range(groups))
        return [max(1, round(self.median_tokens * math.exp(self.sigma * place))) for place in places]

    @property
    def trained_tokens(self) -> float:
        """Of a batch, with prompts."""
        return GROUP * sum(self.batch) + BATCH * PROMPT_TOKENS


def instance_gpus(model: Model, *, hardware: Hardware = H800, share: float = RULE.weights_share) -> int:
    """GPUs of one instance."""
    gpus = 1
    while gpus < MOST_GPUS and model.weight_bytes > share * USABLE_MEMORY * hardware.memory_bytes * gpus:
        gpus *= 2
    return gpus


def instance_slots(model: Model, *, longest_tokens: int, knobs: Knobs, hardware: Hardware = H800) -> int:
    """Samples of one instance at once."""
    gpus = instance_gpus(model, hardware=hardware, share=knobs.weights_share)
    free = USABLE_MEMORY * hardware.memory_bytes * gpus - model.weight_bytes
    fits = free / (model.kv_bytes * (longest_tokens + PROMPT_TOKENS))
    return max(1, min(MOST_SLOTS, int(knobs.slots * fits)))


def kv_seconds(hardware: Hardware = H800) -> float:
    """To read the KV cache of one token of 7B."""
    return QWEN["7B"].kv_bytes / hardware.bytes_per_s


def latency_points(*, scale: float, knobs: Knobs, hardware: Hardware = H800) -> Sequence[Mapping[str, Any]]:
    """PTL without its context, in milliseconds by batch; never falling. On other hardware the slower of memory and arithmetic."""
    memory = H800.bytes_per_s / hardware.bytes_per_s
    points: list[dict[str, Any]] = []
    least = 0.0
    for batch, ms in PTL_MS.items():
        bare_ms = (ms - 1e3 * kv_seconds() * knobs.context_tokens * batch) * memory
        if hardware is not H800:
            flop = 2 * QWEN["7B"].parameters * batch
            bare_ms = max(bare_ms, 1e3 * flop / (COMPUTE_EFFICIENCY * hardware.flop_per_s))
        least = max(least, bare_ms * scale)
        points.append({"batch": batch, "milliseconds": least})
    return points


def overhead_seconds(model: Model, *, knobs: Knobs) -> float:
    """Of a step in which generation and training take turns on the same GPUs."""
    return knobs.overhead * 2 * model.parameters * STATE_BYTES_PER_PARAMETER / model.gpus / HOST_BYTES_PER_S
