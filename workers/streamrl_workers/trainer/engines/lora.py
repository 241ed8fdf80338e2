"""Low-rank adapters by peft, inside the model as it is (arXiv 2106.09685): W x + (alpha / rank) B A x.

Owns: where adapters go, what of them is published, the adapters' own files. Does not own: training them, merging (`models/published.py`).

Functions that make full tensors are collectives.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import save_file
from transformers import PreTrainedModel

from streamrl.errors import UserError
from streamrl.spec.training import Lora
from streamrl_workers.models.published import LORA_A, LORA_B, LORA_SCALING
from streamrl_workers.trainer.engines.sharding import full

ADAPTER = "default"
_BASE = ".base_layer."
_FIELD = "spec.trainer.lora.targetModules"
_ADAPTER_FILE = "adapter_model.safetensors"


def add_adapters(model: PreTrainedModel, spec: Lora) -> None:
    """Put adapters into the model; only they are trained from now on."""
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type] # any number, though peft says int
        lora_dropout=0.0,
        target_modules=list(spec.target_modules) or "all-linear",
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        get_peft_model(model, config, autocast_adapter_dtype=False)  # in place
    except ValueError as error:
        raise UserError(
            field=_FIELD, rule=f"cannot be honoured: {str(error).splitlines()[0]}", got=list(spec.target_modules)
        ) from error
    _check(model)


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


def adapters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every adapter in full, under the names that it is published by: on every rank."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            lora_a, lora_b = (
                full(part[ADAPTER].get_parameter("weight")).detach() for part in (layer.lora_A, layer.lora_B)
            )
            if layer.fan_in_fan_out:  # its weight lies transposed
                lora_a, lora_b = lora_b.T, lora_a.T
            yield f"{name}.weight{LORA_A}", lora_a
            yield f"{name}.weight{LORA_B}", lora_b
            yield f"{name}.weight{LORA_SCALING}", torch.tensor(layer.scaling[ADAPTER], dtype=torch.float32)


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


def _check(model: PreTrainedModel) -> None:
    """Refuse what cannot be merged into one tensor of the base model."""
    names = {id(p): 0 for p in model.parameters()}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] += 1
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        if not isinstance(module, LoraLinear):
            raise UserError(field=_FIELD, rule="must name linear layers", got=name)
        if names[id(module.base_layer.weight)] > 1:
            raise UserError(field=_FIELD, rule="must not name a layer with tied weights", got=name)
