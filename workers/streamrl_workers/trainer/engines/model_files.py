"""The state of a rank's model as files and as published bytes.

Owns: what belongs to the state (trained tensors, optimiser, random state), what is published of a model, the export.
Does not own: the form of its files (`shard_files.py`), when, where, atomicity (`checkpoint.py`).

Every function is called on every rank. `tensors` and `export` are collectives; only rank 0 has something of them.
Only what is trained is in the state: the weights below adapters, or before a side path, come from the initial model again.
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from streamrl.errors import UserError
from streamrl.spec.training import NumberFormat
from streamrl_workers.models.checkpoint_layout import CheckpointLayout
from streamrl_workers.models.load import structure_of
from streamrl_workers.models.published import Parameters, as_bytes, as_tensor, merged
from streamrl_workers.models.side_path import save_with_side_path, side_path_of
from streamrl_workers.trainer.engines.engine import FileHash
from streamrl_workers.trainer.engines.optimiser import Optimiser, written_by
from streamrl_workers.trainer.engines.shard_files import ShardWriter, read_shards, tensor_names
from streamrl_workers.trainer.engines.sharding import published_dtype, rank_of
from streamrl_workers.trainer.engines.slices import PublishedView, copy_slices
from streamrl_workers.weights.hashing import TensorBytes

_RANDOM = "random"
_ADAPTER_FOLDER = "adapter"


def stage(
    path: Path, *, model: torch.nn.Module, optimiser: Optimiser, writer: ShardWriter, room_bytes: int
) -> Callable[[], FileHash]:
    """Copy this rank's part of the state, as `writer` does; the result writes it into the file `path`."""
    tensors, _ = _state(model, optimiser)
    own = {_RANDOM: torch.get_rng_state()}
    return writer.stage(path, tensors, own=own, room_bytes=room_bytes)


def load(directory: Path, *, model: torch.nn.Module, optimiser: Optimiser) -> None:
    """Read it back, bit for bit, whatever number of ranks wrote it."""
    tensors, moments = _state(model, optimiser)
    try:
        _check_optimizer(tensor_names(directory), optimiser=optimiser, directory=directory)
        own = read_shards(directory, tensors, rank=rank_of())
    except UserError:
        raise
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            field=str(directory), rule=f"does not fit this model: {error}", fix="resume with the job that wrote it"
        ) from error
    optimiser.restore({parameter: moments[name] for name, parameter in _trained(model)})
    if _RANDOM in own:
        torch.set_rng_state(own[_RANDOM])


def _check_optimizer(names: Iterable[str], *, optimiser: Optimiser, directory: Path) -> None:
    """Refuse the state of another optimizer. `names`: of the tensors of the checkpoint."""
    if (written := written_by(names)) != optimiser.name:
        raise UserError(
            field="spec.trainer.optimizer",
            rule=f"must be {written}, whose state is in the checkpoint {directory}",
            got=optimiser.name,
            fix=f"set {written}, or begin a new run with the trained weights alone (weightsFrom)",
        )


def published_views(
    model: PreTrainedModel,
    *,
    trained: bool | None = None,
    layout: CheckpointLayout | None = None,
    precision: NumberFormat = "FP32",
) -> Iterator[PublishedView]:
    """Yield what is published of the model, as a checkpoint has it: of names that share one storage the first, adapters as `models/published.py` names them.

    `trained`: what changes, which with adapters is these alone; False: what does not; None: both. `layout`: of the model's configuration.
    """
    layout = layout or CheckpointLayout(model.config)
    adapted = has_adapters(model)
    if not (adapted and trained):
        for own, tensor in _plain_tensors(model, trained=False if adapted else trained):
            dtype = published_dtype(precision) if tensor.is_floating_point() else tensor.dtype
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, view in layout.parts(own, whole):
                yield PublishedView(name, tensor, view, dtype)
    if adapted and trained is not False:
        for own, tensor, view in _lora().adapters(model):
            name, colon, part = own.partition(":")
            yield PublishedView(layout.name_of(name) + colon + part, tensor, view, torch.float32)


def tensors(
    model: PreTrainedModel,
    *,
    trained: bool | None = None,
    layout: CheckpointLayout | None = None,
    precision: NumberFormat = "FP32",
) -> dict[str, TensorBytes]:
    """Copy what is published, whole, on rank 0; arguments as of `published_views`."""
    views = published_views(model, trained=trained, layout=layout, precision=precision)
    copies = copy_slices(views, gather=True)
    return {one.name: TensorBytes(one.dtype, one.shape, one.data) for one in copies}


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether only adapters are trained."""
    return hasattr(model, "peft_config")  # peft's mark


def export(
    directory: Path,
    *,
    model: PreTrainedModel,
    published: Mapping[str, TensorBytes],
    tokenizer: PreTrainedTokenizerBase,
    precision: NumberFormat = "FP32",
) -> None:
    """The model as `from_pretrained` loads it: what generators make of the `published` tensors; adapters also beside it.

    With adapters merged it is float32 throughout: in bfloat16 their small updates would be lost.
    """
    writes = rank_of() == 0
    dtype = torch.float32 if has_adapters(model) else published_dtype(precision)
    try:
        if has_adapters(model):
            _lora().save_adapters(model, directory / _ADAPTER_FOLDER, writes=writes)
        if writes:
            plain = _plain(model, merged(published), dtype=dtype)
            if side_path_of(plain.config) is None:
                plain.save_pretrained(directory)
            else:
                save_with_side_path(plain, directory)
            if (
                model.generation_config is not None
            ):  # as it was: `save_pretrained` refuses settings that many models have
                model.generation_config.to_json_file(directory / GENERATION_CONFIG_NAME)
            tokenizer.save_pretrained(directory)
    except SafetensorError as error:  # how a full disk shows
        raise OSError(errno.EIO, str(error)) from error


def _plain_tensors(model: torch.nn.Module, *, trained: bool | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the base model, sharded as it is."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or trained not in {None, tensor.requires_grad}:
            continue
        seen.add(id(tensor))
        plain = _lora().base_name(name) if has_adapters(model) else name
        if plain is not None:
            yield plain, tensor


def _lora() -> ModuleType:
    """Where there are adapters peft is loaded; elsewhere its seconds are saved."""
    from streamrl_workers.trainer.engines import lora

    return lora


def _plain(model: PreTrainedModel, whole: Mapping[str, TensorBytes], *, dtype: torch.dtype) -> PreTrainedModel:
    """The same model, neither sharded nor adapted."""
    plain = structure_of(model.config, dtype=dtype)
    Parameters(plain).load({name: as_bytes(as_tensor(tensor).to(dtype)) for name, tensor in whole.items()})
    return plain


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _state(
    model: torch.nn.Module, optimiser: Optimiser
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Everything by name, to be saved or loaded into; and the optimiser's part of it by parameter."""
    moments = {name: optimiser.moments(parameter) for name, parameter in _trained(model)}
    named = model.named_parameters()
    lasting = ((name, one) for name, one in named if one.requires_grad or name.startswith("target."))  # a critic's copy
    state: dict[str, Any] = {f"model.{name}": parameter for name, parameter in lasting}
    state |= {f"model.{name}": buffer for name, buffer in _buffers(model)}
    for name, parts in moments.items():
        state |= {f"optimiser.{name}.{key}": part for key, part in parts.items()}
    return state, moments


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that belong to the model, not those that it can compute."""
    lasting = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in lasting)
