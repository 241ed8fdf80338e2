"""Low-rank adapters by peft, inside the model as it is (arXiv 2106.09685): W x + (alpha / rank) B A x.

Owns: what of adapters is published, the adapters' own files. Does not own: where they go (`models/lora.py`), training them, merging
(`models/published.py`).

Functions that make full tensors are collectives.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import save_file
from transformers import PreTrainedModel

from streamrl_workers.models.published import LORA_A, LORA_B, LORA_SCALING
from streamrl_workers.trainer.engines.sharding import full

ADAPTER = "default"
_BASE = ".base_layer."
_ADAPTER_FILE = "adapter_model.safetensors"


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The initial model of a divergence: the policy without its adapters. No second copy.

    Not by `enable_adapters`: that also takes the adapters' gradients away, which FSDP would remember.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer._disable_adapters = True  # the flag behind the property that every forward reads
    try:
        yield model
    finally:
        for layer in layers:
            layer._disable_adapters = False


def base_name(name: str) -> str | None:
    """A tensor's name in the base model; None: it belongs to an adapter."""
    return None if ".lora_" in name else name.replace(_BASE, ".")


def adapters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the tensors of every adapter: the name that it is published by, the tensor as it is sharded, what is published of it on `meta`."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            swapped = layer.fan_in_fan_out  # its weight lies transposed
            factors = (layer.lora_B, layer.lora_A) if swapped else (layer.lora_A, layer.lora_B)
            for suffix, factor in zip((LORA_A, LORA_B), factors, strict=True):
                tensor = factor[ADAPTER].get_parameter("weight")
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                yield f"{name}.weight{suffix}", tensor, whole.T if swapped else whole
            scaling = torch.tensor(layer.scaling[ADAPTER], dtype=torch.float32)
            yield f"{name}.weight{LORA_SCALING}", scaling, torch.empty((), device="meta")


def save_adapters(model: torch.nn.Module, directory: Path, *, writes: bool) -> None:
    """The adapters as `PeftModel.from_pretrained` loads them; a collective, of which one rank `writes`."""
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": full(tensor).detach().cpu().contiguous()
        for name, tensor in model.named_parameters()
        if base_name(name) is None
    }
    if writes:
        directory.mkdir(exist_ok=True)
        configs: Any = model.peft_config
        config = copy.copy(configs[ADAPTER])
        config.inference_mode = True
        config.save_pretrained(str(directory))
        save_file(tensors, directory / _ADAPTER_FILE, metadata={"format": "pt"})
