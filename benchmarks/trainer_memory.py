"""Peak memory of the trainer's pass over one sequence, by tokens: whole logits against logits by chunks (docs/benchmarks/engines.md).

A model of one narrow layer with the vocabulary of Qwen2.5, float32 on a processor: what is measured is the head. Each setting has a
process of its own; its peak is the resident memory above that of the loaded model, with a gradient for each weight.

    python benchmarks/trainer_memory.py [THREADS]
    python benchmarks/trainer_memory.py tuning    # all weights, adapters and a side path on 24 layers, with a small vocabulary
"""

import resource
import subprocess
import sys
import time
from array import array

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamrl.spec.training import Lora, Sherl
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.models.lora import add_adapters
from streamrl_workers.models.side_path import train_side_path
from streamrl_workers.trainer.engines.forward import Forward, MicroBatch, make_batch
from streamrl_workers.trainer.engines.packing import PackedSample
from streamrl_workers.trainer.engines.sharding import recompute_blocks

VOCABULARY = 151_936
SETTINGS = (("whole", 1024), ("whole", 2048), ("whole", 4096), ("chunks", 2048), ("chunks", 4096), ("chunks", 16_384))
MIB = 2**20
TUNED_TOKENS, TUNED_VOCABULARY = 1024, 1000
TUNINGS = ("all weights", "lora, rank 16", "sherl, lateLayers 2, width 64")
RECOMPUTED = ", activationCheckpointing"


def head_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ).eval()


def tuned_model(tuning: str) -> Qwen2ForCausalLM:
    """Of 24 layers and 25M parameters."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=TUNED_VOCABULARY,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=24,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval()
    if tuning.startswith("lora"):
        add_adapters(model, Lora())
    if tuning.startswith("sherl"):
        train_side_path(model, Sherl())
    if tuning.endswith(RECOMPUTED):
        recompute_blocks(model)
    return model


def batch_of(tokens: int, *, vocabulary: int = VOCABULARY) -> MicroBatch:
    sample = PackedSample(
        group_id=0,
        index=0,
        tokens=array("i", [(7919 * place) % vocabulary for place in range(tokens + 1)]),
        places_N=array("i", range(1, tokens + 1)),
        behaviour_N=array("f", [0.0] * tokens),
        advantages_N=array("d", [1.0] * tokens),
    )
    return make_batch([sample], aggregation="TokenMean", device=torch.device("cpu"))


def whole_logits(model: Qwen2ForCausalLM, batch: MicroBatch) -> None:
    """As plainly as it can be done, entropies by parts."""
    logits_NV = model(input_ids=batch.inputs_BL, use_cache=False).logits.flatten(0, 1).index_select(0, batch.rows_N)
    normaliser_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(1, batch.targets_N.unsqueeze(1)).squeeze(1) - normaliser_N
    with torch.no_grad():
        for part in torch.split(logits_NV, 110):
            (torch.softmax(part, -1) * part).sum(-1)
    logprobs_N.sum().backward()


def by_chunks(model: Qwen2ForCausalLM, batch: MicroBatch) -> None:
    """The trainer's way."""
    answer_logprobs(model)
    logprobs_N, _ = Forward(model, temperature=1.0).logprobs_entropy(batch)
    logprobs_N.sum().backward()


def measure_tuning(tuning: str) -> None:
    """In a process of its own: trained weights, MiB of a pass, seconds of a processor."""
    torch.set_num_threads(1)
    model, batch = tuned_model(tuning), batch_of(TUNED_TOKENS, vocabulary=TUNED_VOCABULARY)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter).fill_(0.0)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    by_chunks(model, batch)
    took_s = time.process_time() - began_s
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = sum(parameter.numel() for parameter in trained)
    print(f"| {tuning} | {weights:,} | {(peak_kib - before_kib) * 1024 / MIB:,.0f} | {took_s:.1f} |", flush=True)


def compare_tunings() -> None:
    print("| tuning | trained weights | MiB | processor seconds |\n|---|---|---|---|", flush=True)
    for tuning in (*TUNINGS, *(tuning + RECOMPUTED for tuning in TUNINGS)):
        subprocess.run([sys.executable, __file__, "tuning", tuning], check=True)


def measure(way: str, tokens: int, threads: int) -> None:
    """In a process of its own: MiB and seconds."""
    torch.set_num_threads(threads)
    model, batch = head_model(), batch_of(tokens)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter).fill_(0.0)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.monotonic()
    (whole_logits if way == "whole" else by_chunks)(model, batch)
    took_s = time.monotonic() - began_s
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"| {way} | {tokens:,} | {(peak_kib - before_kib) * 1024 / MIB:,.0f} | {took_s:.1f} |", flush=True)


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print("| logits | tokens | MiB | seconds |\n|---|---|---|---|", flush=True)
    for way, tokens in SETTINGS:
        subprocess.run([sys.executable, __file__, way, str(tokens), str(threads)], check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["tuning"]:
        compare_tunings()
    elif sys.argv[1:2] == ["tuning"]:
        measure_tuning(sys.argv[2])
    elif len(sys.argv) == 4:
        measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
