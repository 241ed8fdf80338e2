"""The bytes by which a slice of a tensor differs from the same slice in an earlier version: made (`encode`), applied (`apply`).

    header   magic, bytes of an element, bytes of the tensor, hash of the base, hash of the result
    blocks   of `_BLOCK_ELEMENTS`: changed elements, bytes of gaps, bytes of each packed part; then the parts, packed by zstd:
             gaps | lowest bytes of the differences | next bytes | ...
    end      hash of all before

A gap is the number of unchanged elements before a changed one: bytes of 255 that go on, then one below. A difference is that of the elements
as integers, modulo 2^bits, its sign in the lowest bit. A block without gaps has a difference for each of its elements.

Pure: bytes in, bytes out. Does not own which versions there are deltas between, nor how they travel. The one place of `weights/` with numpy.

Invariants:
- `apply` writes nothing but the memory it is given, of the base's size; whatever a delta says, it takes some times a block's for each processor.
- A delta applies to its base alone: one that was applied already is refused.
"""

import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from streamrl_workers.weights.hashing import bytes_hash

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MOST_SHARE = 0.75
"""Of the tensor's bytes. A larger delta costs more time than it spares on all but the thinnest links."""
_BLOCK_ELEMENTS = 2**20
"""Large enough for zstd's tables to be nothing, small enough for all processors to have work and for their caches."""
_DENSE_SHARE = 0.25
"""Above it a code of whole bits says "unchanged" for less than gaps do."""
_WIDTHS = (1, 2, 4, 8)
_ESCAPE = 255
_PACKING: dict[int, int] = {zstd.CompressionParameter.compression_level: 1}
"""Higher levels look for repetitions, of which there are none: 1 to 5 % smaller, several times slower."""
_UNPACKING: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}

_MAGIC = b"SRLDELT1"
_HEADER = struct.Struct("<8sQQ32s32s")
_HASH_BYTES = 32

_Elements = npt.NDArray[Any]
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class DeltaError(ValueError):
    """This is no delta of this base: what is wrong with it."""


class _Head(NamedTuple):
    magic: bytes
    width: int
    size_bytes: int
    base_hash: bytes
    new_hash: bytes


def encode(
    base: memoryview, new: memoryview, *, width: int, base_hash: bytes, new_hash: bytes, most_share: float = MOST_SHARE
) -> bytes | None:
    """The delta from `base` to `new`, or None where that is not worth it.

    Args:
        base: bytes of the tensor in the version that pullers have.
        new: of the version that they want; equally many.
        width: bytes of an element, by which the tensor is read.
        base_hash: of `base`.
        new_hash: of `new`.
        most_share: None above this share of the tensor's bytes.
    """
    assert len(base) == len(new), "two versions of one tensor have one size"
    width = width if width in _WIDTHS and len(new) % width == 0 else 1
    head = _HEADER.pack(*_Head(_MAGIC, width, len(new), base_hash, new_hash))
    most_bytes = int(len(new) * most_share) - len(head) - _HASH_BYTES
    parts = [head]
    for block in _at_once(_coded, zip(_blocks(base, width), _blocks(new, width), strict=True)):
        parts.append(block)
        most_bytes -= len(block)
        if most_bytes < 0:
            return None
    parts.append(bytes_hash(memoryview(b"".join(parts))))
    return b"".join(parts)


def apply(delta: memoryview, *, base: memoryview, base_hash: bytes, new_hash: bytes, into: memoryview) -> None:
    """Write what `delta` makes of `base`. The caller verifies that it hashes to `new_hash`.

    Args:
        delta: as it arrived.
        base: bytes of the slice as it is held.
        base_hash: what `base` hashes to.
        new_hash: what is wanted.
        into: memory of equal size, which is undefined after an error. It may be `base` itself.

    Raises:
        DeltaError: damaged, not of this base, not to this result.
    """
    head = _head(delta)
    if head.base_hash != base_hash or head.size_bytes != len(base):
        raise DeltaError(f"it is for a base of {_short(head.base_hash)}, held is {_short(base_hash)}")
    if head.new_hash != new_hash:
        raise DeltaError(f"it makes {_short(head.new_hash)}, wanted is {_short(new_hash)}")
    assert len(into) == len(base), "two versions of one slice have one size"
    targets = _blocks(into, head.width)
    bodies = _bodies(delta[_HEADER.size : -_HASH_BYTES], elements=[len(one) for one in targets], width=head.width)
    for _ in _at_once(_decoded, zip(_blocks(base, head.width), targets, bodies, strict=True)):
        pass


def _head(delta: memoryview) -> _Head:
    if len(delta) < _HEADER.size + _HASH_BYTES:
        raise DeltaError(f"{len(delta)} bytes are no delta")
    head = _Head(*_HEADER.unpack_from(delta))
    if head.magic != _MAGIC or head.width not in _WIDTHS or head.size_bytes % head.width:
        raise DeltaError("its header is none of a delta")
    if bytes_hash(delta[:-_HASH_BYTES]) != delta[-_HASH_BYTES:]:
        raise DeltaError("damaged: it does not hash to its last bytes")
    return head


def _short(name: bytes) -> str:
    return name.hex()[:16]


def _blocks(data: memoryview, width: int) -> list[_Elements]:
    elements = np.frombuffer(data, dtype=f"<u{width}") if len(data) else np.empty(0, dtype=f"<u{width}")
    return [elements[begin : begin + _BLOCK_ELEMENTS] for begin in range(0, len(elements), _BLOCK_ELEMENTS)]


def _at_once(call: Callable[[_In], _Out], blocks: Iterable[_In]) -> Iterator[_Out]:
    """In order, on all processors where there are several: numpy, zstd and BLAKE3 let other threads run."""
    blocks = list(blocks)
    if len(blocks) <= 1:
        yield from map(call, blocks)
        return
    with ThreadPoolExecutor(min(len(blocks), os.cpu_count() or 1), thread_name_prefix="delta") as pool:
        try:
            yield from pool.map(call, blocks)
        finally:
            pool.shutdown(cancel_futures=True)


# ---- a block


def _sizes(width: int) -> struct.Struct:
    """Of a block: changed elements, bytes of gaps, packed bytes of gaps and of each plane."""
    return struct.Struct(f"<{3 + width}I")


def _coded(pair: tuple[_Elements, _Elements]) -> bytes:
    base, new = pair
    is_changed = base != new
    count = int(np.count_nonzero(is_changed))
    if count > _DENSE_SHARE * len(new):
        gaps, count = b"", len(new)
        differences = new - base
    else:
        places = np.flatnonzero(is_changed)
        gaps = _gaps(places)
        differences = new.take(places) - base.take(places)
    planes = _signs_last(differences).view(np.uint8).reshape(count, new.itemsize).T
    packed = [zstd.compress(part, options=_PACKING) if part else b"" for part in (gaps, *(p.tobytes() for p in planes))]
    return b"".join((_sizes(new.itemsize).pack(count, len(gaps), *map(len, packed)), *packed))


def _decoded(block: tuple[_Elements, _Elements, tuple[int, int, list[memoryview]]]) -> None:
    base, target, (count, gap_bytes, parts) = block
    target[:] = base
    if not count:
        return
    gaps, *planes = (
        _unpacked(part, size) for part, size in zip(parts, (gap_bytes, *[count] * len(parts)), strict=False)
    )
    differences = np.empty((count, target.itemsize), dtype=np.uint8)
    for number, plane in enumerate(planes):
        differences[:, number] = plane
    signed = _signs_first(differences.view(target.dtype).reshape(count))
    if gap_bytes:
        target[_places(gaps, count=count, elements=len(target))] += signed
    else:
        target += signed


def _bodies(data: memoryview, *, elements: list[int], width: int) -> Iterator[tuple[int, int, list[memoryview]]]:
    """(changed elements, bytes of gaps, packed parts) of each block."""
    sizes = _sizes(width)
    for block_elements in elements:
        if len(data) < sizes.size:
            raise DeltaError("it ends before its blocks do")
        count, gap_bytes, *part_bytes = sizes.unpack_from(data)
        data = data[sizes.size :]
        is_dense = not gap_bytes and count in (0, block_elements)
        if not is_dense and not (
            count <= gap_bytes and count <= block_elements and gap_bytes <= count + block_elements // _ESCAPE
        ):
            raise DeltaError(f"a block of {block_elements} elements has {count} changes in {gap_bytes} bytes of gaps")
        if sum(part_bytes) > len(data):
            raise DeltaError("it ends within a block")
        parts = []
        for size in part_bytes:
            parts.append(data[:size])
            data = data[size:]
        yield count, gap_bytes, parts
    if len(data):
        raise DeltaError(f"{len(data)} bytes follow its last block")


def _unpacked(part: memoryview, size: int) -> _Elements:
    if not size:
        return np.empty(0, dtype=np.uint8)
    try:
        frame = zstd.ZstdDecompressor(options=_UNPACKING)
        data = frame.decompress(part, max_length=size)
    except zstd.ZstdError as error:
        raise DeltaError(f"damaged: {error}") from None
    if len(data) != size or not frame.eof or frame.unused_data:
        raise DeltaError(f"a part of it does not unpack to {size} bytes")
    return np.frombuffer(data, dtype=np.uint8)


def _gaps(places: _Elements) -> bytes:
    gaps = np.diff(places, prepend=-1).astype(np.int32) - np.int32(1)
    long = np.flatnonzero(gaps >= _ESCAPE)  # few where there are many gaps
    escapes = gaps[long] // _ESCAPE
    gaps[long] -= escapes * _ESCAPE
    return np.insert(gaps.astype(np.uint8), np.repeat(long, escapes), _ESCAPE).tobytes()


def _places(gaps: _Elements, *, count: int, elements: int) -> _Elements:
    ends = np.flatnonzero(gaps != _ESCAPE)
    if len(ends) != count:
        raise DeltaError(f"its gaps name {len(ends)} elements, changed are {count}")
    places: _Elements = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)
    if places[-1] >= elements:
        raise DeltaError(f"its gaps lead to element {places[-1]} of {elements}")
    return places


def _signs_last(differences: _Elements) -> _Elements:
    """1, -1, 2, -2, .. as 2, 1, 4, 3, ..: small ones have empty upper bytes, whatever their sign."""
    signed = differences.view(differences.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _signs_first(coded: _Elements) -> _Elements:
    one = coded.dtype.type(1)
    differences: _Elements = (coded >> one) ^ (~(coded & one) + one)
    return differences
