"""How long generation of a batch takes on so many GPUs, at scale 1: the profiled points that Algorithm 1 and the calibration read.

Owns the scenario of a generation stage and two measurements: the real scheduler's makespan in the simulator, and random static
dispatch with first in, first out, which no policy of ours does. Times are proportional to the scale of the curve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import fmean
from typing import Any

from paper import measured
from paper.facts import BATCH, RECALL_PERCENT
from paper.rule import (
    GROUP,
    H800,
    PROMPT_TOKENS,
    QWEN,
    RULE,
    Hardware,
    Knobs,
    Lengths,
    instance_gpus,
    instance_slots,
    kv_seconds,
    latency_points,
)
from streamrl.latency import LatencyCurve
from streamrl_cli.simulation.engine import ModelledEngine

BATCH_GROUPS = BATCH // GROUP
RESOLUTION_TOKENS = 64
LEASE_S = 3600.0
"""Nothing dies here, and each heartbeat takes time of the simulator's."""
MAKESPAN_STEPS = 3
"""The predictions of the first batch are not trusted yet; the rest differs little, as batches differ in order alone."""
AHEAD_BATCHES = 3
"""Prompts that the scheduler looks ahead must be new ones too."""
RANDOM_BATCHES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One generation stage."""

    model: str
    lengths: Lengths
    gpus: int
    knobs: Knobs = RULE
    hardware: Hardware = H800
    slots: int | None = None
    """Instead of the rule's."""

    @property
    def instances(self) -> int:
        """Generators."""
        gpus = instance_gpus(QWEN[self.model], hardware=self.hardware, share=self.knobs.weights_share)
        return max(1, self.gpus // gpus)

    @property
    def instance_slots(self) -> int:
        """Samples of a generator at once."""
        if self.slots is not None:
            return self.slots
        longest = self.lengths.longest_tokens
        return instance_slots(QWEN[self.model], longest_tokens=longest, knobs=self.knobs, hardware=self.hardware)

    def points(self, *, scale: float = 1.0) -> Sequence[dict[str, Any]]:
        """Latency of an empty context by batch, in milliseconds."""
        return latency_points(scale=scale, knobs=self.knobs, hardware=self.hardware)

    def pool(self, *, scale: float = 1.0) -> dict[str, Any]:
        """A scenario's pool."""
        return {
            "name": "gen",
            "scaling": {"static": {"replicas": self.instances}},
            "slots": self.instance_slots,
            "latency": self.points(scale=scale),
            "kvNanoseconds": 1e9 * scale * kv_seconds(self.hardware),
        }


def batches(lengths: Lengths, *, count: int, seed: int) -> list[list[int]]:
    """Lengths of the groups of each batch: the same ones in another order."""
    order = Random(seed)
    found = []
    for _ in range(count):
        batch = list(lengths.batch)
        order.shuffle(batch)
        found.append(batch)
    return found


def scenario(
    case: Case,
    *,
    mode: str,
    dispatch: str,
    steps: int,
    scale: float = 1.0,
    recall: float = RECALL_PERCENT,
    seed: int = 0,
) -> dict[str, Any]:
    """What all scenarios share; the trainer takes no time."""
    rows = [[tokens] for batch in batches(case.lengths, count=steps + AHEAD_BATCHES, seed=seed) for tokens in batch]
    return {
        "seed": seed,
        "groupSize": GROUP,
        "promptTokens": PROMPT_TOKENS,
        "maxTokens": case.lengths.longest_tokens + 1,
        "resolutionTokens": RESOLUTION_TOKENS,
        "pipeline": {"mode": mode, "batchGroups": BATCH_GROUPS, "steps": steps},
        "scheduling": {"dispatch": {dispatch: {}}, "leaseSeconds": LEASE_S, "maxBufferBytes": "64Gi"},
        "lengths": {"table": {"rows": rows}},
        "ranker": {"recallPercent": recall},
        "curvesKnown": True,
        "batchByBatch": True,
        "pools": [case.pool(scale=scale)],
        "trainer": {"checkpointIntervalSteps": 1_000_000},
    }


@cache
def makespan_s(case: Case, *, dispatch: str = "skewAware", recall: float = RECALL_PERCENT) -> float:
    """Mean seconds of a batch's generation at scale 1, one batch after the other, as the scheduler dispatches it."""
    document = scenario(case, mode="StreamSync", dispatch=dispatch, steps=MAKESPAN_STEPS, recall=recall)
    return measured.run(document).makespan_s()


@cache
def random_s(case: Case, *, count: int = RANDOM_BATCHES, seed: int = 0) -> float:
    """The same with random static dispatch: each instance gets as many samples at random, and works them off in their order."""
    return fmean(
        _random_batch(case, batch, seed=seed + place)
        for place, batch in enumerate(batches(case.lengths, count=count, seed=seed))
    )


def _random_batch(case: Case, batch: Sequence[int], *, seed: int) -> float:
    lengths = [tokens for tokens in batch for _ in range(GROUP)]
    Random(seed).shuffle(lengths)
    return max(fifo_seconds(case, lengths[place :: case.instances]) for place in range(case.instances))


def fifo_seconds(case: Case, lengths: Sequence[int]) -> float:
    """One instance works these off, first in, first out."""
    curve = LatencyCurve.of_milliseconds((point["batch"], point["milliseconds"]) for point in case.points())
    engine = ModelledEngine(
        [curve.at(active) for active in range(case.instance_slots + 1)], kv_s=kv_seconds(case.hardware)
    )
    waiting = list(enumerate(lengths))[::-1]
    now_s = 0.0
    while True:
        while waiting and len(engine) < case.instance_slots:
            lease, tokens = waiting.pop()
            engine.admit(lease, tokens=tokens, context=PROMPT_TOKENS)
        end_s = engine.next_end_s()
        if end_s is None:
            return now_s
        now_s = end_s
        engine.end(now_s)
