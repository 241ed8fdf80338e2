"""Memory that another process of this machine can map: a file without a name.

Owns: its making, and where in it a tensor lies. Does not own who writes to it, or maps it. No torch, no numpy.

Nothing is left of it when the processes that have it have ended, however they end, and it needs no room in `/dev/shm`.
"""

import ctypes
import mmap
import os
from typing import Self

_NAME = "streamrl-weights"
"""In `/proc/<pid>/maps`."""


class SharedMemory(mmap.mmap):
    """The file and this process's mapping of it; both go with the last view of its bytes."""

    _fd: int
    _address: int

    @classmethod
    def of_size(cls, size_bytes: int) -> Self:
        """Return new memory, all zeros. Raises MemoryError: the system does not give it."""
        size_bytes = max(size_bytes, 1)
        try:
            fd = os.memfd_create(_NAME)
        except OSError as error:
            raise MemoryError(f"the system gives no shared memory: {error.strerror}") from None
        try:
            os.ftruncate(fd, size_bytes)
            made = cls(fd, size_bytes)
        except (OSError, OverflowError, ValueError):
            os.close(fd)
            raise MemoryError(f"the system gives no {size_bytes} bytes of shared memory") from None
        made._fd, made._address = fd, _address_of(memoryview(made))
        return made

    @property
    def path(self) -> str:
        """Where a process of the same user opens it, as long as it is here."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def offset_of(self, data: memoryview) -> int:
        """Return where these bytes of it begin."""
        return _address_of(data) - self._address

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def shared(size_bytes: int) -> memoryview:
    """Return memory as `hashing.reserved` does, which another process can map."""
    return memoryview(SharedMemory.of_size(size_bytes))[:size_bytes]


def shared_part(data: memoryview) -> tuple[SharedMemory, int] | None:
    """Return the shared memory in which these bytes lie, and where; None: they lie elsewhere."""
    memory = data.obj
    return (
        (memory, memory.offset_of(data))
        if isinstance(memory, SharedMemory) and data.nbytes and not data.readonly
        else None
    )


def _address_of(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
