"""Attention by documents: sequences lie one after the other in a row, and each token sees its own sequence alone.

Owns: which models can be given such rows, where documents begin, the attention function, what attention costs. Does not own which
sequences share a row.
Legend: D documents of a row, T tokens of all of them, L tokens of the longest of some, n documents computed together, H heads, E of a head.

The rest of a transformer computes token by token, so a row needs no padding. A model qualifies if transformers can give it to flash
attention, whose terms are all that a document needs (scale, window, soft cap, sinks), and if no other layer carries state from token to token.

- A document above SHORT_TOKENS is one call of torch's attention, as if it were alone.
- Shorter ones of like lengths are computed together, each padded on the right within the call: the calls would cost more than the padding.
- On a GPU, torch's variable-length kernel takes the whole row where it can: half precision, no soft cap, no sinks, heads of one size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DOCUMENTS = "streamrl_documents"
"""Name of the attention function, as a model's configuration holds it."""
SHORT_TOKENS = 64
"""Maximum length of documents that are computed together."""
PADDING_TOKENS = 256
"""Maximum padding of documents that are computed together: about the cost of one more call (measured, decision 0004)."""
_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that an attention function computes by its arguments alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Consecutive documents of one call."""

    tokens: int
    documents: int
    width: int  # tokens of the longest
    rows: torch.Tensor | None  # [n * L] token of each place; None: all are equally long
    places: torch.Tensor | None  # [tokens] place of each token


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of one row; passed through a model to its attention."""

    calls: tuple[Together, ...]
    begins: torch.Tensor  # int32 [D + 1], the row's end included
    longest: int


def documents_of(lengths: Sequence[int], *, device: torch.device) -> Documents:
    """Return the documents of a row, in the order in which they lie there."""
    begins = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    calls = tuple(_together(some, device=device) for some in _like_lengths(lengths))
    return Documents(calls=calls, begins=begins.to(device), longest=max(lengths))


def _like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Split lengths into those of one call each."""
    calls: list[list[int]] = []
    for length in lengths:
        some = [*calls[-1], length] if calls else [length]
        padding = max(some) * len(some) - sum(some)
        if calls and max(some) <= SHORT_TOKENS and padding <= PADDING_TOKENS:
            calls[-1].append(length)
        else:
            calls.append([length])
    return calls


def _together(lengths: Sequence[int], *, device: torch.device) -> Together:
    width, tokens = max(lengths), sum(lengths)
    rows = places = None
    if width * len(lengths) > tokens:
        lengths_n1 = torch.tensor(lengths).unsqueeze(1)
        columns_L = torch.arange(width)
        # A place after a document's end repeats a token of the row: in causal attention nothing sees it.
        rows = (lengths_n1.cumsum(0) - lengths_n1 + columns_L).clamp(max=tokens - 1).flatten().to(device)
        places = (columns_L < lengths_n1).flatten().nonzero().squeeze(1).to(device)
    return Together(tokens=tokens, documents=len(lengths), width=width, rows=rows, places=places)


def attention_tokens(config: PreTrainedConfig) -> float:
    """Return the length of a document at which attention costs as much as all else of a model of this configuration.

    Of a document of T tokens, attention multiplies T^2 / 2 pairs, twice a layer; each token passes every weight once.
    """
    sizes: Any = config.get_text_config(decoder=True)
    hidden, heads, layers = sizes.hidden_size, sizes.num_attention_heads, sizes.num_hidden_layers
    width = heads * (getattr(sizes, "head_dim", None) or hidden // heads)
    wide = getattr(sizes, "moe_intermediate_size", None) or getattr(sizes, "intermediate_size", None) or 4 * hidden
    block = 4 * hidden * width + 3 * hidden * wide * (getattr(sizes, "num_experts_per_tok", None) or 1)
    return float((layers * block + sizes.vocab_size * hidden) / (layers * width))


def takes_documents(model: PreTrainedModel) -> bool:
    """Whether the model's forward can be given rows of several documents."""
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "layer_types", None) or ()
    return bool(
        model._supports_flash_attn
        and model._supports_attention_backend
        and not model._is_stateful
        and _LAYERS.issuperset(layers)
    )


def attend_by_document(model: PreTrainedModel) -> None:
    """Make a model that `takes_documents` attend by documents, in place."""
    model.set_attn_implementation(DOCUMENTS)


def attends_by_document(model: PreTrainedModel) -> bool:
    """Whether the model was given this attention."""
    return bool(model.config.get_text_config(decoder=True)._attn_implementation == DOCUMENTS)


@torch.compiler.disable  # lengths differ from row to row: compiled, each would be another program
def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: Documents,
    **terms: Any,  # noqa: ANN401 - those of `_attend`, and what other functions of transformers take
) -> tuple[torch.Tensor, None]:
    """Compute attention over a row [1, H, T, E], as transformers calls it; the answer is [1, T, H, E]."""
    del attention_mask  # transformers builds none for this name
    if _has_kernel(query, value, **terms):
        return _by_kernel(module, query, key, value, documents=documents, **terms), None
    rows_THE = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
    parts = [rows.split([call.tokens for call in documents.calls]) for rows in rows_THE]
    found = []
    for call, *own in zip(documents.calls, *parts, strict=True):
        taken = own if call.rows is None else [states.index_select(0, call.rows) for states in own]
        padded = [states.unflatten(0, (call.documents, call.width)).transpose(1, 2) for states in taken]
        answer = _attend(module, *padded, **terms).flatten(0, 1)
        found.append(answer if call.places is None else answer.index_select(0, call.places))
    return torch.cat(found).unsqueeze(0), None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,  # noqa: ANN401 - dropout, of which there is none, and names of other functions' terms
) -> torch.Tensor:
    """Causal attention of sequences [n, H, L, E], each by itself; the answer is [n, L, H, E]."""
    del others
    length = query.shape[2]
    mask_LL = None
    if sliding_window is not None and length > sliding_window:
        ones_LL = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask_LL = ones_LL.tril() & ~ones_LL.tril(-sliding_window)
    if softcap is None and s_aux is None:
        answer: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask_LL, scaling=scaling)[0]
        return answer
    if mask_LL is None:
        mask_LL = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    groups = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask_LL, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :length].to(value.dtype)
    return (shares @ repeat_kv(value, groups)).transpose(1, 2)


def _has_kernel(
    query: torch.Tensor,
    value: torch.Tensor,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,  # noqa: ANN401 - as above
) -> bool:
    del others
    same = query.shape[-1] == value.shape[-1] <= 256 and query.dtype in {torch.float16, torch.bfloat16}
    return query.is_cuda and same and softcap is None and s_aux is None


def _by_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    documents: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,  # noqa: ANN401 - as above
) -> torch.Tensor:
    """The whole row in one call of torch's variable-length attention."""
    del module, others
    rows_THE = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
    answer: Any = varlen_attn(
        *rows_THE,
        documents.begins,
        documents.begins,
        documents.longest,
        documents.longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    found: torch.Tensor = answer.unsqueeze(0)
    return found


ALL_ATTENTION_FUNCTIONS.register(DOCUMENTS, _attention)
