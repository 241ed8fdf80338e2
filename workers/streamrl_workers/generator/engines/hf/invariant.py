"""Forwards whose bits follow from a sample alone, whatever else is in the batch: `engine.hf.batchInvariant`.

The last digits of a row's logits follow from the shape of the forward, as kernels are chosen by shapes, and from the way its keys
and values were made. Here both follow from the sample:

    what the turn began with      one forward, alone
    each token of the turn        one of BLOCK_ROWS rows, with attention over as many tokens as its length class is wide
    the same tokens again         likewise, one by one (after a takeover or a rest)

This is for samples of one version. One that goes on under new weights is prefilled whole: its bits follow from that moment, and
one longer than the steps between two versions would never end.

Rows of one class share a forward; one with too few rows repeats its last. Keys and values are gathered, so that their layout is
of the block and not of the cache.

What is left is a row's place in its block and the values beside it. A product sums each element in an order that the shape gives,
and rows do not mix. But the rest of an elementwise function that fills no vector is computed by other instructions, and with several
threads that rest may be of any row. So places are tried with the first weights; where they matter, the engine refuses.

Experts take as many rows as are routed to them, so models with experts are refused.

Does not own the order of rows, nor which tokens are fed again (`Prefill`, `BatchState`).
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from streamrl.errors import UserError
from streamrl_workers.generator.engines.hf.kv_cache import SlotCache, class_width, length_buckets
from streamrl_workers.generator.engines.hf.runner import PROBE_TOKENS, Runner, keeps_states, probe_tokens
from streamrl_workers.models.rope import rope_switch

BLOCK_ROWS = 16
"""More waste less on weights that are read once for all rows; fewer waste less on rows that are repeated."""


def check_rows_apart(model: PreTrainedModel) -> None:
    """Raise `UserError` for a model whose products have as many rows as others are routed to an expert, or that prefills again as it grows."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    if any("expert" in name and value for name, value in settings.items()):
        raise UserError(
            field="engine.hf.batchInvariant",
            rule=f"cannot be kept for a mixture of experts, which {type(model).__name__} is: rows share an expert's product",
            fix="leave it out and set slots to 1",
        )
    if keeps_states(model.config):
        raise UserError(
            field="engine.hf.batchInvariant",
            rule=f"cannot be kept for {type(model).__name__}, whose layers carry a state: a row that is repeated would change it twice",
            fix="leave it out and set slots to 1",
        )
    if rope_switch(model.config) is not None:
        raise UserError(
            field="engine.hf.batchInvariant",
            rule=f"cannot be kept for {type(model).__name__}, whose rotary factors change with the length (longrope)",
            fix="leave it out",
        )


class BlockCache(SlotCache):
    """Gives each forward the keys and values of its rows as tensors of their own, all `width` wide."""

    def begin_step(self, *, rows: torch.Tensor, positions: torch.Tensor, width: int) -> None:
        super().begin_step(rows=rows, positions=positions, width=width)
        self._width = width  # also where no row has room for so many yet

    def _of_step(self, held: torch.Tensor, *, width: int) -> torch.Tensor:
        block = held[:, :, :width].index_select(0, self._rows)
        return pad(block, (0, 0, 0, width - block.shape[2]))


class InvariantRunner(Runner):
    """Runs rows in blocks of one shape, and whole sequences alone."""

    cache_type = BlockCache
    prefill_tokens = 1
    replays = True

    def decode(self, tokens: torch.Tensor, *, positions: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        self.cache.reserve(rows=len(tokens), tokens=max(lengths))
        logits = []
        for run in length_buckets(lengths):
            for first in range(run.first, run.end, BLOCK_ROWS):
                last = min(first + BLOCK_ROWS, run.end) - 1
                rows = torch.arange(first, first + BLOCK_ROWS, device=self.device).clamp_(max=last)
                block = self._step(
                    tokens[rows], positions=positions[rows], rows=rows, width=class_width(lengths[first])
                )
                logits.append(block[: last + 1 - first])
        return torch.cat(logits)

    def check(self) -> None:
        super().check()
        self._check_places()

    @torch.inference_mode()
    def _check_places(self) -> None:
        """Raise ValueError if a row's logits follow from its place in the block, or from its neighbours."""
        if not self.cache.fits(rows=1, tokens=PROBE_TOKENS):
            return
        tokens = torch.tensor(probe_tokens(self.model), device=self.device)
        rows = torch.zeros(BLOCK_ROWS, dtype=torch.int64, device=self.device)
        for place in range(PROBE_TOKENS - 1):
            at = torch.full_like(rows, place)
            alike = self._step(tokens[at], positions=at, rows=rows, width=class_width(1))
            if not bool(alike.isfinite().all()):
                return  # broken weights: sampling reports them per request
            others = tokens[(torch.arange(BLOCK_ROWS, device=self.device) * 3 + place) % PROBE_TOKENS]
            others[place] = tokens[place]
            behind = at + 1  # what the others write is hidden from the row at `place`
            behind[place] = place
            mixed = self._step(others, positions=behind, rows=rows, width=class_width(1))
            if not (torch.equal(alike, alike[:1].expand_as(alike)) and torch.equal(alike[place], mixed[place])):
                raise UserError(
                    field="engine.hf.batchInvariant",
                    rule="cannot be kept on this machine: the last digits of a row follow from its place in the batch",
                    fix="leave it out and set slots to 1, or run with fewer threads",
                )
