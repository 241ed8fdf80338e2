"""FSDP2: every rank holds a part of each tensor, and of its gradient and optimiser state.

Owns: what is sharded, how gradients are reduced (as sums: they are scaled once, in the update). Does not own: process groups
(`data_group.py`), files. The functions that make full tensors are collectives: every rank calls them in the same order.

A transformer block is gathered when it is needed, and dropped again, also behind the forward pass and also the root's tensors
(embeddings, head): a forward pass without backward would else leave them as they were before the next update.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer blocks: the list of modules with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=())
    return list(largest)


def shard(model: torch.nn.Module, *, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    """Shard in place, block by block. `compute`: format of passes, None = that of the weights; gradients are summed in float32."""
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if compute is not None:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*blocks_of(model), model):
        fully_shard(module, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank."""
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with the tensor."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def begin_row(tensor: torch.Tensor) -> int:
    """First row of this rank's part in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    rows = -(-tensor.shape[0] // mesh.size())  # as torch.chunk cuts: the last ones may be short or empty
    return min(tensor.shape[0], rows * mesh.get_local_rank())


def global_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """2-norm over all parts of all ranks: a collective if the tensors are sharded. Equal on every rank."""
    norm = torch.nn.utils.get_total_norm([local(tensor) for tensor in tensors])
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return norm
    square = norm.double().square()
    dist.all_reduce(square)
    return square.sqrt().to(norm.dtype)


def rank_of() -> int:
    """This process among the ranks; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0
