"""The keys and values of all active sequences, and of prompts to copy from.

Owns: the preallocated tensors, their growth, the write of one decode step. Does not own: which row belongs
to whom, lengths, masks.

Rows are kept compact: the active sequences are rows 0..n-1, so a step works on views and gathers nothing.
Every row has its own length; a step writes each row's new entry at that row's own position.

Legend of name suffixes (shapes): l layers, s slots, h key-value heads, t tokens, d head dimension, p prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

_FIRST_CAPACITY_TOKENS = 128
"""Tokens per row at first; doubled when a sequence outgrows it."""


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


class SlotCache(Cache):
    """Preallocated keys and values, one row per slot."""

    def __init__(self, *, like: Prefilled, slots: int, limit_tokens: int) -> None:
        super().__init__(layers=[])
        self._limit_tokens = limit_tokens
        tokens = min(_FIRST_CAPACITY_TOKENS, limit_tokens)
        self._keys = _zeros(like.keys_lhtd, slots=slots, tokens=tokens)  # [l, s, h, t, d]
        self._values = _zeros(like.values_lhtd, slots=slots, tokens=tokens)
        self._rows = torch.empty(0, dtype=torch.int64)
        self._positions = torch.empty(0, dtype=torch.int64)
        self._width = 0

    def write(self, rows: Sequence[int], prefilled: Prefilled) -> None:
        """Make one sequence the content of some rows."""
        tokens = prefilled.keys_lhtd.shape[2]
        self.reserve(tokens)
        self._keys[:, list(rows), :, :tokens] = prefilled.keys_lhtd.unsqueeze(1)
        self._values[:, list(rows), :, :tokens] = prefilled.values_lhtd.unsqueeze(1)

    def reserve(self, tokens: int) -> None:
        """Have room for so many tokens per row."""
        capacity = self._keys.shape[3]
        if tokens <= capacity:
            return
        assert tokens <= self._limit_tokens, "a sequence beyond the limit was admitted"
        while capacity < tokens:
            capacity *= 2
        self._keys = _grown(self._keys, tokens=min(capacity, self._limit_tokens))
        self._values = _grown(self._values, tokens=min(capacity, self._limit_tokens))

    def move(self, *, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy rows' first tokens over other rows, pairwise; no row is both source and target."""
        for held in (self._keys, self._values):
            held[:, list(targets), :, :tokens] = held[:, list(sources), :, :tokens]

    def swap(self, row: int, other: int, *, tokens: int) -> None:
        """Exchange the first tokens of two rows."""
        pair = [row, other]
        for held in (self._keys, self._values):
            held[:, pair, :, :tokens] = held[:, pair[::-1], :, :tokens]

    def clear(self) -> None:
        """Zero all: masked entries are multiplied by 0, which does not remove a NaN of broken weights."""
        self._keys.zero_()
        self._values.zero_()

    def begin_step(self, *, rows: torch.Tensor, positions: torch.Tensor, width: int) -> None:
        """Say where the next forward writes (`positions` per row) and how many tokens it attends to."""
        self._rows, self._positions = rows, positions
        self._width = min(width, self._keys.shape[3])

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


def _zeros(like_lhtd: torch.Tensor, *, slots: int, tokens: int) -> torch.Tensor:
    layers, heads, _, dim = like_lhtd.shape
    return like_lhtd.new_zeros((layers, slots, heads, tokens, dim))


def _grown(old: torch.Tensor, *, tokens: int) -> torch.Tensor:
    layers, slots, heads, old_tokens, dim = old.shape
    new = old.new_zeros((layers, slots, heads, tokens, dim))
    new[:, :, :, :old_tokens] = old
    return new
