"""The file of one rank in a checkpoint: its parts of the tensors, staged, written, hashed, read.

Owns: the form of the file, the copy that a training step waits for, the hash. Does not own: which tensors (`model_files.py`), when (`checkpoint.py`).

    rank-00000.safetensors    parts by tensor name; metadata "parts": {name: {"shape": whole shape, "begin": first row,
                              "column": first column}}; a tensor that is not named there is the rank's own (random state)

A part is a block of rows and columns, so ranks can read what any other number of ranks wrote, however their tensors were cut: a rank
copies what it holds out of all parts that overlap it. No collective: a rank whose disk is full fails alone, and no other rank waits for it in vain.

The staged copy has the layout of the file in one piece of memory, so that it is hashed and written as it lies.
Where main memory has no room for it, the parts are written one by one while the step waits.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from streamrl.files import sync
from streamrl_workers.models.published import as_bytes
from streamrl_workers.trainer.engines.blocks import Block, block_of, is_first_copy
from streamrl_workers.trainer.engines.engine import FileHash
from streamrl_workers.trainer.engines.sharding import local
from streamrl_workers.weights.hashing import HASH_ALGORITHM, new_digest

_PARTS = "parts"
_FILES = "rank-*.safetensors"
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors names them."""
_ALIGNMENT = 8
"""Of the first tensor in the file, in bytes."""
_PIECE_BYTES = 2**24
"""Hashed and written at a time."""

log = logging.getLogger(__name__)


class ShardWriter:
    """Copies and writes one file a checkpoint; keeps the memory of the copy, as fresh memory costs most of the copy's time."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def stage(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        own: Mapping[str, torch.Tensor],
        room_bytes: int,
    ) -> Callable[[], FileHash]:
        """Copy this rank's parts and its `own` tensors; of ranks with the same part the first takes it. The result writes the file and returns its hash.

        room_bytes: free main memory, of which a copy takes half at most. Call it when the file before is written.
        Raises OSError: the disk is full, here or later.
        """
        parts: dict[str, torch.Tensor] = {}
        places: dict[str, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            part = local(tensor).detach()
            if is_first_copy(tensor) and (part.numel() or not isinstance(tensor, DTensor)):
                row, column = block_of(tensor)
                parts[name] = part
                places[name] = {"shape": list(tensor.shape), "begin": row} | ({"column": column} if column else {})
        laid = sorted({**parts, **own}.items(), key=lambda item: (-item[1].element_size(), item[0]))
        head = _head(laid, places=places)
        memory = self._room(sum(part.nbytes for _, part in laid), room_bytes=room_bytes)
        if memory is None:
            written = _write(path, head=head, pieces=(as_bytes(part.cpu().contiguous()).data for _, part in laid))
            return lambda: written
        _copy([part for _, part in laid], into=memory)
        return lambda: _write(path, head=head, pieces=(memory.numpy().data,))

    def _room(self, size_bytes: int, *, room_bytes: int) -> torch.Tensor | None:
        """Memory of this size; None: there is too little."""
        if self._memory is None or self._memory.nbytes != size_bytes:
            self._memory = None
            if 2 * size_bytes > room_bytes:
                log.warning("no room for a copy of %.1f GiB: the step waits for the disk", size_bytes / 2**30)
                return None
            self._memory = torch.empty(size_bytes, dtype=torch.uint8)
        return self._memory


def _head(laid: Iterable[tuple[str, torch.Tensor]], *, places: Mapping[str, Any]) -> bytes:
    """What a safetensors file has before its tensors."""
    entries: dict[str, Any] = {"__metadata__": {_PARTS: json.dumps(places)}}
    begin = 0
    for name, part in laid:
        end = begin + part.nbytes
        entries[name] = {"dtype": _TYPES[part.dtype], "shape": list(part.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@torch.no_grad()
def _copy(parts: Iterable[torch.Tensor], *, into: torch.Tensor) -> None:
    """One after the other; the largest elements stand first, so each is aligned."""
    begin = 0
    for part in parts:
        end = begin + part.nbytes
        if part.numel():
            into[begin:end].view(part.dtype).view(part.shape).copy_(part)
        begin = end


def _write(path: Path, *, head: bytes, pieces: Iterable[memoryview]) -> FileHash:
    """To the disk, hashed on the way."""
    digest, size_bytes = new_digest(threads=1), 0  # the other processors train
    with path.open("wb", buffering=0) as file:
        for piece in _small(chain([memoryview(head)], pieces)):
            digest.update(piece)
            size_bytes += len(piece)
            left = piece
            while left:
                left = left[file.write(left) :]
    sync(path)
    return {"size_bytes": size_bytes, "hash": f"{HASH_ALGORITHM}:{digest.hexdigest()}"}


def _small(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        yield from (piece[begin : begin + _PIECE_BYTES] for begin in range(0, len(piece), _PIECE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    file: Any  # an open safetensors file
    whole: tuple[int, ...]  # shape of the whole tensor
    shape: tuple[int, ...]
    place: Block


def read_shards(directory: Path, tensors: Mapping[str, torch.Tensor], *, rank: int) -> dict[str, torch.Tensor]:
    """Fill `tensors`, bit for bit; returns this rank's own tensors, none if there was no such rank.

    Raises:
        ValueError: the folder holds other tensors.
        OSError: it cannot be read.
    """
    try:
        with ExitStack() as stack:
            files = {path: stack.enter_context(safe_open(path, "pt")) for path in sorted(directory.glob(_FILES))}
            parts = _parts(list(files.values()))
            _check(parts, tensors)
            for name, tensor in tensors.items():
                _fill(local(tensor), name=name, place=block_of(tensor), parts=parts[name])
            mine = files.get(shard_path(directory, rank))
            places = json.loads(mine.metadata()[_PARTS]) if mine else {}
            return {name: mine.get_tensor(name) for name in mine.keys() if name not in places} if mine else {}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def tensor_names(directory: Path) -> set[str]:
    """Return the names of the tensors of all ranks. Raises ValueError or OSError: a file cannot be read."""
    names: set[str] = set()
    try:
        for path in directory.glob(_FILES):
            with safe_open(path, "pt") as file:
                names.update(file.keys())
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return names


def shard_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.safetensors"


def _parts(files: list[Any]) -> dict[str, list[_Part]]:
    parts: dict[str, list[_Part]] = {}
    for file in files:
        for name, place in json.loads(file.metadata()[_PARTS]).items():
            part = _Part(
                file=file,
                whole=tuple(place["shape"]),
                shape=tuple(file.get_slice(name).get_shape()),
                place=Block(place["begin"], place.get("column", 0)),
            )
            parts.setdefault(name, []).append(part)
    return parts


def _check(parts: Mapping[str, list[_Part]], tensors: Mapping[str, torch.Tensor]) -> None:
    if not parts:
        raise ValueError("there are no tensors")
    if differing := sorted(parts.keys() ^ tensors.keys()):
        raise ValueError(f"{differing[0]} is {'missing' if differing[0] in tensors else 'unknown'}")
    for name, tensor in tensors.items():
        if any(part.whole != tuple(tensor.shape) for part in parts[name]):
            raise ValueError(f"{name} has the shape {list(parts[name][0].whole)}, here it is {list(tensor.shape)}")
        if sum(prod(part.shape) for part in parts[name]) != tensor.numel():
            raise ValueError(f"{name} has not all of its {tensor.numel()} elements")


@torch.no_grad()
def _fill(target: torch.Tensor, *, name: str, place: Block, parts: list[_Part]) -> None:
    if not target.ndim:
        target.copy_(parts[0].file.get_tensor(name))
        return
    for part in parts:
        into, out = [], []
        for size, begin, part_size, part_begin in zip(target.shape, place, part.shape, part.place, strict=False):
            first, last = max(begin, part_begin), min(begin + size, part_begin + part_size)
            into.append(slice(first - begin, max(first, last) - begin))
            out.append(slice(first - part_begin, max(first, last) - part_begin))
        if all(one.start < one.stop for one in out):
            target[tuple(into)].copy_(part.file.get_slice(name)[tuple(out)])
