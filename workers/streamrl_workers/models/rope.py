"""Rotary embeddings that change with the length of a sequence (LongRoPE, arXiv 2402.13753), for each sequence of a batch by its own length.

Owns: at which length a model switches, how a batch keeps its sequences apart, which tokens of a sequence are on which side.
Does not own the embedding's formula: that stays the model's own module.

A model of Phi-3's kind computes with short factors up to `original_max_position_embeddings` tokens, and with long ones above. transformers
switches by the longest position of the whole batch, so a sample's log-probs would depend on its batch mates. With the hook of
`switch_by_document` each document switches by its own largest position. A document is a run of rising positions: a row, or one of several
in it. Padding repeats a row's last position (`row_positions`), so it switches as its row does.

A generator draws token t from the t tokens before it. So those up to the switch belong to the short factors, also in a sequence that
grows beyond (`split_at_switch`): its keys and values are computed again there.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from streamrl.errors import UserError
from streamrl.keys import ENV_MODEL_PATH
from streamrl_workers.models.documents import Documents

_LONGROPE = "longrope"
_Places = TypeVar("_Places", bound=Sequence[int])


def rope_switch(config: PreTrainedConfig) -> int | None:
    """Return the most tokens that the short factors are for; None: the model has one set of factors."""
    parameters = _rope_parameters(config)
    if parameters.get("rope_type") != _LONGROPE:
        return None
    return int(parameters["original_max_position_embeddings"])


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    return getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}


def switch_by_document(model: PreTrainedModel) -> None:
    """Make each document of a batch switch by its own largest position, in place.

    Raises:
        UserError: the model switches in a way that is not known here.
    """
    switching = [module for module in model.modules() if getattr(module, "rope_type", None) == _LONGROPE]
    if rope_switch(model.config) is None:
        of_layers = _rope_parameters(model.config).values()
        if any(isinstance(one, dict) and one.get("rope_type") == _LONGROPE for one in of_layers):
            raise _unknown(model)
        return
    if not switching:
        raise _unknown(model)
    for module in switching:
        module.register_forward_hook(_each_document, with_kwargs=True)


def _unknown(model: PreTrainedModel) -> UserError:
    return UserError(
        field=ENV_MODEL_PATH,
        rule="must switch its rotary factors (longrope) for all layers alike",
        got=type(model).__name__,
        fix="take another model",
    )


def _each_document(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Replace the cosines and sines of short documents, where the batch also has long ones. `output` is the module's own, by the longest."""
    hidden: torch.Tensor = kwargs["x"] if "x" in kwargs else args[0]
    positions_BL: torch.Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[-1]
    config: Any = module.config
    switch = rope_switch(config)
    assert switch is not None, "a hook on a model that does not switch"
    long_BL = _largest(positions_BL) >= switch
    if bool(long_BL.all()) or not bool(long_BL.any()):
        return None
    short: tuple[torch.Tensor, torch.Tensor] = module.forward(hidden, position_ids=positions_BL.masked_fill(long_BL, 0))
    long_BL1 = long_BL.unsqueeze(-1)
    return torch.where(long_BL1, output[0], short[0]), torch.where(long_BL1, output[1], short[1])


def _largest(positions_BL: torch.Tensor) -> torch.Tensor:
    """Return the largest position of each token's document [B, L]."""
    begins_BL = torch.ones_like(positions_BL)
    begins_BL[:, 1:] = positions_BL[:, 1:] != positions_BL[:, :-1] + 1
    numbers = begins_BL.flatten().cumsum(0) - 1
    largest_D = torch.zeros_like(numbers).scatter_reduce(0, numbers, positions_BL.flatten(), "amax")
    return largest_D[numbers].view_as(positions_BL)


def split_at_switch(places: _Places, switch: int | None) -> list[_Places]:
    """Split ascending places of predicted tokens by the factors that they were drawn with; a sequence without places stays one."""
    if switch is None:
        return [places]
    first_long = sum(place <= switch for place in places)
    parts: Any = [part for part in (places[:first_long], places[first_long:]) if part]
    return parts or [places]


def row_positions(lengths_B: Sequence[int], *, width: int) -> torch.Tensor:
    """Positions [B, width] of rows that are padded on the right: padding repeats a row's last one."""
    last_B1 = torch.tensor(lengths_B).unsqueeze(1) - 1
    return torch.minimum(torch.arange(width).unsqueeze(0), last_B1)


def own_positions(positions_BL: torch.Tensor | None, documents: Documents | None = None) -> dict[str, Any]:
    """Return what a decoder takes beside its tokens: nothing where it numbers them itself, as some can only do.

    `documents`: of a row that holds several. The mask hides nothing. Without one, transformers takes repeated positions for packed sequences and builds a mask of L x L.
    """
    if positions_BL is None:
        return {}
    given = {"position_ids": positions_BL, "attention_mask": torch.ones_like(positions_BL)}
    return given if documents is None else {**given, "documents": documents}
