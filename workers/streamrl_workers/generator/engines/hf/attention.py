"""Attention of one decode step over the slot cache, without copying keys and values.

Owns: the attention function that the engine's model is switched to. Does not own: masks, the cache.
transformers' SDPA repeats keys and values once per query head when a mask is given; on CPU that copy costs
as much as the attention. With one query token, the query heads of a group can stand in the query's
token dimension instead. Rows of alike lengths are computed together (`zones.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from streamrl_workers.generator.engines.hf.zones import Zone

ATTENTION_NAME = "streamrl_grouped"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention variants that this function does not compute."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, heads, Q, D]
    key: torch.Tensor,  # [B, kv heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # [B, 1, 1, T], additive
    *,
    scaling: float | None = None,
    zones: Sequence[Zone] = (),  # of the rows; none = all have the whole width
    **kwargs: Any,  # noqa: ANN401 - whatever a model passes on
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; returns [B, Q, heads, D] and no weights."""
    refused = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if refused:
        raise ValueError(f"{type(module).__name__}: attention with {', '.join(refused)} is not supported by engine hf")
    rows, heads, queries, dim = query.shape
    if queries > 1:
        kwargs["dropout"] = 0.0
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    kv_heads = key.shape[1]
    folded = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    if attention_mask is None or not zones:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        out = torch.cat([_zone_attention(zone, folded, key, value, attention_mask, scaling=scaling) for zone in zones])
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def _zone_attention(
    zone: Zone,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float | None,
) -> torch.Tensor:
    rows, width = slice(zone.first, zone.end), zone.width
    return scaled_dot_product_attention(
        query[rows], key[rows, :, :width], value[rows, :, :width], attn_mask=mask[rows, ..., :width], scale=scaling
    )


def register() -> None:
    """Make the function known to transformers; again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, grouped_attention)
