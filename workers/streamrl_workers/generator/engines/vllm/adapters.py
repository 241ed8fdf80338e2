"""Adapters beside the base in vLLM: one, of whose values an update makes others.

Owns: the folder that vLLM loads them from, how requests name them, which of vLLM's layers take them. Does not own: when (`async_engine.py`),
vLLM's computation of them.

Every request runs through the one adapter, which has one number and one name for ever, so what runs goes on with the new values.
Keys and values of the old ones are forgotten with each update, cached prefixes too: vLLM tells them apart by the adapter's name and path.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from streamrl_workers.models.published import Adapter

_NAME, _NUMBER = "published", 1
REQUEST = LoRARequest(_NAME, _NUMBER, "/nowhere")
"""The adapter as requests name it. Nothing is read from that path: without the adapter vLLM fails, and does not generate without it."""


def load_request(folder: Path) -> LoRARequest:
    """Return the request of the adapter that lies in a folder."""
    return LoRARequest(_NAME, _NUMBER, str(folder))


def write_adapters(folder: Path, adapters: Mapping[str, Adapter]) -> int:
    """Write them as vLLM loads them, by the names of the tensors that they adapt; returns their bytes."""
    tensors = {}
    for name, adapter in adapters.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = adapter.lora_a.contiguous()
        tensors[f"{layer}.lora_B.weight"] = adapter.lora_b.contiguous() * adapter.scaling  # before vLLM rounds it
    rank = next(iter(adapters.values())).lora_a.shape[0]
    config = {"r": rank, "lora_alpha": rank, "target_modules": sorted(adapters), "bias": "none", "peft_type": "LORA"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def check_adapted(model: torch.nn.Module, layers: Iterable[str]) -> None:
    """Raise ValueError in vLLM's worker, naming layers that would stay without their adapters."""
    manager: Any = model.lora_manager
    parts = manager.packed_modules_mapping
    kinds = {part for kind in manager.supported_lora_modules for part in parts.get(kind, [kind])}  # that vLLM loads
    fused = {part for one in manager.packed_modules.values() for part in one}
    places = (manager.modules.keys() - manager.packed_modules.keys()) | fused  # that it computes
    names = {layer: _name(model, layer) for layer in layers}
    if unknown := [
        layer for layer, name in names.items() if name not in places or name.rpartition(".")[2] not in kinds
    ]:
        raise ValueError(f"spec.trainer.lora: it cannot adapt {', '.join(unknown[:3])} ({len(unknown)} layers in all)")


def _name(model: torch.nn.Module, layer: str) -> str:
    """Return the name that vLLM has for the layer, or for the part of a fused one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    name: str = parse_fine_tuned_lora_name(f"base_model.model.{layer}.lora_A.weight", renames)[0]
    return name
