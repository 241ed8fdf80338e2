"""Where the adapters of a job go, by peft: trainer and generators ask here, so both name the same layers.

Owns: adding adapters to a model, and the refusal of targets that cannot be honoured. Does not own: training and publishing them
(`trainer/engines/lora.py`), the formula (`published.py`).
"""

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from streamrl.errors import UserError
from streamrl.spec.training import Lora
from streamrl_workers.models.load import load_structure

_FIELD = "spec.trainer.lora.targetModules"


def add_adapters(model: PreTrainedModel, spec: Lora) -> None:
    """Put adapters into the model; only they are trained from now on.

    Raises:
        UserError: a target names no layer of the model, or one that takes no adapter.
    """
    _check_targets(model, spec)
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


def adapted_layers(model_path: str, spec: Lora) -> list[str]:
    """Return the names of the layers that get adapters. Raises UserError as `add_adapters`."""
    with torch.device("meta"):
        model = load_structure(model_path)
    add_adapters(model, spec)
    return [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]


def _check_targets(model: PreTrainedModel, spec: Lora) -> None:
    """Refuse each target that matches no linear layer: peft passes over one that stands beside others that match."""
    modules = dict(model.named_modules())
    for target in spec.target_modules:
        found = [module for name, module in modules.items() if f".{name}".endswith(f".{target}")]
        if not found:
            raise UserError(field=_FIELD, rule="must name layers of the model", got=target, fix=_fix(modules))
        if not all(isinstance(module, torch.nn.Linear | Conv1D) for module in found):
            raise UserError(field=_FIELD, rule="must name linear layers", got=target, fix=_fix(modules))


def _fix(modules: dict[str, torch.nn.Module]) -> str:
    linear = {
        name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, torch.nn.Linear | Conv1D)
    }
    return f"take some of {', '.join(sorted(linear))}"


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
