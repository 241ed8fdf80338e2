"""Weights of the engine `hf` that come with adapters: the base in the model, the adapters beside it.

Owns: the low-rank term of each adapted layer, and whether the base must be loaded. Does not own: the formula and the names
(`models/published.py`), when weights come (`engine.py`).

    y = W_base x + scaling B (A x)      the second term and the sum in float32, rounded once to the layer's format

The trainer adds the same term to its activations (peft). Merged into a base in bfloat16 it would be lost where it is small.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from streamrl_workers.models.published import Adapter, Parameters, is_loaded, split
from streamrl_workers.weights.hashing import TensorBytes


class AdaptedParameters:
    """A model's tensors, and the adapters of its linear layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """The model gets a hook on each layer that is adapted."""
        self._model = model
        self._parameters = Parameters(model)
        self._hooks: list[RemovableHandle] = []
        self._base: Mapping[str, TensorBytes] = {}
        """In the model, if it came with adapters: the pull holds its buffers too."""

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, TensorBytes]) -> None:
        """Check all, then load all; the base once. Raises ValueError where they are not the model's."""
        base, adapters = split(tensors)
        terms = [self._term(name, adapter) for name, adapter in adapters.items()]
        if not (adapters and is_loaded(base, loaded=self._base)):
            self._parameters.load(base)
        self._base = base if adapters else {}
        for hook in self._hooks:
            hook.remove()
        self._hooks = [layer.register_forward_hook(term) for layer, term in terms]

    def _term(self, name: str, adapter: Adapter) -> tuple[torch.nn.Module, "_LowRankTerm"]:
        layers = dict(self._model.named_modules())
        layer = layers.get(name.removesuffix(".weight"))
        if not isinstance(layer, torch.nn.Linear | Conv1D):
            raise ValueError(f"engine hf adapts linear layers, and {name} is of none")  # noqa: TRY004 - of the weights
        down, up = adapter.lora_a, adapter.lora_b
        if isinstance(layer, Conv1D):  # its weight lies transposed
            down, up = up.T, down.T
        device = layer.weight.device
        return layer, _LowRankTerm(down.to(device, copy=True), (up * adapter.scaling).to(device))


class _LowRankTerm:
    """Hook behind a linear layer. An object, since a copy of the model copies it."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        self._down, self._up = down, up

    def __call__(self, _: torch.nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return (output.float() + linear(linear(given[0].float(), self._down), self._up)).to(output.dtype)
