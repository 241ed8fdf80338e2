"""How well the packer uses the ranks, and what rows without padding are worth (docs/decisions/0090-rows-without-padding.md).

python benchmarks/packing.py            # simulated: time of a step above the ideal, 8 ranks, costs of an 8B
python benchmarks/packing.py rates      # tokens/s of the trainer on this processor, padded and packed in turns, in one process
"""

import math
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from copy import deepcopy

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.spec import parse_job
from streamrl_workers.models.documents import attend_by_document, attention_tokens
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.packing import Layout, PackedSample, Pending, pack
from streamrl_workers.trainer.engines.worker import RankModels, RankWorker

RANKS, BUDGET_TOKENS, GROUP = 8, 16_384, 8
MEDIANS, SAMPLES, SEEDS = (4096, 12_288), (128, 256, 512), 5
SPREAD, LONGEST = 0.8, 32_768
"""Lengths are log-normal, cut at the longest."""
EIGHT_B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
TURNS = 3
SIZES = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048}
TASKS = {
    "short answers, the README's model": (
        4096,
        Qwen3Config(hidden_size=96, num_key_value_heads=4, head_dim=24, intermediate_size=256, **SIZES),
        lambda rng: rng.randint(8, 32),
        160,
    ),
    "skewed answers": (
        16_384,
        Qwen3Config(hidden_size=128, num_key_value_heads=2, head_dim=32, intermediate_size=344, **SIZES),
        lambda rng: min(1500, 4 + int(rng.lognormvariate(4.5, 1.0))),
        24,
    ),
}
"""Tokens of a pass, model, lengths, samples of a step."""


def sample_of(tokens: int) -> PackedSample:
    """A sample of so many input tokens, the last half trained."""
    places = array("i", range(1 + tokens // 2, tokens + 1))
    return PackedSample(
        group_id=0,
        index=0,
        tokens=array("i", [place % 31 for place in range(tokens + 1)]),
        places_N=places,
        behaviour_N=array("f", [-3.0]) * len(places),
        advantages_N=array("d", [1.0]) * len(places),
    )


def above_ideal(samples: Sequence[PackedSample], *, layout: Layout, streamed: bool) -> float:
    """Return the share of the step's time that ranks wait for each other or compute padding. A round takes as long as its slowest rank."""
    ideal = sum(layout.cost([sample]) for sample in samples) / RANKS
    if streamed:
        pending, rounds = Pending(budget_tokens=BUDGET_TOKENS, layout=layout, ranks=RANKS), []
        for begin in range(0, len(samples), GROUP):
            for sample in samples[begin : begin + GROUP]:
                pending.add(sample)
            rounds += pending.take(idle=False)
        rounds += pending.take_all()
    else:
        rounds = pack(samples, budget_tokens=BUDGET_TOKENS, layout=layout, ranks=RANKS)
    return sum(max(map(layout.cost, batches)) for batches in rounds) / ideal - 1.0


def lengths_of(median: int, *, samples: int, seed: int) -> list[int]:
    """Return lengths in the order in which samples come."""
    rng = random.Random(seed)
    return [min(LONGEST, max(64, int(rng.lognormvariate(math.log(median), SPREAD)))) for _ in range(samples)]


def simulate() -> None:
    print("| median | samples a step | padded | packed | packed, streamed by groups |\n|---|---|---|---|---|")
    for median in MEDIANS:
        for samples in SAMPLES:
            drawn = [
                [sample_of(length) for length in lengths_of(median, samples=samples, seed=seed)]
                for seed in range(SEEDS)
            ]
            shares = [
                statistics.fmean(
                    above_ideal(
                        one,
                        layout=Layout(packed=packed, attention_tokens=attention_tokens(EIGHT_B)),
                        streamed=streamed,
                    )
                    for one in drawn
                )
                for packed, streamed in ((False, False), (True, False), (True, True))
            ]
            print(f"| {median:,} | {samples} | " + " | ".join(f"{share:.1%}" for share in shares) + " |", flush=True)


def worker_of(config: Qwen3Config, *, packed: bool, budget_tokens: int) -> RankWorker:
    """A rank alone."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(deepcopy(config)).eval()
    if packed:
        attend_by_document(model)
    answer_logprobs(model)
    job = {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "packing"},
        "spec": {
            "model": {"scratch": {}},
            "task": {
                "dataset": {"jsonl": {"path": "prompts.jsonl"}},
                "groupSize": GROUP,
                "sampling": {"maxTokens": 64},
                "rewards": [{"name": "answer", "exactMatch": {}}],
            },
            "algorithm": {"grpo": {}},
            "pipeline": {"batchGroups": 8, "steps": 1},
            "generators": [{"name": "none", "engine": {"hf": {}}}],
            "trainer": {"microBatchTokens": budget_tokens},
        },
    }
    spec = parse_job(job).spec.model_copy(update={"generators": ()})
    return RankWorker(RankModels(model=model, tokenizer=None, algorithm=create_algorithm(spec)), spec=spec)  # type: ignore[arg-type] # nothing is published


def rates() -> None:
    torch.set_num_threads(1)
    print("| task | padded, tokens/s | packed, tokens/s | ratio |\n|---|---|---|---|")
    for task, (budget_tokens, config, length, count) in TASKS.items():
        rng = random.Random(0)
        samples = [sample_of(length(rng)) for _ in range(count)]
        tokens = sum(sample.inputs for sample in samples)
        workers = [worker_of(config, packed=packed, budget_tokens=budget_tokens) for packed in (False, True)]
        times: list[list[float]] = [[], []]
        for _ in range(TURNS):
            for worker, taken in zip(workers, times, strict=True):
                rounds = pack(samples, budget_tokens=budget_tokens, layout=worker.layout(None))
                began_s = time.process_time()
                for (batch,) in rounds:
                    worker.accumulate(batch)
                taken.append(time.process_time() - began_s)
                worker.begin(None)
        padded, packed = (tokens / min(taken) for taken in times)
        ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
        print(f"| {task} | {padded:,.0f} | {packed:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    rates() if sys.argv[1:] == ["rates"] else simulate()
