"""Hands versions of the weights to the store and announces them, beside the step loop.

Owns: the thread that hashes, the order record-then-announce. Does not own: the copy of the weights (the engine makes
it), serving them.

Invariants:
- A version is announced only when the journal holds every step before it.
- One version is on its way at a time, so at most one copy of the weights waits here.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.trainer.session import Session
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.publisher import WeightStore


class Publishing:
    """Publishes in its own thread; use as a context."""

    def __init__(self, session: Session, *, store: WeightStore, attempt: int) -> None:
        self._session = session
        self._store = store
        self._attempt = attempt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer-publishing")
        self._current: Future[None] | None = None

    def begin(self, step: int, tensors: Mapping[str, TensorBytes]) -> None:
        """Publish version `step`; the version before must have been waited for."""
        assert self._current is None, "one version at a time"
        self._current = self._thread.submit(self._publish, step, tensors)

    def wait(self) -> None:
        """Until the version on its way is announced. It waits for the journal's record, which has a deadline."""
        if self._current is not None:
            current, self._current = self._current, None
            current.result()

    def _publish(self, step: int, tensors: Mapping[str, TensorBytes]) -> None:
        name = self._store.publish(attempt=self._attempt, step=step, tensors=tensors)
        size_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
        self._session.wait_recorded(step)
        self._session.publish(pb.Published(version=name, size_bytes=size_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=kind is None, cancel_futures=True)
