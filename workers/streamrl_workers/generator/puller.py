"""Fetches the announced weights in the background.

Owns: the one pull task, which version comes next, retries. Does not own: how bytes are moved (`weights.client`),
putting them into the engine, which version a generator may use (the scheduler issues by the one that it is told of).

A pull that a newer version ended would never come to its end where a pull takes longer than a step. So a running pull
goes on when a newer version of the same trainer is announced: that one waits, and only the newest of those that wait is
kept. A pull of another trainer's attempt or address is ended: those bytes are not wanted any more.

Invariants: at most one pull is running, at most one version waits for it, at most one pulled version waits for the
engine; versions become ready in the order of their announcements.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import Backoff
from streamrl_workers.weights.errors import VersionGoneError, WeightsError
from streamrl_workers.weights.hashing import TensorBytes

_RETRY_FIRST_S, _RETRY_LIMIT_S = 1.0, 10.0
"""Between two pulls of a version; each pull has tried for its own deadline before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A version and where it can be had."""

    version: pb.VersionName
    address: str  # host:port


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Verified bytes of a version."""

    version: pb.VersionName
    tensors: dict[str, TensorBytes]
    fetch_s: float


Pull = Callable[[Announced], Awaitable[dict[str, TensorBytes]]]


class Puller:
    """Pulls what is announced; `wake` is called when a version is ready and when pulling ends, `failed` with each error."""

    def __init__(self, pull: Pull, *, wake: Callable[[], None], failed: Callable[[pb.VersionName, str], None]) -> None:
        self._pull = pull
        self._wake = wake
        self._failed = failed
        self._target: Announced | None = None
        """What the task pulls, or pulled last."""
        self._next: Announced | None = None
        """What it pulls afterwards."""
        self._task: asyncio.Task[None] | None = None
        self._ready: Pulled | None = None

    @property
    def pulling(self) -> bool:
        """Whether bytes are on their way."""
        return self._task is not None and not self._task.done()

    @property
    def ready(self) -> bool:
        """Whether a pulled version waits for the engine."""
        return self._ready is not None

    def announce(self, target: Announced) -> None:
        """Pull `target` next, unless that is already being done or was done."""
        if self.pulling and self._target is not None and _same_trainer(self._target, target):
            self._next = None if target == self._target else target
            return
        if target == self._target and self.ready:
            return
        self._target, self._next, self._ready = target, None, None
        self._task = asyncio.get_running_loop().create_task(
            self._replace(self._task), name=f"pull-{target.version.step}"
        )
        self._task.add_done_callback(lambda _: self._wake())

    def drop(self) -> None:
        """Nothing is wanted: the engine has what was announced last."""
        self._target = self._next = self._ready = None
        if self._task is not None:
            self._task.cancel()

    def take(self) -> Pulled:
        """The pulled version; it is the caller's now."""
        assert self._ready is not None, "nothing is ready"
        ready, self._ready = self._ready, None
        return ready

    def check(self) -> None:
        """Raise the fault that ended the pull task, if one did."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """End the pull task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _replace(self, old: "asyncio.Task[None] | None") -> None:
        if old is not None:
            old.cancel()
            await asyncio.wait({old})
        while self._target is not None:
            await self._until_had(self._target)
            if self._next is None:
                return
            self._target, self._next = self._next, None

    async def _until_had(self, target: Announced) -> None:
        """Until it is ready, is gone, or failed while a newer one waits."""
        backoff = Backoff(first_s=_RETRY_FIRST_S, limit_s=_RETRY_LIMIT_S)
        while True:
            begun_s = time.monotonic()
            try:
                tensors = await self._pull(target)
            except WeightsError as error:
                self._failed(target.version, str(error))
                if isinstance(error, VersionGoneError) or self._next is not None:
                    return  # asking again is pointless; a newer one is there or will be announced
                await backoff.pause()
                if self._next is not None:
                    return
            else:
                self._ready = Pulled(version=target.version, tensors=tensors, fetch_s=time.monotonic() - begun_s)
                self._wake()
                return


def _same_trainer(one: Announced, other: Announced) -> bool:
    return one.address == other.address and one.version.attempt == other.version.attempt
