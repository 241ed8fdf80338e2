"""The paper's three models at 20K, as the makespan benchmark sees them: fleets, slots, lengths.

    7B on 32 GPUs, 32B on 64, 72B on 128; one batch of 1,024 samples, one per prompt
    PTL    the curve of section 3 (7B on H800); of 32B and 72B only the shape counts here, a share knows no scale
    L      log-normal, median 4,000, sigma 0.8 (mode 2.1K), cut at 20,480

Slots of regime (a): the ones for which our own Algorithm 2 with recall .87 comes nearest to the paper's Fig. 9 (random 1.00,
StreamRL .90 / .82 / .785, oracle .815 / .67 / .69; the oracle of 32B is not reached within 10 % with any). Regime (b): as many as there are samples.
KV caps: bytes a token = 2 * layers * KV heads * head size * 2; 90 % of the GPUs' 80 GB without the weights; a slot for 20,480 tokens.
"""

from dataclasses import dataclass

from paper.facts import GENERATION, PTL_MS
from paper.rule import QWEN

from dispatch.draws import Population, log_normal
from streamrl.latency import LatencyCurve

SAMPLES = 1024
UNIT = 64
"""The core is told lengths in units of so many tokens."""
BASE_DEALS = 8
"""Random static FIFO is the mean of so many deals."""
MOST_TOKENS = 20_480
PROMPT_TOKENS = 512
POPULATION = Population(shape=log_normal(median=4000.0, sigma=0.8), within=0.0, most=MOST_TOKENS, group_size=1)
"""Mode 2.1K; one in 49 is cut."""
CURVE = LatencyCurve.of_milliseconds(PTL_MS.items())
GPU_BYTES = 80e9
USABLE = 0.9
BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model on its fleet."""

    name: str
    instances: int
    gpus_each: int
    queue_slots: int
    """Of an instance in regime (a)."""

    @property
    def paper(self) -> float:
        """Fig. 9: generation time with StreamRL's ranker."""
        return GENERATION[self.name]["StreamRL"]

    @property
    def paper_oracle(self) -> float:
        """The same with an oracle."""
        return GENERATION[self.name]["oracle"]

    @property
    def kv_slots(self) -> int:
        """Samples of the longest kind that fit into the memory of an instance."""
        qwen = QWEN[self.name]
        free = USABLE * GPU_BYTES * self.gpus_each - BF16_BYTES * qwen.parameters
        return int(free / (qwen.kv_bytes * (MOST_TOKENS + PROMPT_TOKENS)))

    @property
    def all_slots(self) -> int:
        """Regime (b): twice what an even share needs."""
        return 2 * SAMPLES // self.instances


MODELS = (
    Model(name="7B", instances=32, gpus_each=1, queue_slots=6),
    Model(name="32B", instances=16, gpus_each=4, queue_slots=16),
    Model(name="72B", instances=16, gpus_each=8, queue_slots=16),
)
