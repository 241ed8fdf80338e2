"""Pulls what is announced, in the background.

`Puller` lets a running pull end when a newer version of the same trainer is announced, and keeps only the newest of those
that wait: where a pull takes longer than a step, a pull that newer versions ended would never come to its end. A pull of
another attempt is ended: those bytes are not wanted any more. The same version from another address is the same pull, which goes on from there.
A source that gives something else than the version counts like one that gives nothing: another one may have it.

Does not own how a version is pulled (`pull.py`).

Invariant: one pull runs, one version waits for it, one pulled version waits for the engine, each at most; versions become ready
in the order of their announcements.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import Backoff
from streamrl_workers.weights.address import BadSourceError, PullTimes, Route, WeightsError
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.pull import VersionGoneError

_RETRY_FIRST_S, _RETRY_LIMIT_S = 1.0, 10.0
"""Between two pulls of a version; each pull has tried for its own deadline before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Verified bytes of a version."""

    version: pb.VersionName
    tensors: dict[str, TensorBytes]
    fetch_s: float
    """For all of the pull."""
    times: PullTimes
    """Its parts."""
    at_s: float
    """When they were all there, by the monotonic clock."""


Pull = Callable[[Route], Awaitable[dict[str, TensorBytes]]]


class Puller:
    """Pulls what is announced; `wake` is called when a version is ready and when pulling ends, `failed` with each error, `stalled` when nothing comes."""

    def __init__(
        self,
        pull: Pull,
        *,
        wake: Callable[[], None],
        failed: Callable[[pb.VersionName, str], None],
        stalled: Callable[[pb.WeightsAvailable], None] = lambda _: None,
    ) -> None:
        self._pull = pull
        self._wake = wake
        self._failed = failed
        self._stalled = stalled
        self._route: Route | None = None
        """Of the pull that runs."""
        self._target: pb.WeightsAvailable | None = None
        """What the task pulls, or pulled last."""
        self._next: pb.WeightsAvailable | None = None
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

    def announce(self, target: pb.WeightsAvailable) -> None:
        """Pull `target` next, unless that is already being done or was done."""
        is_same = self._target is not None and self._target.version == target.version
        if self.pulling and self._target is not None and self._target.version.attempt == target.version.attempt:
            self._next = None if is_same else target
            if is_same and target != self._target:
                self._move(target)
            return
        if is_same and self.ready:
            return
        self._begin(target)

    def _begin(self, target: pb.WeightsAvailable) -> None:
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

    async def _until_had(self, target: pb.WeightsAvailable) -> None:
        """Until it is ready, is gone, or failed while a newer one waits."""
        backoff = Backoff(first_s=_RETRY_FIRST_S, limit_s=_RETRY_LIMIT_S)
        while True:
            begun_s = time.monotonic()
            self._route = Route(self._target or target, stalled=self._nothing_comes)
            try:
                tensors = await self._pull(self._route)
            except WeightsError as error:
                self._failed(target.version, str(error))
                if isinstance(error, BadSourceError):
                    self._stalled(self._route.target)
                if isinstance(error, VersionGoneError) or self._next is not None:
                    return  # asking again is pointless; a newer one is there or will be announced
                await backoff.pause()
                if self._next is not None:
                    return
            else:
                at_s = time.monotonic()
                self._ready = Pulled(
                    version=target.version,
                    tensors=tensors,
                    fetch_s=at_s - begun_s,
                    times=self._route.times,
                    at_s=at_s,
                )
                self._wake()
                return

    def _move(self, target: pb.WeightsAvailable) -> None:
        self._target = target
        if self._route is not None:
            self._route.move(target)

    def _nothing_comes(self, target: pb.WeightsAvailable) -> None:
        if self._next is not None:
            self._begin(self._next)
        else:
            self._stalled(target)
