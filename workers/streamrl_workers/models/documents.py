"""Attention by documents: sequences lie one after the other in a row, and each token sees its own sequence alone.

Owns: which models can be given such rows, where documents begin, the attention function, what attention costs. Does not own which
sequences share a row.
Legend: D documents of a row, T tokens of all of them, L tokens of the longest of some, n documents computed together, H heads, E of a head.

The rest of a transformer computes token by token, so a row needs no padding. A model qualifies if transformers can give it to flash
attention, whose terms are all that a document needs (scale, window, soft cap, sinks), if no other layer carries state from token to
token, and if it passes the documents on to its attention. The window is that of the mask which transformers would build.

- A document above SHORT_TOKENS is one call of torch's attention, as if it were alone.
- Shorter ones of like lengths are computed together, each padded on the right within the call: the calls would cost more than the padding.
- On a GPU, torch's variable-length kernel takes the whole row where it can: half precision, no soft cap, no sinks, heads of one size.
- Where ranks share a row (`row_share.py`), each computes whole rows of its own heads.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamrl_workers.models.row_share import RowShare

DOCUMENTS = "streamrl_documents"
"""Name of the attention function, as a model's configuration holds it."""
SHORT_TOKENS = 64
"""Maximum length of documents that are computed together."""
PADDING_TOKENS = 256
"""Maximum padding of documents that are computed together: about the cost of one more call (measured, decision 0004)."""
_KERNEL_HEAD = 256
"""Maximum size of a head that torch's variable-length kernel takes."""
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
    share: RowShare | None = None  # None: this rank has the whole row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What a layer's attention computes beside the plain formula."""

    scale: float
    window: int | None  # tokens that a token sees, itself included
    softcap: float | None  # of logits
    sinks: torch.Tensor | None  # [H] a logit that takes part in the softmax and gives nothing

    @property
    def plain(self) -> bool:
        """Whether torch's own functions compute it."""
        return self.softcap is None and self.sinks is None


_TRIAL = Documents(calls=(), begins=torch.zeros(1, dtype=torch.int32), longest=0)
"""What `takes_documents` looks for at the attention function."""


def documents_of(lengths: Sequence[int], *, device: torch.device, share: RowShare | None = None) -> Documents:
    """Return the documents of a row, in the order in which they lie there."""
    begins = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    calls = tuple(_together(some, device=device) for some in _like_lengths(lengths))
    return Documents(calls=calls, begins=begins.to(device), longest=max(lengths), share=share)


def _like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Split lengths into those of one call each."""
    calls: list[list[int]] = []
    width = tokens = 0
    for length in lengths:
        width, tokens = max(width, length), tokens + length
        if calls and width <= SHORT_TOKENS and width * (len(calls[-1]) + 1) - tokens <= PADDING_TOKENS:
            calls[-1].append(length)
        else:
            calls.append([length])
            width = tokens = length
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
    """Return the length of a document at which attention costs as much as all else of a model of this configuration; infinite without attention.

    Of a document of T tokens, attention multiplies T^2 / 2 pairs, twice a layer; each token passes every weight once.
    """
    sizes: Any = config.get_text_config(decoder=True)
    hidden, heads, layers = sizes.hidden_size, getattr(sizes, "num_attention_heads", None), sizes.num_hidden_layers
    if not heads:
        return math.inf
    width = heads * (getattr(sizes, "head_dim", None) or hidden // heads)
    wide = getattr(sizes, "moe_intermediate_size", None) or getattr(sizes, "intermediate_size", None) or 4 * hidden
    block = 4 * hidden * width + 3 * hidden * wide * (getattr(sizes, "num_experts_per_tok", None) or 1)
    return float((layers * block + sizes.vocab_size * hidden) / (layers * width))


class _ReachedError(Exception):
    """The documents of a trial have come to the attention function."""


def takes_documents(model: PreTrainedModel) -> bool:
    """Whether the model's forward can be given rows of several documents. Its weights need no values; its attention is changed."""
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "layer_types", None) or ()
    if not model._supports_flash_attn or model._is_stateful or not _LAYERS.issuperset(layers):
        return False
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call] # transformers'
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return False  # it would number the row
    attend_by_document(model)
    tokens_BL = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    given = {"position_ids": tokens_BL, "attention_mask": torch.ones_like(tokens_BL), "documents": _TRIAL}
    try:
        with torch.no_grad():
            decoder(input_ids=tokens_BL, use_cache=False, **given)
    except _ReachedError:
        return True
    except Exception:  # noqa: BLE001 - a model that does not know the documents may fail anyhow
        return False
    return False


def attend_by_document(model: PreTrainedModel) -> None:
    """Make a model that `takes_documents` attend by documents, in place."""
    model.set_attn_implementation(DOCUMENTS)


def attends_by_document(model: PreTrainedModel) -> bool:
    """Whether the model was given this attention."""
    return bool(model.config.get_text_config(decoder=True)._attn_implementation == DOCUMENTS)


def _window(*_: object, local_size: int | None = None, **others: object) -> int | None:
    """Stand where transformers builds a mask: its window alone reaches the attention function, in the mask's place."""
    del others
    return local_size


def _attention(  # noqa: PLR0913 - transformers calls it so
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    *,
    documents: Documents | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,  # noqa: ANN401 - terms of other attention functions; of dropout there is none
) -> tuple[torch.Tensor, None]:
    """Compute attention over a row [1, H, T, E], as transformers calls it; the answer is [1, T, H, E].

    Without documents each row is a sequence of its own.
    """
    del others
    assert getattr(module, "is_causal", True), "padding within a call would be seen"
    if documents is _TRIAL:
        raise _ReachedError
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    terms = _Terms(scale=scale, window=window, softcap=softcap, sinks=s_aux)
    if documents is None:
        return _attend(query, key, value, terms=terms), None
    share = documents.share
    if share is None:
        return _by_documents(query, key, value, documents=documents, terms=terms), None
    if s_aux is not None:
        terms = replace(terms, sinks=share.own_heads(s_aux))
    states = share.by_heads(query, key, value)
    return share.by_tokens(_by_documents(*states, documents=documents, terms=terms)), None


def _by_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, documents: Documents, terms: _Terms
) -> torch.Tensor:
    """Compute attention over a row [1, H, T, E]; the answer is [1, T, H, E]."""
    rows_THE = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
    if _has_kernel(query, value) and terms.plain:
        return _by_kernel(*rows_THE, documents=documents, terms=terms).unsqueeze(0)
    sizes = [call.tokens for call in documents.calls]
    parts = [torch.split(rows, sizes) for rows in rows_THE]
    found = []
    for call, *own in zip(documents.calls, *parts, strict=True):
        taken = own if call.rows is None else [states.index_select(0, call.rows) for states in own]
        padded = [states.unflatten(0, (call.documents, call.width)).transpose(1, 2) for states in taken]
        answer = _attend(*padded, terms=terms).flatten(0, 1)
        found.append(answer if call.places is None else answer.index_select(0, call.places))
    return torch.cat(found).unsqueeze(0)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, terms: _Terms) -> torch.Tensor:
    """Causal attention of sequences [n, H, L, E], each by itself; the answer is [n, L, H, E]."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    within = terms.window is None or length <= terms.window
    if terms.plain:
        mask_LL = None if within else _causal(length, window=terms.window, device=query.device)
        layer: Any = SimpleNamespace(num_key_value_groups=groups)
        answer: torch.Tensor = sdpa_attention_forward(layer, query, key, value, mask_LL, scaling=terms.scale)[0]
        return answer
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * terms.scale
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.masked_fill(~_causal(length, window=terms.window, device=query.device), float("-inf"))
    if terms.sinks is not None:
        sinks = terms.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :length].to(value.dtype)
    return (shares @ repeat_kv(value, groups)).transpose(1, 2)


def _causal(length: int, *, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which earlier tokens each token sees [L, L]."""
    mask_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask_LL if window is None else mask_LL.triu(1 - window)


def _has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    same = query.shape[-1] == value.shape[-1] <= _KERNEL_HEAD
    return same and query.is_cuda and query.dtype in {torch.float16, torch.bfloat16}


def _by_kernel(
    query_THE: torch.Tensor,
    key_THE: torch.Tensor,
    value_THE: torch.Tensor,
    *,
    documents: Documents,
    terms: _Terms,
) -> torch.Tensor:
    """Compute the whole row [T, H, E] in one call of torch's variable-length attention."""
    answer: Any = varlen_attn(
        query=query_THE,
        key=key_THE,
        value=value_THE,
        cu_seq_q=documents.begins,
        cu_seq_k=documents.begins,
        max_q=documents.longest,
        max_k=documents.longest,
        scale=terms.scale,
        window_size=(-1 if terms.window is None else terms.window - 1, 0),
        enable_gqa=query_THE.shape[1] != key_THE.shape[1],
    )
    found: torch.Tensor = answer
    return found


# Lengths differ from row to row: compiled, each would be another program.
ALL_ATTENTION_FUNCTIONS.register(DOCUMENTS, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call] # torch's
ALL_MASK_ATTENTION_FUNCTIONS.register(DOCUMENTS, _window)
