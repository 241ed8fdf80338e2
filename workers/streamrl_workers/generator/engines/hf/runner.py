"""The forwards of the engine `hf`: over whole sequences (prefill) and over one token per row (decode), and their attention.

Owns the model, positions, masks, padding, the sharing of prefills, and which models are refused. Does not own sampling,
nor which sequence is in which row.

transformers' SDPA repeats keys and values once per query head when a mask is given; on CPU that copy costs as much as the
attention. With one query token, the query heads of a group stand in the query's token dimension instead
(`grouped_attention`), and rows of alike lengths are computed together (`kv_cache.LengthBucket`).

A model qualifies if transformers says that its layers keep one key and value per token and take the attention function
and the mask that they are given. Whether they do is tried once, with the first weights: `check_numerics`.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from streamrl_workers.generator.engines.hf.kv_cache import (
    KvBound,
    LengthBucket,
    PrefillCache,
    Prefilled,
    RecordingCache,
    SlotCache,
    length_buckets,
)
from streamrl_workers.generator.engines.requests import ActiveSequence
from streamrl_workers.models.probe import COMPARED_TOKENS
from streamrl_workers.models.rope import rope_switch, row_positions

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
    buckets: Sequence[LengthBucket] = (),  # of the rows; none = all have the whole width
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
    if attention_mask is None or not buckets:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        out = torch.cat(
            [_bucket_attention(bucket, folded, key, value, attention_mask, scaling=scaling) for bucket in buckets]
        )
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def _bucket_attention(
    bucket: LengthBucket,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float | None,
) -> torch.Tensor:
    rows, width = slice(bucket.first, bucket.end), bucket.width
    return scaled_dot_product_attention(
        query[rows], key[rows, :, :width], value[rows, :, :width], attn_mask=mask[rows, ..., :width], scale=scaling
    )


def register() -> None:
    """Make the function known to transformers; again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, grouped_attention)


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
        model.train(mode=False)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        ((_, token),) = self.prefill([[0]])
        self.bound = KvBound.of(kv_bytes, token=token)
        if not self.bound.capacity_tokens:
            raise ValueError(f"keys and values of one token need {token.size_bytes} bytes, there are {kv_bytes}")
        self.cache = self.cache_type(
            like=token, slots=slots, limit_tokens=limit_tokens, capacity_tokens=self.bound.capacity_tokens
        )
        self._rows = torch.arange(slots, device=self.device)
        self._columns = torch.arange(0, device=self.device)
        kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
        self._passes_buckets = inspect.Parameter.VAR_KEYWORD in kinds  # on to its attention; if not, widths are all one

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Iterator[tuple[int, Prefilled]]:
        """Place and keys and values of each sequence (none empty), in any order; take one before the next."""
        for batch in _batches([len(tokens) for tokens in sequences], most_tokens=self.prefill_tokens):
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
        output = self.model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=self._mask(positions),
            position_ids=positions.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            **narrow,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Additive [B, 1, 1, T]: a row sees its own tokens up to the one being fed."""
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
        recorder = RecordingCache()
        self.model.base_model(  # no logits needed
            input_ids=torch.tensor(padded, device=self.device),
            position_ids=positions.to(self.device),
            past_key_values=recorder,
            use_cache=True,
        )
        return recorder


def _batches(lengths: Sequence[int], *, most_tokens: int) -> list[list[int]]:
    """Indices of sequences that go into one forward together: alike in length, within `most_tokens` when padded."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= most_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


class Prefill:
    """Prefill with sharing."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._kept = PrefillCache(max_bytes=runner.bound.kept_bytes)

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


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError naming the architecture if its layers do not cache one key and value per token."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    name = f"model {type(model).__name__} (model_type {config.model_type!r})"
    kinds = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__})
    if kinds:
        raise ValueError(f"{name} is not supported by engine hf: its cache has {', '.join(kinds)}; {_REMEDY}")
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} is not supported by engine hf: its attention cannot be replaced; {_REMEDY}")


_REMEDY = "only causal LMs with full attention and the standard key-value cache are (Llama, Qwen2, Qwen3, GPT-2, ...)"


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
