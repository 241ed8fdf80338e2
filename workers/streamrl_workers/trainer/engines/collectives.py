"""Clocks around the exchanges of FSDP2: weights that are gathered, gradients that are summed.

Owns: which exchanges are measured, by torch's own setting for a custom communication. Does not own: clocks (`throughput.py`), shards.
On a GPU these run beside the passes, in streams of their own; their time includes waits for slower ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

Clock = Callable[[], AbstractContextManager[None]]


class _AllGather(DefaultAllGather):
    """Weights of a block, from all ranks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> dist.Work | None:
        """As torch calls it."""
        with self._clock():
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    """Gradients of a block, summed over all ranks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401 - one of two kinds of torch's
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> dist.Work:
        """As torch calls it."""
        with self._clock():
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def measure_collectives(model: torch.nn.Module, *, clock: Clock) -> None:
    """In place: let every exchange of the model's shards run within the clock's context; without shards nothing changes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_AllGather(clock))
            module.set_custom_reduce_scatter(_ReduceScatter(clock))
