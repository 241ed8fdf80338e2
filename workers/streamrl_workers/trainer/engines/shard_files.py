"""Tensors of all ranks in one folder: a safetensors file for each rank with its parts, and where each part begins.

Owns: the layout. Does not own: which tensors these are (`torch_files.py`), when and where (`checkpoint.py`).

    rank-00000.safetensors    parts by tensor name; metadata "parts": {name: {"shape": whole shape, "begin": first row}};
                              a tensor that is not named there is the rank's own (random state)

Tensors are cut by rows, so any number of ranks can read what any other number wrote: a rank copies the rows that it holds out of
all parts that overlap them. No collective: a rank whose disk is full fails alone, and nobody waits for it in vain.
"""

import errno
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from streamrl_workers.trainer.engines.sharding import begin_row, local

_PARTS = "parts"
_FILES = "rank-*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    file: Any  # an open safetensors file
    shape: tuple[int, ...]  # of the whole tensor
    begin: int  # first row of the part
    end: int


def write(directory: Path, tensors: Mapping[str, torch.Tensor], *, own: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write this rank's parts and its `own` tensors; rank 0 writes what is not sharded. Raises OSError if the disk is full."""
    parts: dict[str, torch.Tensor] = {}
    places: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        part = local(tensor)
        if (isinstance(tensor, DTensor) and part.shape[0] > 0) or (rank == 0 and not isinstance(tensor, DTensor)):
            parts[name] = part.detach().cpu().contiguous()
            places[name] = {"shape": list(tensor.shape), "begin": begin_row(tensor)}
    try:
        save_file({**parts, **own}, _path(directory, rank), metadata={_PARTS: json.dumps(places)})
    except SafetensorError as error:  # how a full disk shows
        raise OSError(errno.EIO, str(error)) from error


def read(directory: Path, tensors: Mapping[str, torch.Tensor], *, rank: int) -> dict[str, torch.Tensor]:
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
                _fill(local(tensor), name=name, begin=begin_row(tensor), parts=parts[name])
            mine = files.get(_path(directory, rank))
            places = json.loads(mine.metadata()[_PARTS]) if mine else {}
            return {name: mine.get_tensor(name) for name in mine.keys() if name not in places} if mine else {}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.safetensors"


def _parts(files: list[Any]) -> dict[str, list[_Part]]:
    parts: dict[str, list[_Part]] = {}
    for file in files:
        for name, place in json.loads(file.metadata()[_PARTS]).items():
            rows = (file.get_slice(name).get_shape() or [1])[0]
            part = _Part(file=file, shape=tuple(place["shape"]), begin=place["begin"], end=place["begin"] + rows)
            parts.setdefault(name, []).append(part)
    return parts


def _check(parts: Mapping[str, list[_Part]], tensors: Mapping[str, torch.Tensor]) -> None:
    if not parts:
        raise ValueError("there are no tensors")
    if differing := sorted(parts.keys() ^ tensors.keys()):
        raise ValueError(f"{differing[0]} is {'missing' if differing[0] in tensors else 'unknown'}")
    for name, tensor in tensors.items():
        if any(part.shape != tuple(tensor.shape) for part in parts[name]):
            raise ValueError(f"{name} has the shape {list(parts[name][0].shape)}, here it is {list(tensor.shape)}")
        rows = tensor.shape[0] if tensor.ndim else 1
        if sum(part.end - part.begin for part in parts[name]) != rows:
            raise ValueError(f"{name} has not all of its {rows} rows")


@torch.no_grad()
def _fill(target: torch.Tensor, *, name: str, begin: int, parts: list[_Part]) -> None:
    if not target.ndim:
        target.copy_(parts[0].file.get_tensor(name))
        return
    end = begin + target.shape[0]
    for part in parts:
        first, last = max(begin, part.begin), min(end, part.end)
        if first < last:
            rows = part.file.get_slice(name)[first - part.begin : last - part.begin]
            target[first - begin : last - begin].copy_(rows)
