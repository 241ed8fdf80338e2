"""The bytes that a rank publishes: of each tensor of a checkpoint the rows that lie in its own shards, copied to main memory.

    tensor of the model, cut into rows by FSDP ─▶ tensor of the checkpoint, a view into it ─▶ its rows on this rank ─▶ main memory

Owns: which rows are this rank's, the memory of the copies, the copying. Does not own: what is published by which name (`model_files.py`),
hashing, serving.

Invariants:
- Each row is copied by one rank, the first of those that hold it. Rows of a view lie on the ranks in their order, so a tensor is its slices by rank.
- Nothing is gathered, except a view of which one row lies on two ranks: that is gathered on every rank, and copied by rank 0.
  Whether it is follows from shapes alone, so all ranks agree, and take part in the same order.
- What was given out is never written again. Memory is freed when nothing refers to any copy in it.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from streamrl_workers.trainer.engines.sharding import begin_row, full, is_first_copy, local, rank_of, row_shards
from streamrl_workers.weights.hashing import SliceBytes, reserved

_LEAST_SLAB_BYTES = 64 * 2**20
"""Below it the rest of a version is one slab. torch rounds pinned memory up to a power of two: at most this much is wasted."""
_ALIGNMENT_BYTES = 64
"""Of a copy in its slab."""


class PublishedView(NamedTuple):
    """A tensor of a checkpoint, as a part of one of the model."""

    name: str
    tensor: torch.Tensor
    """Of the model; perhaps sharded by rows."""
    view: torch.Tensor
    """On the device `meta`: shape, strides and offset in the whole tensor."""
    dtype: torch.dtype
    """That is published."""


@torch.no_grad()
def copy_slices(views: Iterable[PublishedView], *, gather: bool = False) -> list[SliceBytes]:
    """Copy this rank's slices. `gather`: instead, rank 0 copies all tensors whole, and the others copy nothing."""
    planned = [(view, None if gather else _rows(view)) for view in views]
    memory = HostMemory(sum(_padded(_size_bytes(view, rows)) for view, rows in planned))
    copies = [
        SliceBytes(
            view.name,
            str(view.dtype).removeprefix("torch."),
            tuple(view.view.shape),
            first_row,
            memory.copy(part, dtype=view.dtype),
        )
        for view, first_row, part in _parts(planned)
    ]
    memory.finish()
    return copies


_Rows = tuple[int, int]
"""First row of a view on this rank, and the one after the last."""


def _parts(planned: Iterable[tuple[PublishedView, _Rows | None]]) -> Iterator[tuple[PublishedView, int, torch.Tensor]]:
    """Yield what this rank copies, and its first row; without rows, rank 0 copies the whole view."""
    gathered: dict[int, torch.Tensor] = {}  # the last one: its views follow each other
    for view, rows in planned:
        tensor = view.tensor
        if rows is None:
            if id(tensor) not in gathered:
                gathered.clear()
                gathered[id(tensor)] = full(tensor).detach().contiguous()
            if rank_of() == 0:
                whole = (0, len(view.view) if view.view.ndim else 1)
                yield view, 0, _strided(gathered[id(tensor)], view.view, rows=whole)
        elif rows[0] < rows[1]:
            begin = begin_row(tensor) * prod(tensor.shape[1:])
            yield view, rows[0], _strided(local(tensor).detach(), view.view, rows=rows, begin=begin)


def _rows(view: PublishedView) -> _Rows | None:
    """Return the rows of a view that this rank copies; None: rank 0 copies it whole."""
    tensor = view.tensor
    if not isinstance(tensor, DTensor):
        return None
    count, place = row_shards(tensor)
    shard_rows = -(-tensor.shape[0] // count)  # as `begin_row`
    firsts = first_rows(view.view, shard=shard_rows * prod(tensor.shape[1:]), shards=count)
    if firsts is None:
        return None
    return firsts[place], firsts[place + 1 if is_first_copy(tensor) else place]


def first_rows(view: torch.Tensor, *, shard: int, shards: int) -> Sequence[int] | None:
    """Return the first row of a view in each shard, and the number of rows; None: a row lies in two shards, or there is none.

    `shard`: elements of the whole tensor in a shard; the last ones may have fewer.
    """
    if not view.ndim or not view.numel():
        return None
    (rows, *shape), (step, *strides), offset = view.shape, view.stride(), int(view.storage_offset())
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    firsts = [0]
    for bound in range(shard, shards * shard, shard):
        count = min(rows, max(0, -((offset - bound) // max(1, step))))  # rows that begin before it
        if count and offset + (count - 1) * step + span >= bound:
            return None
        firsts.append(count)
    return [*firsts, rows]


def _size_bytes(view: PublishedView, rows: _Rows | None) -> int:
    """Return the bytes that this rank copies."""
    whole = view.view.numel() * view.dtype.itemsize
    if rows is None:
        return whole if rank_of() == 0 else 0
    return whole // max(1, len(view.view)) * (rows[1] - rows[0])


def _strided(held: torch.Tensor, view: torch.Tensor, *, rows: _Rows, begin: int = 0) -> torch.Tensor:
    """Return rows of a view into `held`, which has the elements of the whole tensor from `begin` on."""
    assert held.is_contiguous(), "strides of the view are those of a contiguous tensor"
    place = held.storage_offset() + int(view.storage_offset()) - begin
    if not view.ndim:
        return held.as_strided((), (), place)
    return held.as_strided((rows[1] - rows[0], *view.shape[1:]), view.stride(), place + rows[0] * view.stride(0))


class HostMemory:
    """Memory for the copies of one version: pinned, where they come from a GPU."""

    def __init__(self, size_bytes: int) -> None:
        """`size_bytes`: all that will be copied, each copy padded."""
        self._left_bytes = size_bytes
        self._slabs: dict[str, list[tuple[torch.Tensor, int]]] = {}
        """By type of the device that is copied from: slabs, and the bytes in use of each."""
        self._devices: set[torch.device] = set()

    def copy(self, part: torch.Tensor, *, dtype: torch.dtype) -> memoryview:
        """Copy a tensor in another format; its bytes are there after `finish`."""
        if not part.numel():
            return memoryview(b"")
        target = self._take(part.numel() * dtype.itemsize, kind=part.device.type)
        if part.device.type == "cuda":
            self._devices.add(part.device)
            part = part.to(dtype)  # there, not on the processor
        target.view(dtype).view(part.shape).copy_(part, non_blocking=True)
        data: memoryview = target.numpy().data
        return data.toreadonly()

    def finish(self) -> None:
        """Wait for all copies."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def _take(self, size_bytes: int, *, kind: str) -> torch.Tensor:
        slabs, padded = self._slabs.setdefault(kind, []), _padded(size_bytes)
        place = next((place for place, (slab, used) in enumerate(slabs) if used + padded <= len(slab)), None)
        if place is None:
            place = len(slabs)
            slabs.append((_slab(slab_bytes(padded, left_bytes=self._left_bytes), pinned=kind == "cuda"), 0))
        slab, used = slabs[place]
        slabs[place] = (slab, used + padded)
        self._left_bytes -= padded
        return slab[used : used + size_bytes]


def slab_bytes(size_bytes: int, *, left_bytes: int) -> int:
    """Return the size of a slab for a copy and those that follow it: a power of two, since torch pins no other sizes, until little is left."""
    most = max(size_bytes, left_bytes)
    return most if most <= _LEAST_SLAB_BYTES else max(size_bytes, 1 << (most.bit_length() - 1))


def _slab(size_bytes: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)  # torch keeps it for the next version
    return torch.frombuffer(reserved(size_bytes), dtype=torch.uint8)  # huge pages, given back when it is freed


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
