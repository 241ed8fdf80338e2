"""How much of what adapters change in a trainer reaches a generator: the share.

A trainer of adapters computes in float32 and publishes its base in bfloat16, as one of precision BF16 does; the base lies on the
grid of that format, so both have the same one. The trainer computes in float32 for its own change to be known: passes in bfloat16 round
log-probs by 20 times of what one step at a learning rate of 1e-6 changes.

    share = sum(x y) / sum(x x)      x: the trainer's change of the log-probs of some tokens, y: the generator's of the same tokens
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamrl.spec import RLJobSpec
from streamrl_workers.models.published import as_bytes, as_tensor
from streamrl_workers.weights.hashing import TensorBytes
from support.trainer_groups import trainer_spec
from support.vllm_models import CHARS, tokenizer
from support.weight_updates import PublishingTrainer

LORA = {"rank": 16, "alpha": 32}


def case_folder(folder: Path, **sizes: Any) -> Path:
    """Qwen2 of 4 layers and hidden size 512, its weights on bfloat16's grid."""
    torch.manual_seed(1)
    shape = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(CHARS) + 1, **(shape | sizes)))
    model.bfloat16().float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def bf16_job(learning_rate: float, *, engine: dict[str, Any], lora: dict[str, Any] = LORA) -> RLJobSpec:
    """The job as a generator reads it."""
    return trainer_spec(lora=lora, learningRate=learning_rate, precision="BF16", engine=engine)


class Bf16Trainer(PublishingTrainer):
    """Publishes the base in bfloat16, its adapters in float32."""

    def __init__(self, job: RLJobSpec, *, folder: Path, checkpoints: Path) -> None:
        precise = job.model_copy(update={"trainer": job.trainer.model_copy(update={"precision": "FP32"})})
        super().__init__(precise, folder=folder, checkpoints=checkpoints)
        self._base: dict[str, TensorBytes] = {}

    def tensors(self) -> dict[str, TensorBytes]:
        tensors = super().tensors()
        self._base = self._base or {name: _halved(one) for name, one in tensors.items() if ":" not in name}
        return tensors | self._base


def _halved(tensor: TensorBytes) -> TensorBytes:
    made = as_bytes(as_tensor(tensor).bfloat16())
    return made._replace(data=made.data.toreadonly())


def share(trainer: torch.Tensor, generator: torch.Tensor) -> float:
    """Regression of the generator's changes on the trainer's."""
    x, y = trainer.double(), generator.double()
    return float((x * y).sum() / (x * x).sum())
