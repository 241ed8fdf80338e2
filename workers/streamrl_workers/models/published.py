"""Published weights as torch sees them: bytes to tensors and back, adapters on top of the base.

Owns: whether published tensors are those of a model, copying them into it; the names of adapters' tensors, the formula that merges
them. Does not own: training adapters, fetching and hashing bytes, versions.
Trainer and generators read adapters by this code alone, so what is exported and what generates are the same weights.

A trainer of adapters publishes the base, always the same bytes, and for each adapted tensor `NAME` three more:

    NAME:lora_A [r, in]    NAME:lora_B [out, r]    NAME:lora_scaling []        all float32

    W = W_base + scaling B A       in float32, and never rounded below it

A small update is less than the distance of two bfloat16 numbers: rounded to a base of that format it would be lost
(docs/decisions/0078-lora-in-generators.md). So where the base is bfloat16, engines compute the product beside the base.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from streamrl_workers.models.checkpoint_layout import CheckpointLayout
from streamrl_workers.weights.hashing import TensorBytes

LORA_A, LORA_B, LORA_SCALING = ":lora_A", ":lora_B", ":lora_scaling"
_PARTS = (LORA_A, LORA_B, LORA_SCALING)
"""Behind the name of the tensor that is adapted; no model has a colon in a name."""


def as_tensor(published: TensorBytes) -> torch.Tensor:
    """The bytes as a tensor: in the same memory where it may be written to, else in a copy. ValueError if they are none."""
    dtype, size_bytes = getattr(torch, published.dtype, None), published.data.nbytes
    if not isinstance(dtype, torch.dtype) or math.prod(published.shape) * dtype.itemsize != size_bytes:
        raise ValueError(f"{size_bytes} bytes are no tensor of {published.dtype} {list(published.shape)}")
    if not size_bytes:
        return torch.empty(published.shape, dtype=dtype)
    data = bytearray(published.data) if published.data.readonly else published.data  # torch would warn
    return torch.frombuffer(data, dtype=dtype).view(published.shape)


def as_bytes(tensor: torch.Tensor) -> TensorBytes:
    """The tensor's bytes, in its own memory where that is contiguous and the processor's."""
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return TensorBytes(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw.data)


_SHOWN_NAMES = 3


class Parameters:
    """A model's tensors by their names in a checkpoint. Where two names share a tensor (tied embeddings), either or both may be published."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` may be on the device `meta`, if it is only compared with."""
        layout = CheckpointLayout(model.config)
        self.own_names: dict[str, str] = {}
        """Names in the model's `state_dict()`, by those of a checkpoint."""
        self._owners: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}  # views into the owners
        with torch.no_grad():
            for own, tensor in model.state_dict(keep_vars=True).items():
                for name, part in layout.parts(own, tensor):
                    self.own_names[name], self._owners[name], self._tensors[name] = own, tensor, part

    def check(self, tensors: Mapping[str, TensorBytes]) -> None:
        """Raise ValueError unless `tensors` are the whole model."""
        if unknown := tensors.keys() - self._tensors.keys():
            raise ValueError(f"weights name tensors that the model does not have: {_few(unknown)}")
        for name, published in tensors.items():
            target = self._tensors[name]
            dtype, shape = str(target.dtype).removeprefix("torch."), tuple(target.shape)
            if (published.dtype, published.shape) != (dtype, shape):
                raise ValueError(
                    f"tensor {name} is {published.dtype} {list(published.shape)}, the model has {dtype} {list(shape)}"
                )
            if published.data.nbytes != target.nbytes:
                raise ValueError(f"tensor {name} has {published.data.nbytes} bytes, its shape needs {target.nbytes}")
        covered = {self._place(name) for name in tensors}
        if missing := {name for name in self._tensors if self._place(name) not in covered}:
            raise ValueError(f"weights lack tensors of the model: {_few(missing)}")

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, TensorBytes]) -> None:
        """Check all, then copy all."""
        self.check(tensors)
        for name, published in tensors.items():
            self._tensors[name].copy_(as_tensor(published))

    @torch.inference_mode()
    def snapshot(self) -> dict[str, TensorBytes]:
        """Return a copy of the bytes now in the model, as they are published: tied tensors once."""
        first = {self._place(name): name for name in reversed(self._tensors)}
        return {
            name: as_bytes(self._tensors[name].clone()) for name in self._tensors if first[self._place(name)] == name
        }

    def _place(self, name: str) -> tuple[int, int]:
        """Return what two names of a shared tensor have in common."""
        return id(self._owners[name]), int(self._tensors[name].storage_offset())


def _few(names: Collection[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(sorted(names)[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


class Adapter(NamedTuple):
    """The two factors of what is added to a tensor, float32."""

    lora_a: torch.Tensor  # [r, in]
    lora_b: torch.Tensor  # [out, r]
    scaling: torch.Tensor  # []


def adapters_of(parts: Mapping[str, torch.Tensor]) -> dict[str, Adapter]:
    """Return the adapters whose parts these are, by the names of the tensors that they adapt; no part is missing."""
    names = sorted({name.partition(":")[0] for name in parts})
    return {name: Adapter(*(parts[name + part].float() for part in _PARTS)) for name in names}


def split(tensors: Mapping[str, TensorBytes]) -> tuple[dict[str, TensorBytes], dict[str, Adapter]]:
    """Return the base, and the adapters by the names of the tensors that they adapt.

    Raises:
        ValueError: an adapter is not complete, of another shape than its tensor, or has a part that is not known here.
    """
    base = {name: tensor for name, tensor in tensors.items() if ":" not in name}
    adapted = {name.partition(":")[0] for name in tensors.keys() - base.keys()}
    parts = {name + part for name in adapted for part in ("", *_PARTS)}
    if wrong := sorted(parts ^ {name for name in tensors if name.partition(":")[0] in adapted}):
        raise ValueError(f"tensor {wrong[0]} of an adapter is {'missing' if wrong[0] in parts else 'unknown'}")
    adapters = adapters_of({name: as_tensor(tensors[name]) for name in tensors.keys() - base.keys()})
    for name, adapter in adapters.items():
        _check_shapes(name, adapter, shape=torch.Size(base[name].shape))
    return base, adapters


def _check_shapes(name: str, adapter: Adapter, *, shape: torch.Size) -> None:
    lora_a, lora_b, scaling = adapter
    rank = lora_a.shape[:1]
    shapes = (shape[:1] + rank, rank + shape[1:], ())
    if len(shape) != 2 or (lora_b.shape, lora_a.shape, scaling.shape) != shapes:  # noqa: PLR2004 - matrices
        raise ValueError(
            f"the adapter of {name} is {list(lora_b.shape)} times {list(lora_a.shape)}, the tensor {list(shape)}"
        )


def is_loaded(base: Mapping[str, TensorBytes], *, loaded: Mapping[str, TensorBytes]) -> bool:
    """Return whether `base` is in the very buffers that were loaded before: published bytes never change, so it is the same."""
    return base.keys() == loaded.keys() and all(base[name].data is loaded[name].data for name in base)


@torch.inference_mode()
def merged(tensors: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """Return the model's tensors with adapters merged: those become float32. Without adapters they are what was given.

    Raises:
        ValueError: as `split`.
    """
    whole, adapters = split(tensors)
    for name, (lora_a, lora_b, scaling) in adapters.items():
        whole[name] = as_bytes(torch.addmm(as_tensor(whole[name]).float(), lora_b, lora_a, alpha=scaling.item()))
    return whole
