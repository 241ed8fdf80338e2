"""The forwards of the engine `hf`: over whole sequences (prefill) and over one token per row (decode), and their attention.

Owns the model, positions, masks, padding, the sharing of prefills, and which models are refused. Does not own sampling,
nor which sequence is in which row.

transformers' SDPA repeats keys and values once per query head when a mask is given; on CPU that copy costs as much as the
attention. With one query token, the query heads of a group stand in the query's token dimension instead
(`grouped_attention`), and rows of alike lengths are computed together (`kv_cache.LengthBucket`).

A model qualifies if transformers says that its layers keep keys and values (of all tokens, a window or a chunk) or states, and take the
attention function and the mask that they are given. Whether they do is tried once, with the first weights: `check_numerics`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from streamrl_workers.generator.engines.hf.kv_cache import (
    LengthBucket,
    PrefillCache,
    Prefilled,
    RecordingCache,
    SlotCache,
    empty_layers,
    kept_bytes,
    length_buckets,
)
from streamrl_workers.generator.engines.requests import ActiveSequence, limit_tokens
from streamrl_workers.models.probe import COMPARED_TOKENS
from streamrl_workers.models.rope import rope_switch, row_positions

ATTENTION_NAME = "streamrl_grouped"

_BLOCK_QUERIES = 128
"""Tokens of a prefill whose attention is computed at once, where no kernel computes it whole: bounds the masks and scores in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """Which keys a query sees, in a mask's place: no mask of L x L is made."""

    function: Callable[..., Any] = causal_mask_function  # of batch, head, query, key, as transformers has it
    span: int | None = None  # tokens that a query looks back at, at most

    def mask(self, like: torch.Tensor, *, rows: int, queries: range, keys: range) -> torch.Tensor:
        """Return an additive mask [B or 1, 1, Q, K] in the kind of `like`."""
        axes = [
            torch.arange(axis.start, axis.stop, device=like.device) for axis in (range(rows), range(1), queries, keys)
        ]
        seen = self.function(axes[0][:, None, None, None], axes[1][:, None, None], axes[2][:, None], axes[3])
        return like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def visible(
    *,
    q_length: int,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,  # noqa: ANN401 - whatever transformers' mask interface passes on
) -> Visible | None:
    """Describe what a prefill's queries see; None: all before them."""
    if allow_is_causal_skip and (local_size is None or q_length <= local_size):
        return None
    return Visible(function=mask_function, span=local_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attend:
    """Attention of queries that are grouped by their key and value head."""

    scaling: float | None
    softcap: float | None  # scores are within it
    sinks: torch.Tensor | None  # [heads], a score beside those of the keys

    def __call__(
        self,
        query: torch.Tensor,  # [B, kv heads, Q, D]: of a kv head all query heads, each with all its tokens
        key: torch.Tensor,  # [B, kv heads, T, D]
        value: torch.Tensor,
        mask: torch.Tensor | None,  # additive
    ) -> torch.Tensor:
        if self.softcap is None and self.sinks is None:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if self.scaling is None else self.scaling)
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        if mask is not None:
            scores = scores + mask
        if self.sinks is not None:
            kv_heads, queries = query.shape[1:3]
            sinks = self.sinks.view(kv_heads, -1, 1).expand(-1, -1, queries * kv_heads // len(self.sinks))
            scores = torch.cat((scores, sinks.reshape(1, kv_heads, queries, 1).expand(len(query), -1, -1, -1)), -1)
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]] @ value


def grouped_attention(  # noqa: PLR0913 - transformers calls it so
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, heads, Q, D]
    key: torch.Tensor,  # [B, kv heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | Visible | None,  # [B, 1, 1, at least T], additive, of one token a row
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    buckets: Sequence[LengthBucket] = (),  # of the rows; none = all have the whole width
    **kwargs: Any,  # noqa: ANN401 - whatever a model passes on
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; returns [B, Q, heads, D] and no weights."""
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__}: attention with position_bias is not supported by engine hf")
    attend = _Attend(scaling=scaling, softcap=softcap, sinks=s_aux)
    rows, heads, queries, dim = query.shape
    if isinstance(attention_mask, Visible) or (queries > 1 and not (softcap is None and s_aux is None)):
        assert not isinstance(attention_mask, torch.Tensor), "a prefill has no padding on the left"
        return _blocks(attend, query, key, value, seen=attention_mask or Visible()), None
    if queries > 1:
        kwargs["dropout"] = 0.0
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    kv_heads, width = key.shape[1:3]
    folded = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    mask = None if attention_mask is None else attention_mask[..., :width]
    if mask is None or not buckets:
        out = attend(folded, key, value, mask)
    else:
        out = torch.cat([_bucket_attention(bucket, attend, folded, key, value, mask) for bucket in buckets])
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def _bucket_attention(
    bucket: LengthBucket,
    attend: _Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    rows, width = slice(bucket.first, bucket.end), bucket.width
    return attend(query[rows], key[rows, :, :width], value[rows, :, :width], mask[rows, ..., :width])


def _blocks(
    attend: _Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, seen: Visible
) -> torch.Tensor:
    """Attention of whole sequences, so many queries at once over the keys that they may see; returns [B, Q, heads, D]."""
    rows, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    found = []
    for first in range(0, queries, _BLOCK_QUERIES):
        end = min(first + _BLOCK_QUERIES, queries)
        begin = 0 if seen.span is None else max(0, first - seen.span + 1)
        mask = seen.mask(query, rows=rows, queries=range(first, end), keys=range(begin, end))
        groups = heads // kv_heads
        out = attend(
            query[:, :, first:end].reshape(rows, kv_heads, groups * (end - first), dim),
            key[:, :, begin:end],
            value[:, :, begin:end],
            mask.repeat(1, 1, groups, 1),
        )
        found.append(out.view(rows, heads, end - first, value.shape[-1]))
    return torch.cat(found, 2).transpose(1, 2)


def register() -> None:
    """Make the functions known to transformers; again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, grouped_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, visible)


class Runner:
    """A transformers model, run on sequences and on slot rows."""

    cache_type: ClassVar[type[SlotCache]] = SlotCache
    prefill_tokens: ClassVar[int] = 8192
    """Padded tokens of one prefill forward at most (a longer sequence goes alone): bounds its memory. Keys and values of one
    forward are in their rows before the next begins."""
    replays: ClassVar[bool] = False
    """Whether the tokens of a turn are fed one by one also when they are known; else they are prefilled."""

    def __init__(self, *, model: PreTrainedModel, slots: int, limit_tokens: int, kv_bytes: int) -> None:
        """`kv_bytes`: of keys and values at most, beside those of one prefill forward. Raises ValueError if not one token's fit."""
        register()
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model
        self.switch = rope_switch(model.config)
        self._keeps_states = keeps_states(model.config)
        self._chunk = _chunk(model.config)
        model.train(mode=False)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        ((_, token),) = self.prefill([[0]])
        self.kept_bytes = kept_bytes(kv_bytes)
        self.cache = self.cache_type(
            like=token,
            layers=empty_layers(model.config),
            slots=slots,
            limit_tokens=limit_tokens,
            size_bytes=kv_bytes - self.kept_bytes,
        )
        self._rows = torch.arange(slots, device=self.device)
        self._columns = torch.arange(0, device=self.device)
        kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
        self._passes_buckets = inspect.Parameter.VAR_KEYWORD in kinds  # on to its attention; if not, widths are all one

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Iterator[tuple[int, Prefilled]]:
        """Place and keys and values of each sequence (none empty), in any order; take one before the next."""
        lengths = [len(tokens) for tokens in sequences]
        for batch in _batches(lengths, most_tokens=self.prefill_tokens, alike=self._keeps_states):
            recorded = self._forward_padded([sequences[index] for index in batch])
            for place, index in enumerate(batch):
                yield index, recorded.of(place, tokens=len(sequences[index]))
            del recorded

    def decode(self, tokens: torch.Tensor, *, positions: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Logits [B, V] behind one token per row, which stands at `positions`; `lengths` are its row's tokens up to it."""
        self.cache.reserve(rows=len(tokens), tokens=max(lengths))
        found = length_buckets(lengths)
        narrow: dict[str, Any] = {"buckets": found} if self._passes_buckets and len(found) > 1 else {}
        width = max(bucket.width for bucket in found)
        return self._step(tokens, positions=positions, rows=self._rows[: len(tokens)], width=width, **narrow)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs of the last tokens of each sequence, fed one by one behind a prefill of the rest. Rows must be free."""
        order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
        rows = [list(sequences[index]) for index in order]
        scored = min(COMPARED_TOKENS, *(self._one_way(len(row)) for row in rows))
        if scored < 1:
            return [[] for _ in sequences]
        self.cache.reserve(rows=len(rows), tokens=len(rows[0]))
        for row, prefilled in self.prefill([row[: -scored - 1] for row in rows]):
            self.cache.write([row], prefilled)
        found: list[list[float]] = [[] for _ in sequences]
        for back in range(scored, 0, -1):  # each row's token `back` before its end is predicted
            lengths = [len(row) - back for row in rows]
            fed, wanted = (
                torch.tensor(tokens, device=self.device)
                for tokens in ([row[-back - 1] for row in rows], [row[-back] for row in rows])
            )
            positions = torch.tensor(lengths, device=self.device) - 1
            logprobs = self.decode(fed, positions=positions, lengths=lengths).float().log_softmax(-1)
            for index, logprob in zip(order, logprobs.gather(-1, wanted.unsqueeze(-1)).flatten().tolist(), strict=True):
                found[index].append(logprob)
        return found

    def _one_way(self, tokens: int) -> int:
        """Return how many of a sequence's last tokens are drawn with one set of rotary factors, after at least one other token."""
        before = tokens - 2
        return before if self.switch is None or tokens - 1 <= self.switch else min(before, tokens - 1 - self.switch)

    def check(self) -> None:
        """With the first weights: raise ValueError if the model cannot be run as this does it. Rows must be free."""
        check_numerics(self)

    def _step(
        self,
        tokens: torch.Tensor,
        *,
        positions: torch.Tensor,
        rows: torch.Tensor,
        width: int,
        **narrow: Any,  # noqa: ANN401 - on to the attention
    ) -> torch.Tensor:
        """One forward over one token per row of the cache."""
        self.cache.begin_step(rows=rows, positions=positions, width=width)
        mask: Any = self._mask(positions)
        if self._chunk is not None:
            mask = {"full_attention": mask, "chunked_attention": self._mask(positions % self._chunk)}
        output = self.model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask,
            position_ids=positions.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            **narrow,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Additive [B, 1, 1, T]: a row sees its own tokens up to the one being fed.

        Where a layer keeps a window, its first columns are all that it has: a row that has filled them sees each.
        """
        if len(self._columns) != self.cache.width:
            self._columns = torch.arange(self.cache.width, device=self.device)
        hidden = self._columns > positions.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        return mask[:, None, None, :]

    def _forward_padded(self, sequences: Sequence[Sequence[int]]) -> RecordingCache:
        """One causal forward, padded on the right: what stands behind a sequence cannot change it."""
        lengths = [len(tokens) for tokens in sequences]
        longest = max(lengths)
        if self.switch is None:
            positions = torch.arange(longest).expand(len(sequences), longest)
        else:  # each with the token that is fed next: its length decides the factors
            longest += 1
            positions = row_positions([length + 1 for length in lengths], width=longest)
        padded = [[*tokens, *([0] * (longest - len(tokens)))] for tokens in sequences]
        recorder = RecordingCache(empty_layers(self.model.config))
        self.model.base_model(  # no logits needed
            input_ids=torch.tensor(padded, device=self.device),
            position_ids=positions.to(self.device),
            past_key_values=recorder,
            use_cache=True,
        )
        return recorder


def _batches(lengths: Sequence[int], *, most_tokens: int, alike: bool) -> list[list[int]]:
    """Indices of sequences that go into one forward together, within `most_tokens` when padded.

    `alike`: without padding, which would change a state behind a sequence.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        fits = batches and longest * (len(batches[-1]) + 1) <= most_tokens
        if fits and not (alike and lengths[index] < longest):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


class Prefill:
    """Prefill with sharing."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._kept = PrefillCache(max_bytes=runner.kept_bytes)

    def fill(self, sequences: Sequence[ActiveSequence], *, first_row: int, replay: bool) -> None:
        """Put all but the last token of each sequence into its row, starting at `first_row`; there is room for them.

        `replay`: only of what its turn began with; the turn's own tokens are to be fed again.
        """
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, seq in enumerate(sequences, start=first_row):
            held = tuple((seq.given if replay else seq.tokens)[:-1])
            seq.replayed = len(seq.prompt) + len(seq.completion) - 1 - len(held)
            if held:
                rows.setdefault(held, []).append(row)
            else:
                self._runner.cache.erase([row])
        prompts = {seq.prompt[:-1] for seq in sequences if not seq.completion}
        for held, prefilled in self._prefilled(list(rows)):
            self._runner.cache.write(rows[held], prefilled)
            if held in prompts:  # a sequence in the midst of its completion comes only once
                self._kept.put(held, prefilled)

    def forget(self) -> None:
        """Drop what the old weights computed, in the rows too."""
        self._kept.clear()
        self._runner.cache.clear()

    def _prefilled(self, wanted: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], Prefilled]]:
        missing = []
        for tokens in wanted:
            kept = self._kept.get(tokens)
            if kept is None:
                missing.append(tokens)
            else:
                yield tokens, kept
        for index, prefilled in self._runner.prefill(missing):
            yield missing[index], prefilled


_RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference of two ways to the same logits, in units of the logits' spread. Wrong masks give about 1."""

PROBE_TOKENS = 7


def probe_tokens(model: PreTrainedModel) -> list[int]:
    """Some tokens that the model knows."""
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
    return [(7 * place + 1) % vocabulary for place in range(PROBE_TOKENS)]


def keeps_states(config: PreTrainedConfig) -> bool:
    """Whether layers carry a state of all tokens before, as convolutions and recurrences do."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in empty_layers(config))


def _chunk(config: PreTrainedConfig) -> int | None:
    """Return the tokens within which some layers attend, where a window does not move with the token (Llama 4)."""
    settings: Any = config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(settings)
    return int(settings.attention_chunk_size) if "chunked_attention" in kinds else None


def longest_row(config: PreTrainedConfig) -> int:
    """Return the most tokens of prompt and completion that the model is run on. Raises ValueError where its configuration does not say."""
    settings: Any = config.get_text_config(decoder=True)
    limit = limit_tokens(config)
    # Llama 4 scales queries above by the batch's length, not the row's.
    if getattr(settings, "attn_temperature_tuning", False):
        limit = min(limit, settings.floor_scale - 1)
    return limit


_KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers of transformers' cache that the cache of this engine knows."""


def _is_limited(module: torch.nn.Module) -> bool:
    """Whether a recurrence limits its time steps: transformers does so over a sequence, and not over one token."""
    least, most = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    return bool(least > 0 or most < float("inf"))


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError naming the architecture if its layers keep something else than keys, values and states."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    name = f"model {type(model).__name__} (model_type {config.model_type!r})"
    layers = empty_layers(config)
    kinds = sorted({type(layer).__name__ for layer in layers if type(layer) not in _KINDS})
    if kinds:
        raise ValueError(f"{name} is not supported by engine hf: its cache has {', '.join(kinds)}; {_REMEDY}")
    if not any(isinstance(layer, DynamicLayer) for layer in layers):
        raise ValueError(f"{name} is not supported by engine hf: none of its layers attends; {_REMEDY}")
    if model._is_stateful and not keeps_states(config):
        raise ValueError(
            f"{name} is not supported by engine hf: it keeps a state outside of transformers' cache; {_REMEDY}"
        )
    if any(_is_limited(module) for module in model.modules()):
        raise ValueError(
            f"{name} is not supported by engine hf: one token at a time, it does not keep time_step_limit; {_REMEDY}"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} is not supported by engine hf: its attention cannot be replaced; {_REMEDY}")


_REMEDY = (
    "take engine vllm, or a causal LM with full, sliding-window or linear attention (Llama, Qwen3.5, Gemma 3, ...)"
)


@torch.inference_mode()
def check_numerics(runner: Runner) -> None:
    """Raise ValueError if prefill and decode do not give the logits of the model's own forward. Rows must be free."""
    tokens = probe_tokens(runner.model)
    own = runner.model(input_ids=torch.tensor([tokens], device=runner.device)).logits[0, -2:].float()
    if not bool(own.isfinite().all()):
        return  # broken weights, not a broken model: sampling reports them per request
    prompt, fed = tokens[:-2], tokens[-2:]
    if not runner.cache.fits(rows=1, tokens=len(tokens)):
        return  # nor will there be a sequence
    runner.cache.reserve(rows=1, tokens=len(tokens))
    for _, prefilled in runner.prefill([prompt]):
        runner.cache.write([0], prefilled)
    for place, token in enumerate(fed):
        at = len(prompt) + place
        positions = torch.tensor([at], device=runner.device)
        ours = runner.decode(torch.tensor([token], device=runner.device), positions=positions, lengths=[at + 1])[
            0
        ].float()
        _compare(ours, own[place], runner=runner)


def _compare(ours: torch.Tensor, own: torch.Tensor, *, runner: Runner) -> None:
    difference = float((ours - own).abs().max())
    bound = _RELATIVE_TOLERANCE[runner.dtype] * max(float(own.max() - own.min()), 1e-3)
    if difference > bound:
        raise ValueError(
            f"model {type(runner.model).__name__} is not supported by engine hf: its logits differ by {difference:.2g} "
            f"(more than {bound:.2g}) from those of its own forward; {_REMEDY}"
        )
