"""SHERL's side path (arXiv 2407.07523): the hidden states before the last layers, merged and added where these begin.

Owns: the path's weights and formula, where it lies in a model, which weights are trained beside it, its mark in a configuration and
the file of a model that has one. Does not own: who trains it (`trainer/engines`), who publishes it: its tensors are the model's own.
Legend: k early layers; h_i the input of layer i, h_0 the embeddings; r the width; all of it token by token, so a cache needs nothing.

    F_i = D_i rms(h_i)    g = F_k    a = l1norm_i<k( relu(w . (F_i * g)) / sum_j<k relu(cos(F_i, F_j)) )
    h_k <- h_k + U relu(sum_i<k a_i F_i + g)

U begins as zeros: the model begins as it was. All D_i begin alike, so that alike states are seen to be so. The weights below h_k
take no gradient, so autograd keeps nothing of their layers: of each token the k + 1 normed states, not what happens within a layer.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch.nn.functional import linear, normalize, relu, rms_norm
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from streamrl.errors import UserError
from streamrl.spec.training import Sherl

_FIELD = "spec.trainer.sherl"
_MARK = "streamrl_side_path"
"""Attribute of a configuration."""
_FILE = "side_path_model.safetensors"
"""Not the name that `from_pretrained` looks for: that would leave the path out, and be another model."""
_SMALL = 1e-6


class SidePath(torch.nn.Module):
    """Hooks before the early layers gather; the one before the first late layer adds."""

    def __init__(self, *, early: int, hidden: int, width: int, like: torch.Tensor) -> None:
        super().__init__()
        first = torch.randn(1, width, hidden, dtype=like.dtype, device=like.device) * hidden**-0.5
        self.down = torch.nn.Parameter(first.repeat(early + 1, 1, 1))
        self.attention = torch.nn.Parameter(first.new_full((width,), 1.0 / width))
        self.up = torch.nn.Parameter(first.new_zeros(hidden, width))
        self._features: list[torch.Tensor] = []

    def before(self, place: int, hidden: torch.Tensor) -> torch.Tensor:
        """What layer `place` gets instead of `hidden`."""
        if place == 0:
            self._features = []  # a pass that failed may have left some
        self._features.append(linear(rms_norm(hidden, hidden.shape[-1:]), self.down[place]))
        if place + 1 < len(self.down):
            return hidden
        *features, guide = self._features
        self._features = []
        return hidden + linear(relu(self._merged(torch.stack(features, -2), guide)), self.up)

    def _merged(self, features: torch.Tensor, guide: torch.Tensor) -> torch.Tensor:
        """[..., k, r] and [..., r] to [..., r]."""
        units = normalize(features, dim=-1)
        redundancy = relu(units @ units.transpose(-1, -2)).sum(-1)
        shares = relu((features * guide.unsqueeze(-2)) @ self.attention) / redundancy.clamp(min=_SMALL)
        shares = shares / (shares.sum(-1, keepdim=True) + _SMALL)
        return (shares.unsqueeze(-1) * features).sum(-2) + guide


def add_side_path(model: PreTrainedModel, spec: Sherl) -> None:
    """In place, unless the model has the same one. Raises UserError for a model that cannot carry it."""
    found = side_path_of(model.config)
    if found is None:
        _add(model, spec)
    elif found != spec:
        raise UserError(field=_FIELD, rule=f"must be that of the model: {_shown(found)}", got=_shown(spec))


def train_side_path(model: PreTrainedModel, spec: Sherl) -> None:
    """Add it; from now on only it and the layers behind it take gradients."""
    add_side_path(model, spec)
    model.requires_grad_(requires_grad=False)
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call] # transformers'
    for module in (decoder.side_path, *decoder.layers[len(decoder.side_path.down) - 1 :]):
        module.requires_grad_(requires_grad=True)


def side_path_of(config: PreTrainedConfig) -> Sherl | None:
    """What a configuration says of it."""
    mark = getattr(config, _MARK, None)
    return None if mark is None else Sherl.model_validate(mark)


def complete_structure(model: PreTrainedModel) -> None:
    """Add the side path that the model's configuration names, if any."""
    found = side_path_of(model.config)
    if found is not None:
        _add(model, found)


def save_with_side_path(model: PreTrainedModel, directory: Path) -> None:
    """As `load_with_side_path` reads it; transformers finds no weights there."""
    model.config.save_pretrained(directory)
    save_model(model, str(directory / _FILE))


def load_with_side_path(model: PreTrainedModel, directory: str) -> None:
    """Load weights and generation settings into their structure. Raises where weights are missing or unknown."""
    load_model(model, Path(directory) / _FILE)
    if (Path(directory) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)


def _add(model: PreTrainedModel, spec: Sherl) -> None:
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call] # transformers'
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UserError(
            field=_FIELD,
            rule="needs a model of layers one behind the other (Llama, Qwen2, ...)",
            got=type(model).__name__,
        )
    early = len(layers) - spec.late_layers
    if early < 1:
        raise UserError(
            field=f"{_FIELD}.lateLayers",
            rule=f"must be below the {len(layers)} layers of the model",
            got=spec.late_layers,
        )
    like = next(layers[early].parameters())
    path = SidePath(early=early, hidden=model.config.get_text_config().hidden_size, width=spec.width, like=like)
    decoder.side_path = path
    for place, layer in enumerate(layers[: early + 1]):
        layer.register_forward_pre_hook(_Hook(path, place))
    setattr(model.config, _MARK, spec.model_dump(by_alias=True))


class _Hook:
    """Before a layer. An object, since a copy of the model copies it: a function would stay with the first model's path."""

    def __init__(self, path: SidePath, place: int) -> None:
        self._path, self._place = path, place

    def __call__(self, _: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._path.before(self._place, given[0]), *given[1:])


def _shown(spec: Sherl) -> str:
    return f"lateLayers {spec.late_layers}, width {spec.width}"
