"""The state of a rank's model as files and as published bytes.

Owns: what belongs to the state (trained tensors, optimiser, random state), the snapshot of the weights, the export. Does not own:
the layout of files (`shard_files.py`), when, where, atomicity (`checkpoint.py`).

Every function is called on every rank. `tensors` and `export` are collectives; only rank 0 has something of them.
With adapters only these are in the state: the weights below them come from the initial model again.
"""

import errno
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from streamrl.errors import UserError
from streamrl_workers.trainer.engines import shard_files
from streamrl_workers.trainer.engines.precision import Precision, published_dtype
from streamrl_workers.trainer.engines.sharding import full, rank_of
from streamrl_workers.weights.hashing import TensorBytes

_RANDOM = "random"
_ADAPTER_FOLDER = "adapter"


def save(directory: Path, *, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Write this rank's part of the state into `directory`. Raises OSError where the disk does not take it."""
    tensors, _ = _state(model, optimiser)
    shard_files.write(directory, tensors, own={_RANDOM: torch.get_rng_state()}, rank=rank_of())


def load(directory: Path, *, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Read it back, bit for bit, whatever number of ranks wrote it."""
    tensors, moments = _state(model, optimiser)
    try:
        own = shard_files.read(directory, tensors, rank=rank_of())
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            field=str(directory), rule=f"does not fit this model: {error}", fix="resume with the job that wrote it"
        ) from error
    for name, parameter in _trained(model):
        optimiser.state[parameter] = moments[name]
    if _RANDOM in own:
        torch.set_rng_state(own[_RANDOM])


def tensors(model: torch.nn.Module, *, precision: Precision = "FP32") -> dict[str, TensorBytes]:
    """A copy of every tensor of the model by name; of names that share one storage, the first. Adapters are merged in."""
    dtype = published_dtype(precision)
    writes = rank_of() == 0
    return {name: _bytes_of(_in(tensor, dtype)) for name, tensor in _merged(model) if writes}


def export(
    directory: Path, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, precision: Precision = "FP32"
) -> None:
    """The model as `from_pretrained` loads it, in the format that generators had; adapters merged in, and beside it."""
    dtype, writes = published_dtype(precision), rank_of() == 0
    whole = {name: _in(tensor, dtype).cpu() for name, tensor in _merged(model) if writes}
    try:
        if _has_adapters(model):
            _lora().save_adapters(model, directory / _ADAPTER_FOLDER, writes=writes)
        if writes:
            _plain(model, whole, dtype=dtype).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
    except SafetensorError as error:  # how a full disk shows
        raise OSError(errno.EIO, str(error)) from error


@torch.no_grad()
def _merged(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the base model in full, one after the other."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if not _has_adapters(model):
            yield name, full(tensor).detach()
        elif (plain := _lora().base_name(name)) is not None:
            yield plain, _lora().merged(model, name=name, tensor=tensor).detach()


def _has_adapters(model: torch.nn.Module) -> bool:
    return hasattr(model, "peft_config")  # peft's mark


def _lora() -> ModuleType:
    """Where there are adapters peft is loaded; elsewhere its seconds are saved."""
    from streamrl_workers.trainer.engines import lora

    return lora


def _plain(model: PreTrainedModel, whole: dict[str, torch.Tensor], *, dtype: torch.dtype) -> PreTrainedModel:
    """The same model, neither sharded nor adapted."""
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=dtype)  # type: ignore[no-untyped-call] # transformers'
    known = plain.state_dict()
    for name, tensor in whole.items():
        known[name].copy_(tensor)
    plain.generation_config = model.generation_config
    return plain


def _in(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _bytes_of(tensor: torch.Tensor) -> TensorBytes:
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorBytes(
        str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), memoryview(flat.numpy().tobytes())
    )


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _state(
    model: torch.nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Everything by name, to be saved or loaded into; and the optimiser's part of it by parameter."""
    moments = {name: _moments(optimiser, parameter) for name, parameter in _trained(model)}
    state: dict[str, Any] = {f"model.{name}": parameter for name, parameter in _trained(model)}
    state |= {f"model.{name}": buffer for name, buffer in _buffers(model)}
    for name, parts in moments.items():
        state |= {f"optimiser.{name}.{key}": part for key, part in parts.items()}
    return state, moments


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that belong to the model, not those that it can compute."""
    lasting = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in lasting)


def _moments(optimiser: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's state of one parameter; zeros before its first step."""
    known: dict[str, torch.Tensor] = optimiser.state.get(parameter) or {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }
    return known
