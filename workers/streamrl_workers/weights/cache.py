"""A directory of tensors by the hashes of their bytes, on a node's disk or on a volume that many generators share; asked before the trainer.

    DIRECTORY/blake3/<hash>          the bytes of one tensor, of whatever version, job or trainer
    DIRECTORY/blake3/.partial-...    one that is being written

Owns the files: they are verified when they are read, written beside and renamed, and the oldest are removed. Does not own which tensors are
wanted (`pull.py`). There are no locks: equal names have equal bytes, so it does not matter who writes a file, who removes it, or who dies.

Invariants:
- What `read` gives hashes to its name and lies in memory of its own: nobody who writes to the directory can change it afterwards.
- No pull fails by this directory: errors are told in one line each, a disk that does not answer is asked no more.
- Writing is behind the pull, in one thread; what is not written when the next pull begins is left out.
- At the beginning of a pull the files and what it will write have `most_bytes` at most, unless other writers have other bounds.
"""

import asyncio
import logging
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterable, MutableSequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.files import MissingFileError, open_regular
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import HASH_ALGORITHM, bytes_hash, reserved

_MOST_FILES = 2**14
"""Small tensors of many versions would else fill a disk's inodes before its bytes."""
_PARTIAL = ".partial-"
_NAME = re.compile(rf"[0-9a-f]{{64}}|{re.escape(_PARTIAL)}\w+")
"""Of files that are ours to remove."""
_FORSAKEN_S = 3600.0
"""A partial file so much older than the newest file has no writer any more. By the times of the volume itself: clocks of nodes differ."""
_STALL_S, _SLOWEST_BYTES_S = 20.0, 16 * 2**20
"""A file that is not read in this time and at this pace is not worth to wait for."""
_READABLE = 0o644

_log = logging.getLogger(__name__)


class WeightCache:
    """The tensors in one directory. All methods are called in one event loop."""

    def __init__(self, directory: Path, *, most_bytes: int, name: str, was_read: Callable[[int], None]) -> None:
        """`name`: of this process, by which its order differs from others'. `was_read` is told of bytes that came from here."""
        self._directory = directory
        self._files = directory / HASH_ALGORITHM
        self._most_bytes = most_bytes
        self._was_read = was_read
        self._random = random.Random(name)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-cache")
        self._waiting: list[Future[None]] = []
        self._answers = True
        self._has_room = False  # known and used in the thread alone
        self._told: set[str] = set()

    def begin(self, entries: Iterable[pb.TensorEntry]) -> None:
        """A pull of these begins: what an earlier one has not written is forgotten, and what is too much is removed."""
        self._forget()
        sizes = {entry.hash.hex(): entry.size_bytes for entry in entries}
        self._later("prepared", lambda: self._make_room(sizes))

    def shuffle(self, tensors: MutableSequence[Any]) -> None:
        """Bring them into an order of this process's own: of several that pull at once each finds what others have written."""
        self._random.shuffle(tensors)

    async def read(self, entry: pb.TensorEntry) -> memoryview | None:
        """The verified bytes of a tensor; None: they are to be had elsewhere."""
        if not self._answers:
            return None
        try:
            async with asyncio.timeout(_STALL_S + entry.size_bytes / _SLOWEST_BYTES_S):
                data = await asyncio.to_thread(self._read, entry)
        except TimeoutError:
            self._answers = False
            self._tell("does not answer; it is not asked again")
            return None
        if data is not None:
            self._was_read(len(data))
        return data

    def write(self, entry: pb.TensorEntry, data: memoryview) -> None:
        """Keep these verified bytes, later."""
        self._later("written", lambda: self._write(self._files / entry.hash.hex(), data))

    def close(self) -> None:
        """Begin nothing any more; what is being written is finished."""
        self._forget()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        for one in self._waiting:
            one.cancel()
        self._waiting.clear()

    def _later(self, what: str, call: Callable[[], None]) -> None:
        self._waiting.append(self._thread.submit(self._tried, what, call))

    # ---- in threads

    def _tried(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            self._tell(f"cannot be {what}: {error.strerror or error}")

    def _tell(self, text: str) -> None:
        """Once in a life: a disk that is full says so for each tensor."""
        if text not in self._told:
            self._told.add(text)
            _log.warning("weight cache %s: %s. Weights come from the trainer instead", self._directory, text)

    def _read(self, entry: pb.TensorEntry) -> memoryview | None:
        path = self._files / entry.hash.hex()
        try:
            with open_regular(path, beneath=self._directory) as file:
                data = reserved(entry.size_bytes)
                is_whole = file.readinto(data) == entry.size_bytes and not file.read(1)  # type: ignore[attr-defined] # of BufferedReader
        except MissingFileError:
            return None
        except UserError as error:
            self._tell(f"cannot be read: {error.rule}")
            return None
        except OSError as error:
            self._tell(f"cannot be read: {error.strerror or error}")
            return None
        if is_whole and bytes_hash(data) == entry.hash:
            return data
        self._tell("has a file that is not what was written; such files are removed and written anew")
        self._tried("mended", lambda: path.unlink(missing_ok=True))
        return None

    def _make_room(self, sizes: dict[str, int]) -> None:
        """Make the files of `sizes` the newest ones, and remove the oldest others, as many as must go."""
        wanted_bytes = sum(sizes.values())
        self._has_room = False
        if wanted_bytes > self._most_bytes:
            self._tell(f"may hold {self._most_bytes} bytes, and one version has {wanted_bytes}: none is written")
            return
        self._files.mkdir(parents=True, exist_ok=True)
        for name in sizes:
            with suppress(FileNotFoundError, PermissionError):  # another user's file
                os.utime(self._files / name)
        others = sorted(one for one in self._found() if one[1] not in sizes)
        others_bytes = sum(size for _, _, size in others)
        for count, (_, name, size) in zip(range(len(others), 0, -1), others, strict=True):
            if wanted_bytes + others_bytes <= self._most_bytes and len(sizes) + count <= _MOST_FILES:
                break
            (self._files / name).unlink(missing_ok=True)
            others_bytes -= size
        self._has_room = True

    def _found(self) -> list[tuple[float, str, int]]:
        """(time, name, bytes) of our files, without those that a dead writer has left, which go."""
        found = []
        with os.scandir(self._files) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        found.append((stat.st_mtime, entry.name, stat.st_size))
        newest_s = max((time_s for time_s, _, _ in found), default=0.0)
        forsaken = [one for one in found if one[1].startswith(_PARTIAL) and one[0] < newest_s - _FORSAKEN_S]
        for _, name, _ in forsaken:
            (self._files / name).unlink(missing_ok=True)
        return [one for one in found if one not in forsaken]

    def _write(self, path: Path, data: memoryview) -> None:
        if not self._has_room or path.exists():  # somebody else was faster
            return
        handle, name = tempfile.mkstemp(dir=self._files, prefix=_PARTIAL)
        beside = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)  # without fsync: what a power cut leaves is verified like everything
                os.fchmod(handle, _READABLE)
            beside.rename(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
