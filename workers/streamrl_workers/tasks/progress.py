"""What each worker of the pool is doing right now, in memory shared with the pool.

The worker writes (two stores, no system call); the pool reads, also after it has killed the worker. So the pool
knows which sample overran without a message per sample. Times are `time.monotonic()`, one clock for all processes of
a machine.
"""

import mmap
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import IO

_ROW = struct.Struct("<dqq")  # start (0 = idle), sample number since the worker began, stage
ROW_BYTES = 32

MAKING_ITEM = -1
"""Stage: the item is made; stages from 0 are the parts of the reward."""
PLAYING = -2
"""Stage: one call of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """A worker runs `stage` of its sample `number` since `started`."""

    started: float
    number: int
    stage: int


class ProgressTable:
    """One row for each worker."""

    def __init__(self, *, workers: int, fd: int | None = None) -> None:
        self._file: IO[bytes] | None = None
        if fd is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the table
            self._file.truncate(workers * ROW_BYTES)
            fd = self._file.fileno()
        self.fd = fd
        self._memory = mmap.mmap(fd, workers * ROW_BYTES)

    def enter(self, worker: int, *, number: int, stage: int) -> None:
        """The worker begins a stage."""
        _ROW.pack_into(self._memory, worker * ROW_BYTES, time.monotonic(), number, stage)

    def leave(self, worker: int) -> None:
        """The worker is between samples."""
        _ROW.pack_into(self._memory, worker * ROW_BYTES, 0.0, 0, 0)

    def doing(self, worker: int) -> Doing | None:
        """What the worker runs; None between samples."""
        started, number, stage = _ROW.unpack_from(self._memory, worker * ROW_BYTES)
        return Doing(started=started, number=number, stage=stage) if started else None

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        if self._file is not None:
            self._file.close()
