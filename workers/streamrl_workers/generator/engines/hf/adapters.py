"""Weights of the engine `hf` that come with adapters: the base in the model, each adapter in further columns of its layer's weight.

Owns: the products of adapted layers, and whether the base must be loaded. Does not own: the formula and the names
(`models/published.py`), when weights come (`engine.py`).

    y = [W  scaling B] [x  A x]^T  =  W x + scaling B A x

One product sums both terms in float32 and rounds once. A term that is added to a product which is rounded already is lost where it is
less than half the distance of two numbers of the format, as it would be lost in the weights.
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from streamrl_workers.models.published import Adapter, Parameters, is_loaded, split
from streamrl_workers.weights.hashing import TensorBytes

_ALIGNED = 8
"""Columns are added by so many: fast products want it."""


class AdaptedParameters:
    """A model's tensors, and the adapters of its linear layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """The layers of the model that are adapted get other products, in place."""
        self._model = model
        self._parameters = Parameters(model)
        self._layers: dict[str, _AdaptedLayer] = {}
        """Layers by the name of the tensor that is adapted."""
        self._base: Mapping[str, TensorBytes] = {}
        """Base in the model, if it came with adapters: the pull holds its buffers too."""

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, TensorBytes]) -> None:
        """Check all, then load all; the base once. Raises ValueError where they are not the model's."""
        base, adapters = split(tensors)
        self._parameters.check(base)
        found = {name: self._linear(name) for name in adapters.keys() - self._layers.keys()}
        self._layers |= {name: _AdaptedLayer(layer, rank=len(adapters[name].lora_a)) for name, layer in found.items()}
        if not (adapters and is_loaded(base, loaded=self._base)):
            self._parameters.load(base)
        self._base = base if adapters else {}
        for name, layer in self._layers.items():
            layer.adapt(adapters.get(name))

    def _linear(self, name: str) -> torch.nn.Linear | Conv1D:
        own = self._parameters.own_names.get(name, name)
        layer = dict(self._model.named_modules()).get(own.removesuffix(".weight"))
        if not isinstance(layer, torch.nn.Linear | Conv1D):
            raise ValueError(f"engine hf adapts linear layers, and {name} is of none")  # noqa: TRY004 - the weights are wrong
        return layer


class _AdaptedLayer:
    """A linear layer of the model; its weight becomes a part of the joined one, and stays what is loaded into."""

    def __init__(self, layer: torch.nn.Linear | Conv1D, *, rank: int) -> None:
        self._layer = layer
        self._lies_transposed = isinstance(layer, Conv1D)
        weight = self._upright(layer.weight.data)
        outputs, inputs = weight.shape
        added = -(-rank // _ALIGNED) * _ALIGNED
        joined = weight.new_zeros(outputs, inputs + added)
        joined[:, :inputs] = weight
        layer.weight.data = self._upright(joined[:, :inputs])
        layer.register_buffer("joined", joined, persistent=False)  # goes with the layer to a device, or into a copy
        layer.register_buffer("down", weight.new_zeros(added, inputs), persistent=False)
        layer.forward = _JoinedProduct(layer)  # type: ignore[method-assign] # of this layer alone

    def adapt(self, adapter: Adapter | None) -> None:
        """Replace the adapter; None removes it."""
        down, joined = self._layer.get_buffer("down"), self._layer.get_buffer("joined")
        down.zero_()
        joined[:, down.shape[1] :].zero_()
        if adapter is not None:
            lora_a, lora_b, scaling = adapter
            if self._lies_transposed:
                lora_a, lora_b = lora_b.T, lora_a.T
            rank = len(lora_a)
            down[:rank] = lora_a
            joined[:, down.shape[1] : down.shape[1] + rank] = lora_b * scaling

    def _upright(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.T if self._lies_transposed else weight


class _JoinedProduct:
    """Forward of an adapted layer. An object, since a copy of the model copies it: a function would stay with the first one's layer."""

    def __init__(self, layer: torch.nn.Linear | Conv1D) -> None:
        self._layer = layer

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        low = linear(inputs, layer.get_buffer("down"))
        return linear(torch.cat((inputs, low), -1), layer.get_buffer("joined"), layer.bias)
