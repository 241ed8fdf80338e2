"""Names and shapes of a model's tensors in a checkpoint, as `save_pretrained` writes them.

transformers keeps some of a checkpoint's tensors under other names, or many in one (the experts of a layer). Weights are published as
a checkpoint has them, since that is what other engines load. Owns: which part of which tensor of the model a checkpoint's tensor is.
Does not own: formats, bytes (`published.py`).

Invariant: each tensor of the checkpoint is a view into one tensor of the model, so the same layout reads a model and writes one.
A model of which that is not true is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from streamrl.errors import UserError
from streamrl_workers.models.load import structure_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorView:
    name: str  # in the checkpoint
    whole: bool  # it is the tensor itself
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements from the tensor's first

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of this part."""
        if self.whole:
            return tensor
        assert tensor.is_contiguous()
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class CheckpointLayout:
    """Where the tensors of a checkpoint lie in those of the model, by the names of its `state_dict()`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        """Raises UserError for a model whose checkpoint has tensors that are no views."""
        with torch.device("meta"):
            model = structure_of(config)
        state = {name: torch.empty(t.shape, device="meta") for name, t in model.state_dict().items()}
        with _WithoutCopies(), torch.no_grad():
            saved = revert_weight_conversion(model, dict(state))
        names = {id(tensor): name for name, tensor in state.items()}
        self._parts: dict[str, list[_TensorView]] = {name: [] for name in state}
        for name, tensor in saved.items():
            own = names.get(id(tensor)) or names.get(id(tensor._base))
            if own is None:
                raise UserError(
                    field="spec.model",
                    rule=f"must be saved in parts of its own tensors; {config.model_type} is not: {name}",
                    fix="take another model",
                )
            part = _TensorView(
                name=name,
                whole=tensor is state[own],
                shape=tensor.shape,
                stride=tensor.stride(),
                offset=int(tensor.storage_offset()),
            )
            self._parts[own].append(part)

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors of one tensor of the model, as views into it."""
        return ((part.name, part.of(tensor)) for part in self._parts[name])

    def name_of(self, name: str) -> str:
        """Return the name of a tensor that the checkpoint has whole. Raises UserError where it has parts of it."""
        first, *others = self._parts[name]
        if others:
            raise UserError(
                field="spec.trainer.lora.targetModules",
                rule=f"must not name {name}, which a checkpoint has in {len(others) + 1} parts",
                fix="name other layers",
            )
        return first.name


class _WithoutCopies(TorchFunctionMode):
    """Leaves out the copies that transformers makes before it writes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        del types
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
