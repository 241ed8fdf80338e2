"""The engine's weights as named raw bytes.

Owns: checking published tensors, copying them into the model. Does not own: fetching, hashing, versions. Names are
those of `state_dict()`. Where two names share one storage (tied embeddings), either or both may be published.
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from streamrl_workers.models.published import as_bytes, as_tensor
from streamrl_workers.weights.hashing import TensorBytes


class Parameters:
    """A model's tensors by name."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors: dict[str, torch.Tensor] = {name: t.detach() for name, t in model.state_dict().items()}

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, TensorBytes]) -> None:
        """Check all, then copy all."""
        self._check_names(tensors)
        for name, published in tensors.items():
            self._check(name, published)
        for name, published in tensors.items():
            self._tensors[name].copy_(as_tensor(published))

    def snapshot(self) -> dict[str, TensorBytes]:
        """A copy of the bytes now in the model, under all names."""
        return {name: as_bytes(tensor.clone()) for name, tensor in self._tensors.items()}

    def _check_names(self, tensors: Mapping[str, TensorBytes]) -> None:
        unknown = sorted(tensors.keys() - self._tensors.keys())
        if unknown:
            raise ValueError(f"weights name tensors that the model does not have: {_few(unknown)}")
        covered = {self._tensors[name].data_ptr() for name in tensors}
        missing = sorted(name for name, tensor in self._tensors.items() if tensor.data_ptr() not in covered)
        if missing:
            raise ValueError(f"weights lack tensors of the model: {_few(missing)}")

    def _check(self, name: str, published: TensorBytes) -> None:
        target = self._tensors[name]
        dtype, shape = _dtype_name(target), tuple(target.shape)
        if (published.dtype, published.shape) != (dtype, shape):
            raise ValueError(
                f"tensor {name} is {published.dtype} {list(published.shape)}, the model has {dtype} {list(shape)}"
            )
        if published.data.nbytes != target.nbytes:
            raise ValueError(f"tensor {name} has {published.data.nbytes} bytes, its shape needs {target.nbytes}")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")  # noqa: PLR2004 - that many are readable
