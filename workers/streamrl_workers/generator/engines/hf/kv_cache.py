"""What all layers keep of the active sequences: one row each, arranged in length buckets; and that of prompts to copy from.

Each kind of layer is a tensor whose rows have columns: one for each token (full attention), `span` columns that are used in turn
(a window: token p is in column p % span), or one (a state). So one code moves, resizes and counts them all. A token in a window's
column replaces one that no later token may see, and the first `width` columns hide what a row has not reached yet: one mask serves all.

Owns the tensors, their bound in bytes, their growth, the write of one decode step, the order of rows by length class, and what is
kept of the last prompts. Does not own which sequence is in which row, nor masks.

Rows are kept compact: the active sequences are rows 0..n-1, so a step works on views and gathers nothing. Every row has its own length.
With one long answer among 63 short ones, attention over one common width spends nearly all its time on what the mask hides.
So the longest rows come first, and attention is computed bucket by bucket.

Invariants:
- A bucket is as wide as its longest row needs, whatever the order of rows; the order only makes buckets few and narrow.
- Rows times longest stays within the bound, also while tensors are made larger, which happens one by one.

Legend of name suffixes (shapes): l layers, s slots, h key-value heads, t tokens, d head dimension, p prompts.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from streamrl_workers.generator.engines.base import KvLoad

_FIRST_CLASS_TOKENS = 64
"""Rows up to this length are one class: below it, one more call costs more than the hidden tokens. Classes double from here."""

_WIDTH_STEP_TOKENS = 16
"""Widths are rounded up to this, so that tensor sizes repeat and the allocator reuses its blocks."""


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Rows `first` to `end` (exclusive) attend to `width` tokens."""

    first: int
    end: int
    width: int


def length_class(tokens: int) -> int:
    """0 up to 64 tokens, 1 up to 128, 2 up to 256, ..."""
    return ((tokens - 1) // _FIRST_CLASS_TOKENS).bit_length()


def class_width(tokens: int) -> int:
    """The longest of that length's class."""
    return _FIRST_CLASS_TOKENS << length_class(tokens)


def swaps(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Exchanges of rows, one after the other, that put longer classes before shorter ones; none if they stand so."""
    classes = [length_class(tokens) for tokens in lengths]
    wanted = sorted(classes, reverse=True)
    if classes == wanted:
        return []
    done: list[tuple[int, int]] = []
    for row, right in enumerate(wanted):
        if classes[row] != right:
            # The last one: rows that have just come, which are short, stand at the end anyway.
            other = next(place for place in range(len(classes) - 1, row, -1) if classes[place] == right)
            classes[row], classes[other] = classes[other], classes[row]
            done.append((row, other))
    return done


def length_buckets(lengths: Sequence[int]) -> tuple[LengthBucket, ...]:
    """Runs of rows of one class, each as wide as its longest row, rounded up."""
    found: list[LengthBucket] = []
    first = 0
    for row in range(1, len(lengths) + 1):
        if row == len(lengths) or length_class(lengths[row]) != length_class(lengths[first]):
            longest = max(lengths[first:row])
            found.append(LengthBucket(first, row, -(-longest // _WIDTH_STEP_TOKENS) * _WIDTH_STEP_TOKENS))
            first = row
    return tuple(found)


_FIRST_CAPACITY_TOKENS = 128
"""Tokens per row at first; doubled when a sequence outgrows it."""


_MAX_KEPT_BYTES = 256 * 2**20
_KEPT_SHARE = 8
"""Keys and values of prompts that are kept beyond their use: at most so many bytes, and one in so many of the bound."""

_MAX_PROMPTS = 256
"""Prompts that are kept at most."""

PartName = Literal["keys", "values", "conv", "recurrent"]


def kept_bytes(size_bytes: int) -> int:
    """Return how much of a bound is for prompts that no sequence uses now."""
    return min(_MAX_KEPT_BYTES, size_bytes // _KEPT_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of one layer: keys, values, or a state of a convolution or a recurrence.

    A state is held as one token of one head, so that all kinds move, grow and are counted alike.
    """

    layer: int
    name: PartName
    state: int  # which one of the layer's; 0 for keys and values
    span: int | None  # tokens that the layer looks back at, at most; None: all
    shape: tuple[int, ...]  # of a state, as the model has it; of one row

    @property
    def is_state(self) -> bool:
        return self.name in ("conv", "recurrent")

    def width(self, tokens: int) -> int:
        """Columns that a row of this many tokens takes."""
        return tokens if self.span is None else min(tokens, self.span)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """What the layers keep of one sequence of tokens. A part with a span has token p in column p % span."""

    parts: tuple[Part, ...]
    held_htd: tuple[torch.Tensor, ...]  # by part

    @property
    def size_bytes(self) -> int:
        return sum(held.nbytes for held in self.held_htd)


def empty_layers(config: PreTrainedConfig) -> list[Any]:
    """Return the layers of transformers' cache for a model, for what they say of their kind and for states."""
    return DynamicCache(config=config.get_text_config(decoder=True)).layers


class RecordingCache(Cache):
    """Keeps what one forward over padded prompts computes. Layers keep their states, and keys and values of all tokens are kept here."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer, [p, h, t, d]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,  # noqa: ANN401 - whatever a model passes on
        **__: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer_idx not in self._pairs, "a layer must come once"
        self._pairs[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def of(self, prompt: int, *, tokens: int) -> Prefilled:
        """The first `tokens` tokens of a prompt, copied out of the batch. States are those after the batch's last token."""
        parts: list[Part] = []
        held: list[torch.Tensor] = []
        for layer, kind in enumerate(self.layers):
            span = getattr(kind, "sliding_window", None)
            for name, found in zip(_PAIR, self._pairs.get(layer, ()), strict=False):
                parts.append(Part(layer=layer, name=name, state=0, span=span, shape=()))
                held.append(_last(found[prompt, :, :tokens], span=span))
            for name, index, state in _states(kind):
                parts.append(Part(layer=layer, name=name, state=index, span=1, shape=tuple(state.shape[1:])))
                held.append(state[prompt].reshape(1, 1, -1).clone())
        return Prefilled(parts=tuple(parts), held_htd=tuple(held))


_PAIR: tuple[PartName, PartName] = ("keys", "values")


def _last(found_htd: torch.Tensor, *, span: int | None) -> torch.Tensor:
    """Copy the tokens that a layer looks back at, token p into column p % span."""
    tokens = found_htd.shape[1]
    if span is None or tokens <= span:
        return found_htd.clone()
    return found_htd[:, -span:].roll(tokens % span, dims=1)


def _states(kind: Any) -> Iterator[tuple[PartName, int, torch.Tensor]]:  # noqa: ANN401 - a layer of transformers' cache
    if not isinstance(kind, LinearAttentionCacheLayerMixin):
        return
    for index in range(kind.number_of_states):
        if (conv := kind.conv_states[index]) is not None:
            yield "conv", index, conv
        if (recurrent := kind.recurrent_states[index]) is not None:
            yield "recurrent", index, recurrent


class SlotCache(Cache):
    """What all layers keep, one row per active sequence."""

    def __init__(self, *, like: Prefilled, layers: list[Any], slots: int, limit_tokens: int, size_bytes: int) -> None:
        """`like`: of one token. `layers`: of transformers' cache, empty. Raises ValueError if not one token fits `size_bytes`."""
        super().__init__(layers=layers)
        self._slots = slots
        self._limit_tokens = limit_tokens
        self._size_bytes = size_bytes
        self._parts = like.parts
        self._token_bytes = _bytes_by_span(like)
        if not self.fits(rows=1, tokens=1):
            raise ValueError(f"keys and values of one token need {self.row_bytes(1)} bytes, there are {size_bytes}")
        self.tokens = min(_FIRST_CAPACITY_TOKENS, self.longest(rows=1))
        rows = min(slots, size_bytes // self.row_bytes(self.tokens))
        self._held = [
            _zeros(held, rows=rows, tokens=part.width(self.tokens))
            for part, held in zip(like.parts, like.held_htd, strict=True)
        ]  # by part, [s, h, t, d]
        self._pairs = {part.layer: place for place, part in enumerate(like.parts) if part.name == "keys"}
        self._states = [place for place, part in enumerate(like.parts) if part.is_state]
        self._rows = torch.empty(0, dtype=torch.int64)
        self._columns: dict[int | None, torch.Tensor] = {}
        self._width = 0

    def row_bytes(self, tokens: int) -> int:
        """Bytes of one row of so many tokens, with room for a copy of its largest part: rows are made larger one part after the other."""
        tokens = min(tokens, self._limit_tokens)
        sizes = [
            (min(tokens, span or tokens), of_all, largest) for span, (of_all, largest) in self._token_bytes.items()
        ]
        return sum(width * of_all for width, of_all, _ in sizes) + max(width * largest for width, _, largest in sizes)

    def fits(self, *, rows: int, tokens: int) -> bool:
        """Whether so many rows of so many tokens are within the bound."""
        return rows * self.row_bytes(tokens) <= self._size_bytes

    def longest(self, *, rows: int) -> int:
        """Return how many tokens each of so many rows may have."""
        return bisect_right(range(self._limit_tokens + 1), self._size_bytes // rows, key=self.row_bytes) - 1

    def load(self, *, rows: int, tokens: int, sample_tokens: int) -> KvLoad:
        """Return bytes as tokens of rows of `sample_tokens`: where layers look back at a window only, a longer row takes less for each token."""
        size_bytes = self.row_bytes(sample_tokens)
        return KvLoad(
            capacity_tokens=self._size_bytes * sample_tokens // size_bytes,
            used_tokens=rows * self.row_bytes(tokens) * sample_tokens // size_bytes,
        )

    def write(self, rows: Sequence[int], prefilled: Prefilled) -> None:
        """Make one sequence the content of some rows, for which there is room."""
        for held, one in zip(self._held, prefilled.held_htd, strict=True):
            held[list(rows), :, : one.shape[1]] = one

    def erase(self, rows: Sequence[int]) -> None:
        """Make rows those of sequences without tokens. Keys and values are hidden anyway."""
        for place in self._states:
            self._held[place][list(rows)] = 0

    def reserve(self, *, rows: int, tokens: int) -> None:
        """Have room for so many rows, all active ones among them, of so many tokens each."""
        held_rows = self._held[0].shape[0]
        if rows <= held_rows and tokens <= self.tokens:
            return
        assert tokens <= self._limit_tokens, "a sequence beyond the limit was admitted"
        assert self.fits(rows=rows, tokens=tokens), "more was admitted than fits"
        width = min(_doubled(self.tokens, tokens), self._limit_tokens)
        count = max(rows, min(_doubled(held_rows, rows), self._slots, self._size_bytes // self.row_bytes(width)))
        self.tokens = min(width, self.longest(rows=count))
        for place, part in enumerate(self._parts):  # the old one is free before the next is made
            self._held[place] = _resized(self._held[place], rows=count, tokens=part.width(self.tokens))

    def move(self, *, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy rows' first tokens over other rows, pairwise; no row is both source and target."""
        for held in self._held:
            held[list(targets), :, :tokens] = held[list(sources), :, :tokens]

    def swap(self, row: int, other: int, *, tokens: int) -> None:
        """Exchange the first tokens of two rows."""
        pair = [row, other]
        for held in self._held:
            held[pair, :, :tokens] = held[pair[::-1], :, :tokens]

    def clear(self) -> None:
        """Zero all: masked entries are multiplied by 0, which does not remove a NaN of broken weights."""
        for held in self._held:
            held.zero_()

    @property
    def size_bytes(self) -> int:
        """Of all its tensors."""
        return sum(held.nbytes for held in self._held)

    def begin_step(self, *, rows: torch.Tensor, positions: torch.Tensor, width: int) -> None:
        """Say where the next forward writes (`positions` per row) and how many tokens it attends to."""
        self._rows = rows
        self._columns = {span: positions if span is None else positions % span for span in self._token_bytes}
        self._width = min(width, self.tokens)
        for place in self._states:
            part = self._parts[place]
            _put_state(self.layers[part.layer], part, self._held[place][: len(rows)].view(len(rows), *part.shape))

    @property
    def width(self) -> int:
        """Tokens that the step's attention spans, hence the mask's width."""
        return self._width

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,  # noqa: ANN401 - whatever a model passes on
        **__: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = self._pairs[layer_idx]
        part, keys, values = self._parts[place], self._held[place], self._held[place + 1]
        columns = self._columns[part.span]
        keys[self._rows, :, columns] = key_states[:, :, 0]
        values[self._rows, :, columns] = value_states[:, :, 0]
        width = part.width(self._width)
        return self._of_step(keys, width=width), self._of_step(values, width=width)

    def _of_step(self, held: torch.Tensor, *, width: int) -> torch.Tensor:
        """The step's rows, `width` wide."""
        return held[: len(self._rows), :, :width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _put_state(kind: Any, part: Part, state: torch.Tensor) -> None:  # noqa: ANN401 - a layer of transformers' cache
    """Give a layer the state that its next forward reads, and writes in place."""
    of_kind, known = (
        (kind.conv_states, kind.is_conv_states_initialized)
        if part.name == "conv"
        else (kind.recurrent_states, kind.is_recurrent_states_initialized)
    )
    of_kind[part.state], known[part.state], kind.has_previous_state[part.state] = state, True, True
    if part.name == "conv":
        kind.conv_kernel_size[part.state] = state.shape[-1]


def _bytes_by_span(token: Prefilled) -> dict[int | None, tuple[int, int]]:
    """Return bytes of a token in all parts of each span, and in the largest one."""
    found: dict[int | None, tuple[int, int]] = {}
    for part, held in zip(token.parts, token.held_htd, strict=True):
        of_all, largest = found.get(part.span, (0, 0))
        found[part.span] = of_all + held.nbytes, max(largest, held.nbytes)
    return found


def _zeros(like_htd: torch.Tensor, *, rows: int, tokens: int) -> torch.Tensor:
    heads, _, dim = like_htd.shape
    return like_htd.new_zeros((rows, heads, tokens, dim))


def _resized(old: torch.Tensor, *, rows: int, tokens: int) -> torch.Tensor:
    """With as much of the content as there is room for: what falls off is no active sequence's."""
    new = _zeros(old[0], rows=rows, tokens=tokens)
    rows, tokens = min(rows, old.shape[0]), min(tokens, old.shape[2])
    new[:rows, :, :tokens] = old[:rows, :, :tokens]
    return new


def _doubled(count: int, least: int) -> int:
    """`count` times two until it is `least`."""
    while count < least:
        count *= 2
    return count


class PrefillCache:
    """Least-recently-used keys and values by tokens; bounded in number and bytes."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[int, ...], Prefilled] = OrderedDict()
        self._size_bytes = 0

    def get(self, tokens: tuple[int, ...]) -> Prefilled | None:
        """What these tokens' prefill gave, if it is still here."""
        return self._entries.get(tokens)

    def put(self, tokens: tuple[int, ...], prefilled: Prefilled) -> None:
        """Keep a prefill, or mark it as used; the oldest make room. One that exceeds the bound alone is not kept."""
        if tokens not in self._entries:
            self._size_bytes += prefilled.size_bytes
        self._entries[tokens] = prefilled
        self._entries.move_to_end(tokens)
        while self._size_bytes > self._max_bytes or len(self._entries) > _MAX_PROMPTS:
            _, dropped = self._entries.popitem(last=False)
            self._size_bytes -= dropped.size_bytes

    def clear(self) -> None:
        """Forget all: the weights have changed."""
        self._entries.clear()
        self._size_bytes = 0
