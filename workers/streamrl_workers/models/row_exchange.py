"""Rows of a tensor to the ranks of a group, and their gradients back: the one exchange of context and of expert groups.

torch has it too, deprecated in `torch.distributed.nn`, and elsewhere for internal use.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives it any attribute
        rows: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - as above
        return _all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the rows that the other ranks send; `sent` and `received` are numbers of rows by rank. Differentiable, a collective."""
    got: torch.Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call] # torch's
    return got


def _all_to_all(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    got = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), list(received), list(sent), group=group)
    return got
