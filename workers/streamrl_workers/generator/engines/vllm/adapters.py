"""Adapters in vLLM's worker process: one, whose values an update replaces in place.

Owns: which of vLLM's layers they go on, and how they get there. Does not own: when (`weight_engine.py`), the requests that run through
the adapter (`async_engine.py`), vLLM's computation of it.

Every request runs through the one adapter, which has one number and one name for ever: so what runs goes on with the new values. vLLM's
own door reads a folder, and holds what it has read by that number; here the tensors are in the file of the update already. Keys and
values of the old weights are forgotten with each update, cached prefixes too.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from streamrl_workers.models.published import Adapter

REQUEST = LoRARequest("published", 1, "/nowhere")
"""The adapter as requests name it. It is never read from its path: if it were not there, vLLM would fail and not generate without it."""


def check_adapted(model: torch.nn.Module, layers: Iterable[str]) -> None:
    """Raise ValueError naming the layers that vLLM would leave without their adapters."""
    manager: Any = model.lora_manager
    fused = {part for parts in manager.packed_modules.values() for part in parts}
    known = (manager.modules.keys() - manager.packed_modules.keys()) | fused
    if unknown := [layer for layer in layers if _name(model, layer) not in known]:
        raise ValueError(f"it cannot adapt {', '.join(unknown[:3])} of spec.trainer.lora, and {len(unknown)} in all")


@torch.no_grad()
def replace_adapters(model: torch.nn.Module, adapters: Mapping[str, Adapter]) -> None:
    """Give the adapter these values. `adapters`: by the names of the tensors that they adapt."""
    check_adapted(model, map(_layer, adapters))
    manager: Any = model.lora_manager
    weights = [
        _weights(_name(model, _layer(name)), adapter, manager.lora_config.lora_dtype)
        for name, adapter in adapters.items()
    ]
    manager.remove_adapter(REQUEST.lora_int_id)
    manager.add_adapter(LoRAModel(REQUEST.lora_int_id, weights[0].rank, {one.module_name: one for one in weights}))
    manager.activate_adapter(REQUEST.lora_int_id)


def _weights(name: str, adapter: Adapter, dtype: torch.dtype) -> LoRALayerWeights:
    rank = adapter.lora_a.shape[0]
    scaled = adapter.lora_b * adapter.scaling  # before it is rounded
    return LoRALayerWeights(name, rank, rank, adapter.lora_a.to(dtype), scaled.to(dtype), scaling=1)


def _layer(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _name(model: torch.nn.Module, layer: str) -> str:
    """As vLLM calls the layer, or the part of a fused one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    name: str = parse_fine_tuned_lora_name(f"base_model.model.{layer}.lora_A.weight", renames)[0]
    return name
