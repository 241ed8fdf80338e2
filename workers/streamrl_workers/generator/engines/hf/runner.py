"""The two forwards of the engine: over whole sequences (prefill) and over one token per row (decode).

Owns: the model, positions, masks, padding. Does not own: sampling, which sequence is where.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from streamrl_workers.generator.engines.hf.attention import ATTENTION_NAME, register
from streamrl_workers.generator.engines.hf.slot_cache import Prefilled, RecordingCache, SlotCache
from streamrl_workers.generator.engines.hf.zones import zones

_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward at most (a longer sequence goes alone): bounds its memory."""


class Runner:
    """A transformers model, run on sequences and on slot rows."""

    def __init__(self, *, model: PreTrainedModel, slots: int, limit_tokens: int) -> None:
        register()
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model
        model.train(mode=False)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.cache = SlotCache(like=self.prefill([[0]])[0], slots=slots, limit_tokens=limit_tokens)
        self._rows = torch.arange(slots, device=self.device)
        self._columns = torch.arange(0, device=self.device)
        kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
        self._passes_zones = inspect.Parameter.VAR_KEYWORD in kinds  # on to its attention; if not, widths are all one

    def prefill(self, sequences: Sequence[Sequence[int]]) -> list[Prefilled]:
        """Keys and values of each sequence (none empty), in order."""
        done: dict[int, Prefilled] = {}
        for batch in _batches([len(tokens) for tokens in sequences]):
            recorded = self._forward_padded([sequences[index] for index in batch])
            for place, index in enumerate(batch):
                done[index] = recorded.of(place, tokens=len(sequences[index]))
        return [done[index] for index in range(len(sequences))]

    def decode(self, tokens: torch.Tensor, *, positions: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Logits [B, V] behind one token per row, which stands at `positions`; `lengths` are its row's tokens up to it."""
        self.cache.reserve(max(lengths))
        found = zones(lengths)
        self.cache.begin_step(
            rows=self._rows[: len(tokens)], positions=positions, width=max(zone.width for zone in found)
        )
        narrow: dict[str, Any] = {"zones": found} if self._passes_zones and len(found) > 1 else {}
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
        longest = max(len(tokens) for tokens in sequences)
        padded = [[*tokens, *([0] * (longest - len(tokens)))] for tokens in sequences]
        recorder = RecordingCache()
        positions = torch.arange(longest, device=self.device).expand(len(padded), longest)
        self.model.base_model(  # no logits needed
            input_ids=torch.tensor(padded, device=self.device),
            position_ids=positions,
            past_key_values=recorder,
            use_cache=True,
        )
        return recorder


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences that go into one forward together: alike in length, within `_PREFILL_TOKENS` when padded."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= _PREFILL_TOKENS:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
