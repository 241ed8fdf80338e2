"""The keys and values of all active sequences: one row each, arranged in length buckets; and those of prompts to copy from.

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

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Keys and values of one sequence of tokens."""

    keys_lhtd: torch.Tensor
    values_lhtd: torch.Tensor

    @property
    def size_bytes(self) -> int:
        return int(self.keys_lhtd.nbytes + self.values_lhtd.nbytes)


class RecordingCache(Cache):
    """Keeps what one forward over padded prompts computes."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor] = []  # per layer, [p, h, t, d]
        self._values: list[torch.Tensor] = []

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,  # noqa: ANN401 - whatever a model passes on
        **__: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer_idx == len(self._keys), "layers must come in order, once each"
        self._keys.append(key_states)
        self._values.append(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def of(self, prompt: int, *, tokens: int) -> Prefilled:
        """The first `tokens` tokens of a prompt, copied out of the batch."""
        return Prefilled(
            keys_lhtd=torch.stack([keys[prompt, :, :tokens] for keys in self._keys]),
            values_lhtd=torch.stack([values[prompt, :, :tokens] for values in self._values]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBound:
    """How much of keys and values there may be."""

    capacity_tokens: int  # of rows times longest
    kept_bytes: int  # of prompts that no sequence uses now

    @classmethod
    def of(cls, size_bytes: int, *, token: Prefilled) -> "KvBound":
        """Split a bound in bytes; `token`: keys and values of one. Room for the copy of one layer's keys is left."""
        kept = min(_MAX_KEPT_BYTES, size_bytes // _KEPT_SHARE)
        layers = token.keys_lhtd.shape[0]
        return cls(
            capacity_tokens=(size_bytes - kept) * 2 * layers // (token.size_bytes * (2 * layers + 1)), kept_bytes=kept
        )


class SlotCache(Cache):
    """Keys and values, one row per active sequence."""

    def __init__(self, *, like: Prefilled, slots: int, limit_tokens: int, capacity_tokens: int) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._limit_tokens = limit_tokens
        self.capacity_tokens = capacity_tokens
        tokens = min(_FIRST_CAPACITY_TOKENS, limit_tokens, capacity_tokens)
        rows = min(slots, capacity_tokens // tokens)
        self._keys = [_zeros(layer, rows=rows, tokens=tokens) for layer in like.keys_lhtd]  # by layer, [s, h, t, d]
        self._values = [_zeros(layer, rows=rows, tokens=tokens) for layer in like.values_lhtd]
        self._rows = torch.empty(0, dtype=torch.int64)
        self._positions = torch.empty(0, dtype=torch.int64)
        self._width = 0

    def write(self, rows: Sequence[int], prefilled: Prefilled) -> None:
        """Make one sequence the content of some rows, for which there is room."""
        tokens = prefilled.keys_lhtd.shape[2]
        for held, given in ((self._keys, prefilled.keys_lhtd), (self._values, prefilled.values_lhtd)):
            for layer, one in zip(held, given, strict=True):
                layer[list(rows), :, :tokens] = one

    def fits(self, *, rows: int, tokens: int) -> bool:
        """Whether so many rows of so many tokens are within the bound."""
        return rows * min(tokens, self._limit_tokens) <= self.capacity_tokens

    def reserve(self, *, rows: int, tokens: int) -> None:
        """Have room for so many rows, all active ones among them, of so many tokens each."""
        held_rows, _, held_tokens, _ = self._keys[0].shape
        if rows <= held_rows and tokens <= held_tokens:
            return
        assert tokens <= self._limit_tokens, "a sequence beyond the limit was admitted"
        assert self.fits(rows=rows, tokens=tokens), "more was admitted than fits"
        width = min(_doubled(held_tokens, tokens), self._limit_tokens)
        count = max(rows, min(_doubled(held_rows, rows), self._slots, self.capacity_tokens // width))
        width = min(width, self.capacity_tokens // count)
        for held in (self._keys, self._values):
            for layer, old in enumerate(held):  # the old one is free before the next is made
                held[layer] = _resized(old, rows=count, tokens=width)

    def move(self, *, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy rows' first tokens over other rows, pairwise; no row is both source and target."""
        for held in (*self._keys, *self._values):
            held[list(targets), :, :tokens] = held[list(sources), :, :tokens]

    def swap(self, row: int, other: int, *, tokens: int) -> None:
        """Exchange the first tokens of two rows."""
        pair = [row, other]
        for held in (*self._keys, *self._values):
            held[pair, :, :tokens] = held[pair[::-1], :, :tokens]

    def clear(self) -> None:
        """Zero all: masked entries are multiplied by 0, which does not remove a NaN of broken weights."""
        for held in (*self._keys, *self._values):
            held.zero_()

    @property
    def size_bytes(self) -> int:
        """Of all its tensors."""
        return sum(held.nbytes for held in (*self._keys, *self._values))

    def begin_step(self, *, rows: torch.Tensor, positions: torch.Tensor, width: int) -> None:
        """Say where the next forward writes (`positions` per row) and how many tokens it attends to."""
        self._rows, self._positions = rows, positions
        self._width = min(width, self._keys[0].shape[2])

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
        keys, values, active = self._keys[layer_idx], self._values[layer_idx], len(self._rows)
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        return keys[:active, :, : self._width], values[:active, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


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
