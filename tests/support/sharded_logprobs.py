"""One of two ranks that form log-probs by chunks with a sharded model: `python -m support.sharded_logprobs RANK FOLDER`.

Rank 0 writes the gradients of all ranks' tokens into FOLDER, a file for each architecture.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from streamrl import memory
from streamrl_workers.models.documents import attend_by_document
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.trainer.engines import sharding
from streamrl_workers.trainer.engines.forward import Forward, MicroBatch, make_batch
from streamrl_workers.trainer.engines.packing import DUMMY, PackedSample, pack_sample
from support.trainer_groups import make_group

SIZES = {
    "vocab_size": 37,  # no number of ranks divides it
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
CHUNK_TOKENS = 5
TEMPERATURE = 0.7


def models() -> dict[str, PreTrainedModel]:
    """The same on every rank and in the test."""
    torch.manual_seed(1)
    found: dict[str, PreTrainedModel] = {
        "tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).eval(),
        "untied": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)).eval(),
    }
    for model in found.values():
        attend_by_document(model)
    return found


def shares() -> list[tuple[list[PackedSample], list[PackedSample]]]:
    """Two passes, the samples of each rank: unequal numbers of chunks, then none on one rank."""
    first, second = (
        [one for sample in make_group(number).samples for one in pack_sample(sample, step=0, attempt=1, advantage=1.0)]
        for number in (1, 2)
    )
    return [(first[:1], first[1:]), (second, [DUMMY])]


def batch_of(samples: list[PackedSample], *, packed: bool = True) -> MicroBatch:
    """Tensors of a pass."""
    return make_batch(samples, aggregation="TokenMean", device=torch.device("cpu"), packed=packed)


def loss_of(logprobs_N: torch.Tensor) -> torch.Tensor:
    """Every token has a weight of its own."""
    return (logprobs_N * torch.linspace(-1.0, 2.0, len(logprobs_N))).sum()


@torch.no_grad()
def _forget(module: torch.nn.Module) -> None:
    """Weights come from rank 0."""
    for parameter in module.parameters(recurse=False):
        parameter.fill_(torch.nan)


def main(rank: int, folder: Path) -> None:
    """Both models, one after the other."""
    torch.set_num_threads(1)
    memory.CHUNK_LOGITS = CHUNK_TOKENS * SIZES["vocab_size"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, model in models().items():
        answer_logprobs(model)
        if rank > 0:
            model.apply(_forget)
        sharding.shard_first(model, mesh=mesh, compute=None, offload=False)
        for share in shares():
            batch = batch_of(share[rank])
            with torch.no_grad():  # as a reference's: what it leaves must not change what follows
                expected_N = Forward(model, temperature=TEMPERATURE).logprobs(batch)
            logprobs_N = Forward(model, temperature=TEMPERATURE).logprobs(batch)
            assert torch.equal(logprobs_N, expected_N)
            loss_of(logprobs_N).backward()
        gradients = {key: sharding.full(p.grad) for key, p in model.named_parameters() if p.grad is not None}
        if rank == 0:
            torch.save(gradients, folder / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
