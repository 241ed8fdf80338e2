"""The paper's three models at 20K, as the makespan benchmark sees them: fleets, slots, lengths.

    7B on 32 GPUs, 32B on 64, 72B on 128; one batch of 1,024 samples, one per prompt
    PTL    the curve of section 3 (7B on H800); of 32B and 72B only the shape counts here, a share knows no scale
    L      log-normal, median 4,000, sigma 0.8 (mode 2.1K), cut at 20,480

Slots of regime (a): the ones for which our own Algorithm 2 with recall .87 comes nearest to the paper's Fig. 9 (random 1.00,
StreamRL .90 / .82 / .785, oracle .815 / .67 / .69; the oracle of 32B is not reached within 10 % with any). Regime (b): as many as there are samples.
KV caps: bytes a token = 2 * layers * KV heads * head size * 2; 90 % of the GPUs' 80 GB without the weights; a slot for 20,480 tokens.
"""

from dataclasses import dataclass

from streamrl.latency import LatencyCurve

SAMPLES = 1024
MOST_TOKENS = 20_480
PROMPT_TOKENS = 512
MILLISECONDS = (
    (1, 8.3), (2, 8.7), (4, 8.9), (8, 9.0), (16, 9.4), (32, 10.2), (64, 11.7), (128, 15.2), (256, 21.7), (512, 36.9),
)  # fmt: skip
CURVE = LatencyCurve.of_milliseconds(MILLISECONDS)
GPU_BYTES = 80e9
USABLE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model on its fleet."""

    name: str
    instances: int
    gpus_each: int
    queue_slots: int
    """Of an instance in regime (a)."""
    weight_bytes: float
    kv_token_bytes: float
    paper: float
    """Fig. 9: generation time with StreamRL's ranker."""
    paper_oracle: float

    @property
    def kv_slots(self) -> int:
        """Samples of the longest kind that fit into the memory of an instance."""
        free = USABLE * GPU_BYTES * self.gpus_each - self.weight_bytes
        return int(free / (self.kv_token_bytes * (MOST_TOKENS + PROMPT_TOKENS)))

    @property
    def all_slots(self) -> int:
        """Regime (b): twice what an even share needs."""
        return 2 * SAMPLES // self.instances


def kv_bytes(*, layers: int, heads: int, head: int = 128) -> float:
    """Of one token, bf16."""
    return 2 * layers * heads * head * 2


MODELS = (
    Model(
        name="7B",
        instances=32,
        gpus_each=1,
        queue_slots=6,
        weight_bytes=15.2e9,
        kv_token_bytes=kv_bytes(layers=28, heads=4),
        paper=0.90,
        paper_oracle=0.815,
    ),
    Model(
        name="32B",
        instances=16,
        gpus_each=4,
        queue_slots=16,
        weight_bytes=65.5e9,
        kv_token_bytes=kv_bytes(layers=64, heads=8),
        paper=0.82,
        paper_oracle=0.67,
    ),
    Model(
        name="72B",
        instances=16,
        gpus_each=8,
        queue_slots=16,
        weight_bytes=145.4e9,
        kv_token_bytes=kv_bytes(layers=80, heads=8),
        paper=0.785,
        paper_oracle=0.69,
    ),
)
