"""A directory of slices by the hashes of their bytes, on a node's disk or on a volume that many generators share: a `SliceSource`.

    DIRECTORY/blake3/<hash>          the bytes of one slice, of whatever version, job or trainer
    DIRECTORY/blake3/.partial-...    one that is being written

Owns the files: they are written beside and renamed, those that were damaged and the oldest are removed. Does not own which slices are
wanted, nor verifying them (`pull.py`). There are no locks: equal names have equal bytes, so it does not matter who writes a file, who removes it, or who dies.

Invariants:
- What `fill` gives lies in the puller's memory: a writer to the directory cannot change it afterwards.
- A pull waits for this directory no longer than it gives time for; errors are told in one line each. While a read hangs that is not waited for
  any more, nothing is read or written.
- Writing is behind the pull, in one thread; what is not written when the next pull begins is left out, and so is what comes while that thread
  still writes for an earlier pull. No buffer is kept longer, but the one that is being written.
- Nothing joins a thread of this file: a disk that hangs keeps no process from its end.
- At the beginning of a pull the files and what it will write have `most_bytes` at most, unless other writers have other bounds.
"""

import asyncio
import logging
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, MutableSequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, BinaryIO

from streamrl.errors import UserError
from streamrl.files import MissingFileError, directory_beneath, open_regular, replace_at
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.weights.hashing import HASH_ALGORITHM
from streamrl_workers.weights.source import BusyTime, SliceSource, WantedSlice

_MOST_FILES = 2**14
"""Small tensors of many versions would else fill a disk's inodes before its bytes."""
_PARTIAL = ".partial-"
_NAME = re.compile(rf"[0-9a-f]{{64}}|{re.escape(_PARTIAL)}\w{{8}}")
"""Of files that are ours to remove."""
_FORSAKEN_S = 3600.0
"""A partial file so much older than the newest file has no writer any more. By the times of the volume itself: clocks of nodes differ."""
_READABLE = 0o644
_PART_BYTES = 4 * 2**20
"""Read at once."""
_SILENT = "has not answered yet; it is not asked until it has"

_log = logging.getLogger(__name__)


class WeightCache(SliceSource):
    """The slices in one directory. All methods are called in one event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        most_bytes: int,
        name: str,
        was_read: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: of this process, by which its order differs from others'. `was_read` is told of bytes that came from here."""
        self._directory = directory
        self._files = directory / HASH_ALGORITHM
        self._most_bytes = most_bytes
        self._was_read = was_read
        self._random = random.Random(name)
        self._pull = 0
        self._clock = clock
        self._reading = BusyTime(clock)  # of this pull
        self._wait_s = 0.0  # the most of it
        self._left_behind: list[Future[bool]] = []  # reads that nobody waits for any more
        self._waiting: Queue[tuple[int, str, Callable[[], None]] | None] = Queue(_MOST_FILES)
        self._writes_for: int | None = None  # the pull for which the thread is at work
        self._has_room = False  # known and used in the thread alone
        self._told: set[str] = set()
        threading.Thread(target=self._write_all, name="weight-cache", daemon=True).start()

    def begin(self, entries: Iterable[pb.TensorSlice], *, wait_s: float) -> BusyTime:
        """Begin a pull of these: forget what an earlier one has not written, and remove what is too much. Returns the time of its reads.

        `wait_s`: maximum of that time.
        """
        self._forget()
        self._pull += 1
        self._wait_s, self._reading = wait_s, BusyTime(self._clock)
        sizes = {entry.hash.hex(): entry.size_bytes for entry in entries}
        self._waiting.put_nowait((self._pull, "prepared", lambda: self._make_room(sizes)))
        return self._reading

    def shuffle(self, tensors: MutableSequence[Any]) -> None:
        """Bring them into an order of this process's own: of several that pull at once each finds what others have written."""
        self._random.shuffle(tensors)

    async def fill(self, wanted: WantedSlice) -> bool:
        left_s = self._wait_s - self._reading.seconds
        if left_s <= 0 or not self._answers():
            return False
        target = _Target(wanted)
        with self._reading.running():
            reading = begin_in_thread(lambda: self._read(target), name="weight-cache-read")
            try:
                async with asyncio.timeout(left_s):
                    return await asyncio.wrap_future(reading)
            except TimeoutError:
                self._tell(_SILENT)
                return False
            finally:
                target.close()
                if not reading.done():
                    self._left_behind.append(reading)

    def accept(self, wanted: WantedSlice) -> None:
        self._was_read(wanted.entry.size_bytes)

    def refute(self, wanted: WantedSlice, *, got: bytes) -> None:
        self._mend(wanted.entry.hash.hex())

    def write(self, entry: pb.TensorSlice, data: memoryview) -> None:
        """Keep these verified bytes, later."""
        if self._writes_for in (None, self._pull) and self._answers():
            name = entry.hash.hex()
            with suppress(Full):  # more than there would be files
                self._waiting.put_nowait((self._pull, "written", lambda: self._write(name, data)))

    def close(self) -> None:
        """Begin nothing any more. If the process ends while a file is written, that is a file of a dead writer."""
        self._forget()
        self._waiting.put_nowait(None)

    def _answers(self) -> bool:
        self._left_behind = [reading for reading in self._left_behind if not reading.done()]
        if self._left_behind:
            self._tell(_SILENT)
        return not self._left_behind

    def _mend(self, name: str) -> None:
        self._tell("has a file that is not what was written; such files are removed and written anew")
        with suppress(Full):
            self._waiting.put_nowait((self._pull, "mended", lambda: self._remove(name)))

    def _forget(self) -> None:
        with suppress(Empty):
            while True:
                self._waiting.get_nowait()

    # ---- in threads

    def _write_all(self) -> None:
        for one in iter(self._waiting.get, None):
            self._writes_for, what, call = one
            self._tried(what, call)
            del one, call  # and with them the bytes
            self._writes_for = None

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

    def _read(self, target: "_Target") -> bool:
        path = self._files / target.wanted.entry.hash.hex()
        try:
            with open_regular(path, beneath=self._directory) as file:
                is_whole = target.take(file)
        except MissingFileError:
            return False
        except UserError as error:
            self._tell(f"cannot be read: {error.rule}")
            return False
        except OSError as error:
            self._tell(f"cannot be read: {error.strerror or error}")
            return False
        if not is_whole:
            self._mend(path.name)
        return is_whole

    def _remove(self, name: str) -> None:
        with directory_beneath(self._directory, self._files) as here:
            _unlink(name, here)

    def _make_room(self, sizes: dict[str, int]) -> None:
        """Make the files of `sizes` the newest ones, and remove the oldest others, as many as must go."""
        wanted_bytes = sum(sizes.values())
        self._has_room = False
        if wanted_bytes > self._most_bytes:
            self._tell(f"may hold {self._most_bytes} bytes, and one version has {wanted_bytes}: none is written")
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        with directory_beneath(self._directory, self._files, make=True) as here:
            for name in sizes:
                with suppress(FileNotFoundError, PermissionError):  # another user's file
                    os.utime(name, dir_fd=here, follow_symlinks=False)
            others = sorted(one for one in _found(here) if one[1] not in sizes)
            others_bytes = sum(size for _, _, size in others)
            for count, (_, name, size) in zip(range(len(others), 0, -1), others, strict=True):
                if wanted_bytes + others_bytes <= self._most_bytes and len(sizes) + count <= _MOST_FILES:
                    break
                _unlink(name, here)
                others_bytes -= size
        self._has_room = True

    def _write(self, name: str, data: memoryview) -> None:
        if not self._has_room:
            return
        with directory_beneath(self._directory, self._files) as here:
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=here, follow_symlinks=False)
                return  # another process was faster
            beside = f"{_PARTIAL}{secrets.token_hex(4)}"
            # without fsync: what a power cut leaves is verified like everything
            replace_at(here, name, data, beside=beside, mode=_READABLE, durable=False)


class _Target:
    """Memory that a read fills, as long as its puller waits: a disk that hangs may answer when others use it."""

    def __init__(self, wanted: WantedSlice) -> None:
        self.wanted = wanted
        self._lock = threading.Lock()
        self._is_open = True

    def close(self) -> None:
        """Take nothing more."""
        with self._lock:
            self._is_open = False

    def take(self, file: BinaryIO) -> bool:
        """Return whether the file has as many bytes as the slice; they are in its memory then, unless it was closed."""
        part = memoryview(bytearray(min(_PART_BYTES, len(self.wanted.buffer))))
        for begin in range(0, len(self.wanted.buffer), _PART_BYTES):
            some = part[: len(self.wanted.buffer) - begin]
            if file.readinto(some) != len(some):  # type: ignore[attr-defined] # of BufferedReader
                return False
            with self._lock:
                if not self._is_open:
                    return True
                self.wanted.buffer[begin : begin + len(some)] = some
        return not file.read(1)


def _found(directory: int) -> list[tuple[float, str, int]]:
    """(time, name, bytes) of our files, without those that a dead writer has left, which go."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime, entry.name, stat.st_size))
    newest_s = max((time_s for time_s, _, _ in found), default=0.0)
    forsaken = [one for one in found if one[1].startswith(_PARTIAL) and one[0] < newest_s - _FORSAKEN_S]
    for _, name, _ in forsaken:
        _unlink(name, directory)
    return [one for one in found if one not in forsaken]


def _unlink(name: str, directory: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
