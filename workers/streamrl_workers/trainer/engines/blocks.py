"""Where a rank's part of a tensor lies in the whole, and which rank's copy of a part counts.

Owns: arithmetic of torch's placements, for tensors that FSDP cuts by rows, tensor parallelism by rows or columns, expert parallelism by
experts, which are rows of a stack. Moves nothing, but for `by_rows`. Does not own: how models are cut (`sharding.py`, `tensor_parallel.py`,
`expert_parallel.py`).

FSDP cuts what the others have left: of a tensor that both cut by rows each rank has one piece of consecutive rows, and the pieces of one
place in a group follow each other. Of a tensor that is cut by columns a rank has a block.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard


class RowParts(NamedTuple):
    """How a tensor lies on ranks by rows."""

    bounds: Sequence[int]
    """First row of each part, in their order, and the number of rows."""
    number: int
    """This rank's part."""

    @property
    def begin(self) -> int:
        """First row of this rank's part."""
        return self.bounds[self.number]


class Block(NamedTuple):
    """Place of a rank's part in a tensor."""

    row: int
    column: int
    """0 where no column is cut, or there is none."""


def block_of(tensor: torch.Tensor) -> Block:
    """Return the place of this rank's part."""
    if not isinstance(tensor, DTensor):
        return Block(0, 0)
    return Block(*(_parts(tensor, tensor.placements, dim=dim).begin for dim in (0, 1)))


def part_of(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view into `whole` that is this rank's part of `tensor`, which has the same shape."""
    if not isinstance(tensor, DTensor):
        return whole
    part = whole
    for dim, (begin, size) in enumerate(zip(block_of(tensor), tensor.to_local().shape, strict=False)):
        part = part.narrow(dim, begin, size)
    return part


def row_parts(tensor: DTensor) -> RowParts:
    """Return how the tensor lies on ranks, or will lie after `by_rows`."""
    return _parts(tensor, _row_placements(tensor), dim=0)


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Return whether this rank's part counts: of ranks that hold the same one the first, of what is not cut rank 0's."""
    if not dist.is_initialized():
        return True
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    mesh = tensor.device_mesh
    copies = (mesh.get_local_rank(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
    return not any(copies) and bool((mesh.mesh == 0).any())  # a mesh of parts of the ranks: the one with rank 0


def copies_of(tensor: torch.Tensor) -> int:
    """Return the number of ranks that hold each part."""
    cut = 1
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    for dim, placement in enumerate(tensor.placements):
        cut *= 1 if placement.is_replicate() else tensor.device_mesh.size(dim)
    return dist.get_world_size() // cut


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor cut by rows alone. A collective of each tensor group if it is cut by columns: each rank sends what the others take."""
    if not isinstance(tensor, DTensor) or not any(_is_cut(placement, dim=1) for placement in tensor.placements):
        return tensor
    return tensor.redistribute(placements=_row_placements(tensor))


def _row_placements(tensor: DTensor) -> list[Placement]:
    return [Shard(0) if _is_cut(placement, dim=1) else placement for placement in tensor.placements]


def _parts(tensor: DTensor, placements: Sequence[Placement], *, dim: int) -> RowParts:
    """Return the parts along a dimension; each cut is as `torch.chunk` makes it: the last parts may be short or empty."""
    mesh = tensor.device_mesh
    cuts = [number for number, placement in enumerate(placements) if _is_cut(placement, dim=dim)]
    # FSDP marks where it cuts what another cut has left: that one comes last.
    cuts.sort(key=lambda number: isinstance(placements[number], _StridedShard))
    length = tensor.shape[dim] if dim < tensor.ndim else 1
    bounds, number = [0, length], 0
    for cut in cuts:
        count = mesh.size(cut)
        number = number * count + mesh.get_local_rank(cut)
        bounds = [
            begin + min(end - begin, part * -(-(end - begin) // count))
            for begin, end in pairwise(bounds)
            for part in range(count)
        ]
        bounds.append(length)
    return RowParts(bounds, number)


def _is_cut(placement: Placement, *, dim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim
