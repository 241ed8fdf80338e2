"""A directory of tensors by the hashes of their bytes, on a node's disk or on a volume that many generators share; asked before the trainer.

    DIRECTORY/blake3/<hash>          the bytes of one tensor, of whatever version, job or trainer
    DIRECTORY/blake3/.partial-...    one that is being written

Owns the files: they are verified when they are read, written beside and renamed, and the oldest are removed. Does not own which tensors are
wanted (`pull.py`). There are no locks: equal names have equal bytes, so it does not matter who writes a file, who removes it, or who dies.

Invariants:
- What `read` gives hashes to its name and lies in memory of its own: nobody who writes to the directory can change it afterwards.
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
from typing import Any

from streamrl.errors import UserError
from streamrl.files import MissingFileError, directory_beneath, open_regular, replace_at
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.weights.hashing import HASH_ALGORITHM, bytes_hash, reserved

_MOST_FILES = 2**14
"""Small tensors of many versions would else fill a disk's inodes before its bytes."""
_PARTIAL = ".partial-"
_NAME = re.compile(rf"[0-9a-f]{{64}}|{re.escape(_PARTIAL)}\w{{8}}")
"""Of files that are ours to remove."""
_FORSAKEN_S = 3600.0
"""A partial file so much older than the newest file has no writer any more. By the times of the volume itself: clocks of nodes differ."""
_READABLE = 0o644
_SILENT = "has not answered yet; it is not asked until it has"

_log = logging.getLogger(__name__)


class WeightCache:
    """The tensors in one directory. All methods are called in one event loop."""

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
        self._clock = clock
        self._pull = 0
        self._left_s = self._charged_s = 0.0  # of this pull's time, and when it was counted last
        self._reads = 0  # that are waited for
        self._left_behind: list[Future[memoryview | None]] = []  # reads that nobody waits for any more
        self._waiting: Queue[tuple[int, str, Callable[[], None]] | None] = Queue(_MOST_FILES)
        self._writes_for: int | None = None  # the pull for which the thread is at work
        self._has_room = False  # known and used in the thread alone
        self._told: set[str] = set()
        threading.Thread(target=self._write_all, name="weight-cache", daemon=True).start()

    def begin(self, entries: Iterable[pb.TensorSlice], *, wait_s: float) -> None:
        """A pull of these begins: what an earlier one has not written is forgotten, and what is too much is removed.

        `wait_s`: for which it waits for reads, all in all. Reads at once count once.
        """
        self._forget()
        self._pull += 1
        self._left_s = wait_s
        sizes = {entry.hash.hex(): entry.size_bytes for entry in entries}
        self._waiting.put_nowait((self._pull, "prepared", lambda: self._make_room(sizes)))

    def shuffle(self, tensors: MutableSequence[Any]) -> None:
        """Bring them into an order of this process's own: of several that pull at once each finds what others have written."""
        self._random.shuffle(tensors)

    async def read(self, entry: pb.TensorSlice) -> memoryview | None:
        """The verified bytes of a tensor; None: they are to be had elsewhere."""
        if self._left_s <= 0 or not self._answers():
            return None
        self._charge(reads=1)
        reading = begin_in_thread(lambda: self._read(entry), name="weight-cache-read")
        try:
            async with asyncio.timeout(self._left_s):
                data = await asyncio.wrap_future(reading)
        except TimeoutError:
            self._tell(_SILENT)
            return None
        finally:
            self._charge(reads=-1)
            if not reading.done():
                self._left_behind.append(reading)
        if data is not None:
            self._was_read(len(data))
        return data

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

    def _charge(self, *, reads: int) -> None:
        """So many more are waited for; until now it was for as many as before."""
        now_s = self._clock()
        self._left_s -= (now_s - self._charged_s) if self._reads else 0.0
        self._charged_s = now_s
        self._reads += reads

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

    def _read(self, entry: pb.TensorSlice) -> memoryview | None:
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
        except MemoryError as error:
            self._tell(f"cannot be read: {error}")
            return None
        if is_whole and bytes_hash(data) == entry.hash:
            return data
        self._tell("has a file that is not what was written; such files are removed and written anew")
        self._tried("mended", lambda: self._remove(path.name))
        return None

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
