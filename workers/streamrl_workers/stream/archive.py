"""The archive: settled samples in segments, files of bounded size that are written once and read by anybody.

Owns the format, its digests and the bound of its bytes. Does not own which groups come in, nor when (the scheduler's journal).

    segment-00000007   | "SRLARCH1" | number, 8 bytes | chain of the segment before | frame | frame | ...
    frame              | head bytes, body bytes, raw bytes: 4 bytes each | digest of the body | chain | head | body |

Numbers are little-endian. The head is an `ArchivedGroup`, the body an `ArchivedSamples` under zlib, `raw bytes` its size before.
A body without zlib's first byte, which no `ArchivedSamples` begins with, is as it was: it is small, or does not shrink.
Earlier releases compressed every body, also those that grew by it.
A digest is BLAKE2b of 16 bytes. The chain is the digest of the chain before, the sizes, the body's digest and the head: so
whoever reads the heads alone knows that no group is missing, changed, or at another position, and reads only the bodies that it wants.

Invariants: what stands before a `ArchivePosition` that `sync` gave is on the disk; what stands behind the newest `ArchivePosition` was cut off while it was
written, and is no part of the archive. All segments together have at most `max_bytes`; the oldest go first.
"""

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from streamrl.errors import UserError
from streamrl.files import MissingFileError, open_regular, sync
from streamrl.proto import stream_pb2 as pb

_DIGEST_BYTES = 16
NO_CHAIN = bytes(_DIGEST_BYTES)
_MAGIC = b"SRLARCH1"
_HEADER = struct.Struct(f"<8sQ{_DIGEST_BYTES}s")
_FRAME = struct.Struct(f"<III{_DIGEST_BYTES}s{_DIGEST_BYTES}s")
_SIZES = struct.Struct("<III")
_NAME = re.compile(r"segment-(\d{8})")
MOST_HEAD_BYTES = 2**20
MOST_RAW_BYTES = 128 * 2**20
"""Of one group's samples; a larger group is left out. Whoever reads a foreign archive needs no more memory than this."""
_MOST_GROWTH_BYTES = 2**16
"""What zlib may have added to bytes that do not shrink."""
_SEGMENTS = 16
"""So many segments make up `max_bytes`: what goes at a time is a sixteenth."""
_MOST_SEGMENT_BYTES = 64 * 2**20
_WORD = 2**32
_SPREAD = 2654435769
"""2**32 over the golden ratio: multiples of it fall evenly (Knuth, The Art of Computer Programming, 6.4)."""
_LEVEL = 1
"""Of zlib: log-probs hardly shrink at any level, and texts do at this one."""
_ZLIB = b"\x78"
_LEAST_SHRUNK_BYTES = 2**12
"""Below, zlib takes a third of all that the archive takes, and a group saves less than a block of the disk."""


def is_archived(group_id: int, *, share_percent: int) -> bool:
    """Whether a group is of the share that is kept: the same ones in every process, spread evenly over the ids."""
    return group_id * _SPREAD % _WORD * 100 < share_percent * _WORD


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePosition:
    """A position in the archive: behind the last frame that counts."""

    segment: int = 0
    offset: int = 0
    """Bytes of that segment; 0: it has not been begun."""
    chain: bytes = NO_CHAIN


class ArchiveWriter:
    """Appends to an archive; one at a time. Every method raises `OSError` where the disk refuses."""

    def __init__(self, folder: Path, *, max_bytes: int, at: ArchivePosition) -> None:
        """What stands behind `at` is cut off."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = min(max_bytes // _SEGMENTS, _MOST_SEGMENT_BYTES)
        folder.mkdir(exist_ok=True)
        self._sizes = dict(_segments(folder))
        self._number, self._offset, self._chain = at.segment, at.offset, at.chain
        self._file: BinaryIO | None = None
        self._unsynced = False
        for number in [
            number for number in self._sizes if number > at.segment or (number == at.segment and not at.offset)
        ]:
            self._remove(number)
        if self._sizes.get(at.segment, 0) >= at.offset > 0:
            self._file = self._open(os.O_WRONLY)
            self._file.truncate(at.offset)
            self._file.seek(at.offset)
            self._sizes[at.segment] = at.offset
        elif at.offset:  # somebody has taken it away: the chain goes on in the next one
            self._number, self._offset = self._number + 1, 0

    def append(self, head: pb.ArchivedGroup, samples: pb.ArchivedSamples) -> bool:
        """Write a group; whether it has a size that the archive takes."""
        raw, head_data = samples.SerializeToString(deterministic=True), head.SerializeToString()
        if len(raw) > MOST_RAW_BYTES or len(head_data) > MOST_HEAD_BYTES:
            return False
        body = raw if len(raw) < _LEAST_SHRUNK_BYTES else min(raw, zlib.compress(raw, _LEVEL), key=len)
        frame_bytes = _FRAME.size + len(head_data) + len(body)
        if _HEADER.size + frame_bytes > self._max_bytes:
            return False
        file = self._with_room(frame_bytes)
        sizes, body_digest = _SIZES.pack(len(head_data), len(body), len(raw)), _digest(body)
        self._chain = _digest(self._chain, sizes, body_digest, head_data)
        file.write(b"".join((sizes, body_digest, self._chain, head_data, body)))
        self._grow(frame_bytes)
        return True

    def sync(self) -> ArchivePosition:
        """Bring it to the disk; the position behind it."""
        if self._file is not None and self._unsynced:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._unsynced = False
        return ArchivePosition(segment=self._number, offset=self._offset, chain=self._chain)

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _with_room(self, frame_bytes: int) -> BinaryIO:
        if self._file is not None and self._offset + frame_bytes > self._segment_bytes and self._offset > _HEADER.size:
            self.sync()
            self.close()
            self._number, self._offset = self._number + 1, 0
        if self._file is None:
            self._file = self._open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._file.write(_HEADER.pack(_MAGIC, self._number, self._chain))
            self._offset = 0
            self._grow(_HEADER.size)
            sync(self._folder)
        while sum(self._sizes.values()) + frame_bytes > self._max_bytes and len(self._sizes) > 1:
            self._remove(min(self._sizes))
        return self._file

    def _grow(self, size_bytes: int) -> None:
        self._unsynced = True
        self._offset += size_bytes
        self._sizes[self._number] = self._offset

    def _open(self, flags: int) -> BinaryIO:
        path = segment_path(self._folder, self._number)
        return os.fdopen(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "wb")

    def _remove(self, number: int) -> None:
        segment_path(self._folder, number).unlink(missing_ok=True)
        del self._sizes[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedEntry:
    """A group in the archive. Its head has been read and is what was written."""

    head: pb.ArchivedGroup
    path: Path
    beneath: Path
    body: tuple[int, int, int]
    """Its offset, its bytes, its bytes before they were compressed."""
    digest: bytes

    @property
    def segment(self) -> int:
        """Number of its segment."""
        return int(self.path.name.removeprefix("segment-"))

    @property
    def place(self) -> tuple[int, int]:
        """Its segment and where in it: rises with the order in which groups settled."""
        return self.segment, self.body[0]

    def samples(self) -> pb.ArchivedSamples:
        """Its samples. Raises `UserError`: they are not what was written, or their segment is gone."""
        offset, body_bytes, raw_bytes = self.body
        with open_regular(self.path, beneath=self.beneath) as file:
            file.seek(offset)
            data = file.read(body_bytes)
        if _digest(data) == self.digest:
            with contextlib.suppress(zlib.error, DecodeError):
                shrunk = data.startswith(_ZLIB)
                raw = zlib.decompressobj().decompress(data, raw_bytes + 1) if shrunk else data
                if len(raw) == raw_bytes:
                    return pb.ArchivedSamples.FromString(raw)
        raise _damaged(self.path, f"the samples of group {self.head.group_id} are not what was written")


def read_archive(
    folder: Path, *, beneath: Path, first: int = 0, end: ArchivePosition | None = None
) -> Iterator[ArchivedEntry]:
    """The groups of an archive in the order in which they settled, while somebody writes it too.

    Args:
        folder: holds the segments; there may be none.
        beneath: a folder above it whose content is foreign.
        first: segments of lower numbers are passed over.
        end: what stands behind is no part of it. None: it ends before the first frame of the newest segment that is cut off, or before that segment.

    Raises:
        UserError: a segment is not what was written.
    """
    segments = [number for number, _ in _segments(folder) if number >= first and (end is None or number <= end.segment)]
    chain: bytes | None = None
    for number in segments:
        path = segment_path(folder, number)
        is_last = end is not None and number == end.segment
        try:
            file = open_regular(path, beneath=beneath)
        except MissingFileError:
            chain = None  # its writer has just removed it: it was the oldest, and so were those before
            continue
        with file:
            segment = _Segment(
                file, path=path, beneath=beneath, stop=end.offset if end is not None and is_last else None
            )
            may_be_cut = end is None and number == segments[-1]
            if may_be_cut and not segment.has_header:
                return
            segment.begin(number, after=chain)
            yield from segment.entries(may_be_cut=may_be_cut)
        chain = segment.chain
        if end is not None and is_last and chain != end.chain:
            raise _damaged(path, "its end is not what was written")


def read_segment(folder: Path, number: int, *, beneath: Path, end: ArchivePosition) -> list[ArchivedEntry]:
    """The groups of one segment, held against each other and not against the segments before. Arguments and errors as of `read_archive`."""
    path = segment_path(folder, number)
    try:
        file = open_regular(path, beneath=beneath)
    except MissingFileError:
        return []  # its writer has just removed it
    with file:
        segment = _Segment(file, path=path, beneath=beneath, stop=end.offset if number == end.segment else None)
        segment.begin(number, after=None)
        return list(segment.entries(may_be_cut=False))


def segment_numbers(folder: Path, *, end: ArchivePosition) -> list[int]:
    """Of the segments that are there, oldest first."""
    return [number for number, _ in _segments(folder) if number <= end.segment and (number < end.segment or end.offset)]


class _Segment:
    """One that is being read; what stands behind `stop` is no part of it."""

    def __init__(self, file: BinaryIO, *, path: Path, beneath: Path, stop: int | None) -> None:
        self._file = file
        self._path = path
        self._beneath = beneath
        size_bytes = os.fstat(file.fileno()).st_size
        if stop is not None and stop > size_bytes:
            raise _damaged(path, f"it is cut off at byte {size_bytes}")
        self._end = size_bytes if stop is None else stop
        self.chain = NO_CHAIN

    @property
    def has_header(self) -> bool:
        """Whether its writer has brought so much of it to the file."""
        return self._end >= _HEADER.size

    def begin(self, number: int, *, after: bytes | None) -> None:
        """Read the header. `after`: the chain of the segment before, where it is there."""
        header = self._file.read(_HEADER.size).ljust(_HEADER.size, b"\0")
        magic, said, self.chain = _HEADER.unpack(header)
        if magic != _MAGIC or said != number or after not in (None, self.chain):
            raise _damaged(self._path, "it does not go on where the segment before ends")

    def entries(self, *, may_be_cut: bool) -> Iterator[ArchivedEntry]:
        """The frames. `may_be_cut`: the last one may not be whole."""
        offset = _HEADER.size
        while offset < self._end:
            frame = self._file.read(_FRAME.size)
            head_bytes, body_bytes, raw_bytes, body_digest, said = _FRAME.unpack(frame.ljust(_FRAME.size, b"\0"))
            body_offset = offset + _FRAME.size + head_bytes
            following = body_offset + body_bytes
            if len(frame) < _FRAME.size or following > self._end:
                if may_be_cut:
                    return
                raise _damaged(self._path, f"it is cut off behind byte {offset}")
            if head_bytes > MOST_HEAD_BYTES or max(raw_bytes, body_bytes - _MOST_GROWTH_BYTES) > MOST_RAW_BYTES:
                raise _damaged(self._path, f"what stands at byte {offset} is not what was written")
            data = self._file.read(head_bytes)
            self.chain = _digest(self.chain, frame[: _SIZES.size], body_digest, data)
            if self.chain != said:
                raise _damaged(self._path, f"what stands at byte {offset} is not what was written")
            yield ArchivedEntry(
                head=_head(data, path=self._path),
                path=self._path,
                beneath=self._beneath,
                body=(body_offset, body_bytes, raw_bytes),
                digest=body_digest,
            )
            offset = following
            self._file.seek(offset)


def _head(data: bytes, *, path: Path) -> pb.ArchivedGroup:
    try:
        return pb.ArchivedGroup.FromString(data)
    except DecodeError:
        raise _damaged(path, "a head in it is none") from None


def segment_path(folder: Path, number: int) -> Path:
    """Where a segment lies."""
    return folder / f"segment-{number:08d}"


def _segments(folder: Path) -> Iterator[tuple[int, int]]:
    """(number, bytes) of those that are there, oldest first."""
    found = sorted((int(match[1]), path) for path in folder.glob("segment-*") if (match := _NAME.fullmatch(path.name)))
    for number, path in found:
        yield number, path.lstat().st_size


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()


def _damaged(path: Path, rule: str) -> UserError:
    return UserError(
        field=str(path), rule=f"is damaged: {rule}", fix="restore it from a copy, or remove the folder archive"
    )
