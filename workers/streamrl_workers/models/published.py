"""Published weights as torch sees them: bytes to tensors and back, adapters on top of the base.

Owns: the names of adapters' tensors, the formula that merges them. Does not own: training adapters, moving bytes, engines.
Trainer and generators merge by this code alone, so what is exported and what generates are the same weights.

A trainer of adapters publishes the base, always the same bytes, and for each adapted tensor `NAME` three more:

    NAME:lora_A [r, in]    NAME:lora_B [out, r]    NAME:lora_scaling []        all float32

    W = W_base + scaling B A       in float32, rounded once to the base's format
"""

import math
from collections.abc import Mapping

import torch

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


@torch.inference_mode()
def merged(tensors: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """The model's tensors, adapters merged in; without adapters they are what was given.

    Raises:
        ValueError: an adapter is not complete, of another shape than its tensor, or has a part that is not known here.
    """
    whole = {name: tensor for name, tensor in tensors.items() if ":" not in name}
    adapted = {name.partition(":")[0] for name in tensors.keys() - whole.keys()}
    parts = {name + part for name in adapted for part in ("", *_PARTS)}
    if wrong := sorted(parts ^ {name for name in tensors if name.partition(":")[0] in adapted}):
        raise ValueError(f"tensor {wrong[0]} of an adapter is {'missing' if wrong[0] in parts else 'unknown'}")
    for name in adapted:
        base, lora_a, lora_b, scaling = (as_tensor(tensors[name + part]) for part in ("", *_PARTS))
        rank = lora_a.shape[:1]
        shapes = (base.shape[:1] + rank, rank + base.shape[1:], ())
        if base.ndim != 2 or (lora_b.shape, lora_a.shape, scaling.shape) != shapes:  # noqa: PLR2004 - matrices
            got = f"{list(lora_b.shape)} times {list(lora_a.shape)}"
            raise ValueError(f"the adapter of {name} is {got}, the tensor {list(base.shape)}")
        added = torch.addmm(base.float(), lora_b.float(), lora_a.float(), alpha=scaling.item())
        whole[name] = as_bytes(added.to(base.dtype))
    return whole
