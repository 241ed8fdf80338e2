"""A device whose memory is counted tensor by tensor, with a limit of the test's choice."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):
    """Counts what tensors allocate while the context lasts, and raises torch's error beyond the limit."""

    def __init__(self, *, limit_bytes: int = 2**62) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._live: dict[int, int] = {}
        self._used = self._peak = 0

    def used_bytes(self) -> int:
        """Bytes of all tensors that live."""
        return self._used

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        self._peak = self._used

    def peak_bytes(self) -> int:
        """Largest `used_bytes` since the last reset."""
        return self._peak

    def free_bytes(self) -> int:
        """Bytes that new tensors may take."""
        return self._limit_bytes - self._used

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and count the storages that it returns."""
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        if self._used > self._limit_bytes:
            raise torch.OutOfMemoryError(f"{self._used} bytes of {self._limit_bytes}")
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self._used += storage.nbytes()
        self._peak = max(self._peak, self._used)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._used -= self._live.pop(key)
