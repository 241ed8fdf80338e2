"""Context parallelism: the ranks of a group share the tokens of a row, and for attention its heads (Ulysses, arXiv 2309.14509).

Owns: which tokens of a row each rank has, what is exchanged around attention, how results of all tokens come together. Does not own:
the exchange (`row_exchange.py`), attention itself (`documents.py`), which ranks are a group (`trainer/engines/context_parallel.py`).
Legend: as in `documents.py`; C ranks of a group, W tokens of each, h heads of each, N results.

    own tokens, all heads ─▶ all tokens, own heads ─▶ attention by documents ─▶ own tokens, all heads

- Each rank has the same number of consecutive tokens. Padding at the end of the row is in no document.
- Attention gets whole rows, so windows and bounds of documents are those of one rank.
- `join` gives every rank the results of all tokens, and all ranks compute the same loss. So the gradient of a result goes to the rank that
  computed it, without a sum. FSDP sums the gradients of weights over all ranks.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from streamrl_workers.models.row_exchange import exchange_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShare:
    """This rank's share of a row of `tokens`. Methods other than `cut`, `find` and `own_heads` are collectives of the group."""

    group: dist.ProcessGroup
    tokens: int

    @property
    def ranks(self) -> int:
        """Number of ranks that share the row."""
        return self.group.size()

    @property
    def width(self) -> int:
        """Number of tokens of each rank, with the padding at the end of the row."""
        return -(-self.tokens // self.ranks)

    @property
    def begin(self) -> int:
        """Place of this rank's first token."""
        return self.group.rank() * self.width

    def cut(self, row_1T: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [1, W] of what a row has of each token."""
        return pad(row_1T, (0, self.ranks * self.width - self.tokens)).narrow(1, self.begin, self.width)

    def find(self, places_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the places lie in this rank's part, and where they lie there."""
        within_N = places_N - self.begin
        own_n = ((within_N >= 0) & (within_N < self.width)).nonzero().squeeze(1)
        return own_n, within_N.index_select(0, own_n)

    def join(self, found_n: torch.Tensor, own_n: torch.Tensor, *, count: int) -> torch.Tensor:
        """Return the results of all ranks [N, ..]; of this rank are those at `own_n`."""
        joined: torch.Tensor = _Join.apply(found_n, own_n, count, self.group)  # type: ignore[no-untyped-call] # torch's
        return joined

    def join_tokens(self, found_W: torch.Tensor) -> torch.Tensor:
        """Return the results of all tokens of the row, padding included."""
        own_W = torch.arange(self.begin, self.begin + self.width, device=found_W.device)
        return self.join(found_W, own_W, count=self.ranks * self.width)

    def by_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the states [1, h, T, E] of all tokens for this rank's heads. Key-value heads too few for the ranks are repeated first."""
        repeats = self.ranks // gcd(self.ranks, key.shape[1])
        return tuple(
            self._all_tokens(one) for one in (query, *(kv.repeat_interleave(repeats, dim=1) for kv in (key, value)))
        )

    def _all_tokens(self, states: torch.Tensor) -> torch.Tensor:
        parts_ChWE = torch.stack(states.squeeze(0).chunk(self.ranks))
        rows_hTE = self._exchange(parts_ChWE).transpose(0, 1).flatten(1, 2)
        return rows_hTE.narrow(1, 0, self.tokens).unsqueeze(0)

    def by_tokens(self, answer: torch.Tensor) -> torch.Tensor:
        """Return the answers [1, W, H, E] of all heads for this rank's tokens, of [1, T, h, E]."""
        padding = self.ranks * self.width - self.tokens
        parts_CWhE = torch.stack(pad(answer.squeeze(0), (0, 0, 0, 0, 0, padding)).chunk(self.ranks))
        return self._exchange(parts_CWhE).transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def own_heads(self, terms_H: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of what attention has for each head."""
        return terms_H.chunk(self.ranks)[self.group.rank()]

    def _exchange(self, parts_C: torch.Tensor) -> torch.Tensor:
        """Send the n-th part to rank n; return the parts that the ranks sent, in their order."""
        each = [1] * self.ranks
        return exchange_rows(parts_C, each, each, group=self.group)


class _Join(torch.autograd.Function):
    """Results of all ranks, of which each has some."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives it any attribute
        found_n: torch.Tensor,
        own_n: torch.Tensor,
        count: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(own_n)
        joined_N = found_n.new_zeros(count, *found_n.shape[1:]).index_copy(0, own_n, found_n)
        if joined_N.numel():
            dist.all_reduce(joined_N, group=group)
        return joined_N

    @staticmethod
    def backward(ctx: Any, gradient_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - as above
        (own_n,) = ctx.saved_tensors
        return gradient_N.index_select(0, own_n), None, None, None
